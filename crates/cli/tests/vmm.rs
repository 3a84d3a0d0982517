//! `farpool vmm` as a user runs it: from the ready line to the signal. What it serves is tested in
//! crates/far/vmm/tests.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{ended, farpool};
use rustix::process::{Pid, Signal, kill_process};

/// A service of the binary, killed when dropped.
struct Service(Child, String);

impl Service {
    /// Starts it, and waits for its ready line.
    fn start(command: &mut Command) -> Service {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        output.read_line(&mut line).expect("a pipe");
        Service(child, line)
    }

    /// Ends it by a signal. Returns its exit code and what it said on standard error.
    fn ended_by(mut self, signal: Signal) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.0), signal).expect("a child");
        let mut said = String::new();
        let mut error = self.0.stderr.take().expect("a pipe");
        error.read_to_string(&mut said).expect("text");
        (self.0.wait().expect("a child").code(), said)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn blade(home: &Path) -> (Service, String) {
    let address = format!("unix://{}", home.join("blade.sock").display());
    let mut command = farpool(home);
    (Service::start(command.args(["blade", "--memory", "64MiB", "--listen", &address])), address)
}

#[test]
fn both_serve_until_a_signal_and_leave_no_socket() {
    let home = tempfile::tempdir().expect("a folder");
    let path = |name: &str| home.path().join(name).to_str().expect("a name").to_owned();
    let (_blade, address) = blade(home.path());
    let mut image = vec![0; 64 * 4096];
    image[5000..5003].fill(1);
    std::fs::write(path("image"), image).expect("written");
    let (image, socket, other) = (path("image"), path("vm.sock"), path("in.sock"));
    let firecracker =
        ["vmm", "firecracker", "--image", &image, "--listen", &socket, "--blade", &address];
    let service = Service::start(farpool(home.path()).args(firecracker));
    assert!(service.1.starts_with(&format!("ready: {socket}, 64 pages, 1 of")), "{}", service.1);
    let mut stranger = UnixStream::connect(&socket).expect("it listens");
    stranger.write_all(b"GET /").expect("sent");
    // It has been turned away once the connection is closed.
    let _ = stranger.read(&mut [0]);
    let (code, said) = service.ended_by(Signal::TERM);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("is not served: what connected does not speak"), "{said}");
    assert!(!Path::new(&socket).exists(), "no socket is left");
    let monitor = [
        "vmm",
        "cloud-hypervisor",
        "--snapshot",
        &socket,
        "--restore",
        &other,
        "--blade",
        &address,
    ];
    let service = Service::start(farpool(home.path()).args(monitor));
    assert!(service.1.starts_with("ready: snapshots at "), "{}", service.1);
    let (code, said) = service.ended_by(Signal::INT);
    assert_eq!(code, Some(0), "{said}");
    assert!(!Path::new(&socket).exists(), "no socket is left");
}

#[test]
fn what_is_no_image_or_has_no_room_is_told() {
    let home = tempfile::tempdir().expect("a folder");
    let path = |name: &str| home.path().join(name).to_str().expect("a name").to_owned();
    let (_blade, address) = blade(home.path());
    let (odd, large, socket) = (path("odd"), path("large"), path("vm.sock"));
    std::fs::write(&odd, vec![1; 4097]).expect("written");
    std::fs::write(&large, vec![1; 80 << 20]).expect("written");
    let folder = home.path().to_str().expect("a name");
    for (image, listen, expected) in [
        (&path("none"), &socket, "cannot be opened"),
        (&odd, &socket, "is no file of whole pages"),
        (&folder.to_owned(), &socket, "is no file of whole pages"),
        (&large, &socket, "no blade has 16 MiB left"),
        (&large, &odd, "is in use: another process listens there, or it is no socket"),
    ] {
        let words = ["vmm", "firecracker", "--image", image, "--listen", listen];
        let (code, _, said) = ended(farpool(home.path()).args(words).args(["--blade", &address]));
        assert_eq!(code, 1, "{said}");
        assert!(said.contains(expected), "{said:?} without {expected:?}");
        assert!(!Path::new(&socket).exists(), "no socket is left");
    }
}
