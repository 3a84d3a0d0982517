//! The last resort: a donor needs its memory back, and no other host has any. The program's data
//! goes into its own host's memory, or into a file if that is short, and back to the rack when the
//! rack has room again.

use std::process::{Command, Stdio};
use std::time::Duration;

use farpool_e2e::hog::Hog;
use farpool_e2e::rack::{Daemon, UNHELD};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{binaries, network, turn, wait_until};
use farpool_hosts::{Host, Hosts, Wiring};

const PATIENCE: Duration = Duration::from_secs(90);
/// Each host's memory.
const HOST_BYTES: u64 = 1 << 30;
/// Memory in use on a host so that it lends nothing any more, and takes no spill into its memory.
const HOG_BYTES: u64 = 760 << 20;
const OPS: &str = "discard,pipe,heap,file";

/// A lends to the program on B; the controller is on B, too. The fields are in the order in which
/// they must be dropped.
struct Two {
    node: Daemon,
    /// The node of B, which lends nothing. The rack knows B by it.
    _borrower: Daemon,
    url: String,
    _control: Daemon,
    folder: tempfile::TempDir,
    hosts: Hosts,
}

impl Two {
    fn start() -> Option<Two> {
        let hosts =
            network::make(Hosts::builder(2, Wiring::Direct).memory_limit_bytes(HOST_BYTES))?;
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("token"), "a-token-of-this-test").expect("token");
        let listen = format!("{}:7080", hosts[1].address());
        let store = format!("redb:{}", folder.path().join("control.redb").display());
        let start = |host: &Host, arguments: &[&str]| {
            Daemon::start_command(command(host, folder.path(), arguments), &[])
        };
        let control = ["control", "--listen", &listen, "--store", &store, "--allow-remote"];
        let control = start(&hosts[1], &control);
        let url = control.address.clone();
        let listen = format!("tcp://{}:7070", hosts[0].address());
        let node = ["node", "--control", &url, "--name", "A", "--donate", "512MiB"];
        let ends = ["--listen", &listen, "--allow-remote-tcp", "--drain-timeout", "100ms"];
        let node = start(&hosts[0], &[&node[..], &ends, &UNHELD].concat());
        let borrower = start(&hosts[1], &["node", "--control", &url, "--name", "B"]);
        let two = Two { node, _borrower: borrower, url, _control: control, folder, hosts };
        two.wait_until_lent(512 << 20);
        Some(two)
    }

    fn wait_until_lent(&self, bytes: u64) {
        wait_until("A lends", PATIENCE, || {
            let nodes = self.ask(&["node", "list"]);
            let mut nodes = nodes["nodes"].as_array()?.iter();
            let lends = |node: &serde_json::Value| node["lendable_bytes"].as_u64() >= Some(bytes);
            nodes.any(lends).then_some(())
        });
    }

    fn ask(&self, arguments: &[&str]) -> serde_json::Value {
        let control = ["--control", &self.url, "--json"];
        let mut command =
            command(&self.hosts[1], self.folder.path(), &[arguments, &control].concat());
        let output = command.stdin(Stdio::null()).output().expect("farpool");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// States of all segments.
    fn segments(&self) -> Vec<String> {
        let segments = self.ask(&["segment", "list"]);
        let segments = segments["segments"].as_array().expect("a list").clone();
        segments.iter().map(|segment| segment["state"].to_string()).collect()
    }

    fn program(&self, seconds: &str) -> Running {
        let directory = tempfile::tempdir().expect("directory");
        let stats = directory.path().join("stats.json");
        let words = ["run", "--local", "24MiB", "--pool", &self.url, "--host", "B"];
        let more = ["--quota", "256MiB", "--allow-remote-tcp"];
        let mut command =
            command(&self.hosts[1], self.folder.path(), &[&words[..], &more].concat());
        command.arg("--stats").arg(&stats);
        let mut running = Run::with(command, Some(stats), Some(directory))
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", "2", "--progress", "--seconds", seconds])
            .args(["--seed", "3", "--ops", OPS])
            .patience(Duration::from_secs(300))
            .start();
        running.wait_for_output("filled", 2);
        running
    }
}

fn command(host: &Host, folder: &std::path::Path, arguments: &[&str]) -> Command {
    let mut command = host.command(binaries::program("farpool"));
    command.args(arguments).arg("--token-file").arg(folder.join("token"));
    command
}

#[test]
fn into_memory_and_back_to_the_rack() {
    let _turn = turn();
    let Some(two) = Two::start() else {
        return;
    };
    let mut running = two.program("100");
    assert_eq!(two.segments(), ["\"ready\""]);
    let hog = Hog::start(&two.hosts[0], HOG_BYTES);
    wait_until("nothing of A's is used any more", PATIENCE, || {
        two.segments().is_empty().then_some(())
    });
    assert!(running.is_running(), "{}", running.stderr());
    let said = running.stderr();
    assert!(said.contains("no node has room") && said.contains("this machine's memory"), "{said}");
    drop(hog);
    wait_until("the rack has the data again", PATIENCE, || {
        (two.segments() == ["\"ready\""]).then_some(())
    });
    let pid = running.pid().to_string();
    wait_until("the spill is left", PATIENCE, || {
        let mut command = Command::new(binaries::program("farpool"));
        let output = command.args(["blades", &pid]).output().expect("farpool blades");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text.contains("tcp://") && !text.contains("spill.sock")).then_some(())
    });
    assert!(running.is_running(), "{}", running.stderr());
    let outcome = running.finish();
    outcome.require_success();
    outcome.require_far();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
    assert!(two.node.end());
}

#[test]
fn into_a_file_where_memory_is_short() {
    let _turn = turn();
    let Some(two) = Two::start() else {
        return;
    };
    let mut running = two.program("40");
    let _own = Hog::start(&two.hosts[1], HOG_BYTES);
    let _hog = Hog::start(&two.hosts[0], HOG_BYTES);
    wait_until("nothing of A's is used any more", PATIENCE, || {
        two.segments().is_empty().then_some(())
    });
    assert!(running.is_running(), "{}", running.stderr());
    let said = running.stderr();
    assert!(said.contains("it goes into a file in "), "{said}");
    let outcome = running.finish();
    outcome.require_success();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
}
