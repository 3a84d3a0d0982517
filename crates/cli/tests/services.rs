//! The blade as a service, tested through real sockets: start, counters, refusals, clean stop.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;

use common::{ended, farpool};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A blade that is killed if a test leaves it running.
struct Blade {
    child: Child,
    output: BufReader<ChildStdout>,
    listen: Vec<String>,
}

impl Blade {
    fn start(home: &Path, words: &[&str], notify: Option<&Path>) -> Blade {
        let mut command = farpool(home);
        command.args(["blade", "--memory", "64MiB", "--json"]).args(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(socket) = notify {
            command.env("NOTIFY_SOCKET", socket);
        }
        let mut child = command.spawn().expect("the blade starts");
        let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("it prints a line");
        let ready: Value = serde_json::from_str(&line).expect("the line is JSON");
        assert_eq!(ready["event"], "ready");
        assert_eq!(ready["memory_bytes"], 64 << 20);
        let listen = ready["listen"].as_array().expect("it says where it listens");
        let listen = listen.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        Blade { child, output, listen }
    }

    /// Ends the blade with a signal. Returns its exit code.
    fn stop(mut self, signal: Signal) -> Option<i32> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("the blade takes the signal");
        let status = self.child.wait().expect("the blade ends");
        let mut rest = String::new();
        self.output.read_line(&mut rest).expect("its output ends");
        assert_eq!(rest, "", "the ready line is all it prints on standard output");
        status.code()
    }
}

impl Drop for Blade {
    fn drop(&mut self) {
        // It has ended already in a test that passed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder for the test")
}

fn stat(home: &Path, addresses: &[&str]) -> (i32, Value) {
    let blades = addresses.iter().flat_map(|address| ["--blade", address]);
    let (code, text, _) = ended(farpool(home).args(["stat", "--json"]).args(blades));
    (code, serde_json::from_str(&text).expect("stat prints JSON"))
}

#[test]
fn a_blade_serves_on_all_its_addresses_and_removes_its_sockets_when_stopped() {
    for signal in [Signal::TERM, Signal::INT] {
        let home = home();
        let socket = home.path().join("run/blade.sock");
        let unix = format!("unix://{}", socket.display());
        let blade =
            Blade::start(home.path(), &["--listen", &unix, "--listen", "tcp://127.0.0.1:0"], None);
        let [_, tcp] = blade.listen.as_slice() else { panic!("two addresses: {:?}", blade.listen) };
        assert!(!tcp.ends_with(":0"), "the port that was chosen is shown: {tcp}");
        let (code, answer) = stat(home.path(), &[&unix, tcp]);
        assert_eq!(code, 0, "{answer}");
        for at in 0..2 {
            assert_eq!(answer["blades"][at]["capacity_bytes"], 64 << 20, "{answer}");
        }
        assert_eq!(blade.stop(signal), Some(0));
        assert!(!socket.exists(), "the socket file is removed");
    }
}

#[test]
fn garbage_closes_its_own_connection_only() {
    let home = home();
    let blade = Blade::start(home.path(), &["--listen", "tcp://127.0.0.1:0"], None);
    let address = blade.listen.first().expect("one address").clone();
    let mut stream = TcpStream::connect(address.trim_start_matches("tcp://")).expect("it listens");
    stream.write_all(&[0xee; 4096]).expect("it takes bytes");
    let mut rest = Vec::new();
    // The blade closes the connection, in order or with a reset.
    let _ = std::io::Read::read_to_end(&mut stream, &mut rest);
    let (code, answer) = stat(home.path(), &[&address]);
    assert_eq!(code, 0);
    assert_eq!(answer["blades"][0]["bad_frames"], 1, "{answer}");
    assert_eq!(blade.stop(Signal::TERM), Some(0));
}

#[test]
fn an_address_in_use_is_refused_by_name() {
    let home = home();
    let unix = format!("unix://{}", home.path().join("blade.sock").display());
    let blade = Blade::start(home.path(), &["--listen", &unix], None);
    let (code, _, error) =
        ended(farpool(home.path()).args(["blade", "--memory", "64MiB", "--listen", &unix]));
    assert_eq!(code, 1);
    assert!(error.contains(&unix), "{error}");
    let path = unix.trim_start_matches("unix://");
    UnixStream::connect(path).expect("the first blade still listens");
    assert_eq!(blade.stop(Signal::TERM), Some(0));
}

#[test]
fn systemd_is_told_when_the_blade_is_ready_and_when_it_stops() {
    let home = home();
    let path = home.path().join("notify.sock");
    let notify = UnixDatagram::bind(&path).expect("a socket to be told through");
    notify.set_read_timeout(Some(Duration::from_secs(60))).expect("a deadline");
    let blade = Blade::start(home.path(), &["--listen", "tcp://127.0.0.1:0"], Some(&path));
    let told = || {
        let mut message = [0; 64];
        let length = notify.recv(&mut message).expect("systemd is told");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    assert_eq!(told(), "READY=1");
    assert_eq!(blade.stop(Signal::TERM), Some(0));
    assert_eq!(told(), "STOPPING=1");
}

#[test]
fn a_blade_that_does_not_answer_is_shown_as_lost() {
    let home = home();
    let address = format!("unix://{}", home.path().join("nobody.sock").display());
    let (code, answer) = stat(home.path(), &[&address]);
    assert_eq!(code, 1);
    let error = answer["blades"][0]["error"].as_str().expect("it says why");
    assert!(error.contains(&address), "{error}");
}
