//! The story of the collaborating rack (ACMS, Samih 2011, figure 6), with a controller: five hosts with memory and
//! addresses of their own. A serves B's program; a big program starts on A; A takes its memory back, B's data moves
//! to another host, and A's program borrows in its turn.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use farpool_e2e::rack::Daemon;
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{binaries, network, tree, turn, wait_until};
use farpool_hosts::{Host, Hosts, Wiring};

const PATIENCE: Duration = Duration::from_secs(60);
/// Each host's memory.
const HOST_BYTES: u64 = 1 << 30;
/// What the big program on A takes of it.
const HOG_BYTES: &str = "650000000";
const OPS: &str = "discard,pipe,heap,file";

struct Story {
    // Ended in this order: programs and daemons before their hosts.
    nodes: Vec<Daemon>,
    _control: Daemon,
    url: String,
    token: std::path::PathBuf,
    _folder: tempfile::TempDir,
    hosts: Hosts,
}

impl Story {
    fn start() -> Option<Story> {
        let hosts =
            network::make(Hosts::builder(5, Wiring::Bridge).memory_limit_bytes(HOST_BYTES))?;
        let folder = tempfile::tempdir().expect("folder");
        let token = folder.path().join("token");
        std::fs::write(&token, "a-token-of-this-test").expect("token");
        let listen = format!("{}:7080", hosts[4].address());
        let store = format!("redb:{}", folder.path().join("control.redb").display());
        let command = hosts[4].command(binaries::program("farpool"));
        let arguments = ["control", "--listen", &listen, "--store", &store, "--allow-remote"];
        let secret = ["--token-file", token.to_str().expect("path")];
        let control = Daemon::start_command(command, &[&arguments[..], &secret].concat());
        let url = control.address.clone();
        Some(Story { nodes: Vec::new(), _control: control, url, token, _folder: folder, hosts })
    }

    fn farpool(&self, host: &Host, arguments: &[&str]) -> Command {
        let mut command = host.command(binaries::program("farpool"));
        command.args(arguments).arg("--token-file").arg(&self.token);
        command
    }

    /// Starts a node on a host and waits until it lends.
    fn join(&mut self, at: usize) {
        let host = &self.hosts[at];
        let listen = format!("tcp://{}:7070", host.address());
        let arguments = [
            "node",
            "--control",
            &self.url,
            "--name",
            host.name(),
            "--donate",
            "512MiB",
            "--listen",
            &listen,
            "--allow-remote-tcp",
            "--drain-timeout",
            "100ms",
        ];
        let command = self.farpool(host, &arguments);
        let name = host.name().to_owned();
        let node = Daemon::start_command(command, &[]);
        self.nodes.push(node);
        wait_until("the node lends", PATIENCE, || {
            let nodes = self.ask(&["node", "list"]);
            let node = nodes["nodes"].as_array()?.iter().find(|node| node["name"] == name)?.clone();
            (node["lendable_bytes"].as_u64() >= Some(512 << 20)).then_some(())
        });
    }

    fn ask(&self, arguments: &[&str]) -> serde_json::Value {
        let control = ["--control", &self.url, "--json"];
        let mut command = self.farpool(&self.hosts[4], &[arguments, &control].concat());
        let output = command.stdin(Stdio::null()).output().expect("farpool");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn program(&self, at: usize, seed: u64) -> Running {
        let directory = tempfile::tempdir().expect("directory");
        let stats = directory.path().join("stats.json");
        let host = &self.hosts[at];
        let arguments = [
            "run",
            "--local",
            "24MiB",
            "--pool",
            &self.url,
            "--host",
            host.name(),
            "--rate",
            "256MiB",
            "--quota",
            "256MiB",
            "--allow-remote-tcp",
        ];
        let mut command = self.farpool(host, &arguments);
        command.arg("--stats").arg(&stats);
        let mut running = Run::with(command, Some(stats), Some(directory))
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", "2", "--progress", "--seconds", "20"])
            .args(["--seed", &seed.to_string(), "--ops", OPS])
            .patience(Duration::from_secs(150))
            .start();
        running.wait_for_output("filled", 2);
        running
    }

    /// The node that has the ready memory of a host's program.
    fn place_of(&self, host: usize) -> Option<String> {
        let segments = self.ask(&["segment", "list"]);
        let is_ours = |it: &&serde_json::Value| {
            it["host"] == self.hosts[host].name() && it["state"] == "ready"
        };
        let segment = segments["segments"].as_array()?.iter().find(is_ours)?.clone();
        Some(segment["place"]["node"].as_str()?.to_owned())
    }
}

/// A program that takes much memory of its host and keeps it.
struct Hog(Child);

impl Hog {
    fn start(host: &Host) -> Hog {
        let mut command = host.command("sh");
        let script = format!("(head -c {HOG_BYTES} /dev/zero; sleep 600) | tail");
        command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null());
        Hog(command.spawn().expect("sh"))
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        tree::end(self.0.id());
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_takes_its_memory_back_and_becomes_a_client() {
    let _turn = turn();
    let Some(mut story) = Story::start() else {
        return;
    };
    story.join(0);
    // Only A lends, so A serves B's program. B and C are hosts that lend nothing yet.
    let registered = ["node", "list"];
    let mut running = {
        story.join(1);
        story.program(1, 11)
    };
    assert_eq!(story.place_of(1).as_deref(), Some("A"), "{}", story.ask(&registered));
    story.join(2);
    let hog = Hog::start(&story.hosts[0]);
    wait_until("B's data has moved from A to C", PATIENCE, || {
        (story.place_of(1).as_deref() == Some("C")).then_some(())
    });
    assert!(running.is_running(), "stderr: {}", running.stderr());
    // A has become a client: its own program's far memory lies on another host.
    let own = story.program(0, 12);
    let place = story.place_of(0);
    assert!(place.as_deref().is_some_and(|node| node != "A"), "{place:?}");
    for (name, program) in [("B", running), ("A", own)] {
        let outcome = program.finish();
        outcome.require_success();
        outcome.require_far();
        assert!(!outcome.stderr.contains("lost"), "{name}: {}", outcome.stderr);
    }
    drop(hog);
}
