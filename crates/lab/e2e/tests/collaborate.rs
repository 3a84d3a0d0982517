//! Nodes that lend each other memory without a controller (ACMS, Samih 2011, figure 6): three hosts
//! with their own memory and addresses. A serves B's program; a big program starts on A; A takes
//! its memory back within the deadline, B's data moves to C, and every page of it is right. In
//! other tests a program and a donor are killed, a program does not move in time, and a key-value
//! server on B returns the memory that A needs and gets memory from C.

use std::process::Stdio;
use std::time::{Duration, Instant};

use farpool_e2e::hog::Hog;
use farpool_e2e::kv::Client;
use farpool_e2e::rack::{Daemon, UNHELD};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{binaries, network, tree, turn, wait_until};
use farpool_hosts::{Hosts, Wiring};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(90);
/// Each host's memory.
const HOST_BYTES: u64 = 1 << 30;
/// The part of it that the big program on A takes.
const HOG_BYTES: u64 = 650_000_000;
/// Memory in use on B that makes it a client, by the thresholds that B has here.
const SOME_BYTES: u64 = 70_000_000;
/// The memory that a node must offer before a program starts, so that the program gets it in one
/// piece.
const OFFER_BYTES: u64 = 400 << 20;
/// How long others have to move out of memory that a node needs back: the default of
/// `--reclaim-deadline`.
const RECLAIM_DEADLINE: Duration = Duration::from_secs(10);
/// The nodes' key, which is no secret here, and its file in the story's folder.
const RACK_KEY: &[u8] = b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n";
const RACK_KEY_FILE: &str = "rack.key";
const OPS: &str = "discard,pipe,heap,file";
const SEED: &str = "21";

struct Story {
    // Dropped in this order: programs and daemons before their hosts.
    some: Option<Hog>,
    nodes: Vec<Option<Daemon>>,
    folder: tempfile::TempDir,
    hosts: Hosts,
}

impl Story {
    fn start() -> Option<Story> {
        let hosts =
            network::make(Hosts::builder(3, Wiring::Bridge).memory_limit_bytes(HOST_BYTES))?;
        let folder = tempfile::tempdir().expect("folder");
        let key = folder.path().join(RACK_KEY_FILE);
        farpool_kernel::write_secret(&key, RACK_KEY).expect("a key");
        Some(Story { some: None, nodes: vec![None, None, None], folder, hosts })
    }

    /// Starts a node on a host. All others join A.
    fn join(&mut self, at: usize, thresholds: &[&str]) {
        let host = &self.hosts[at];
        let tcp = format!("tcp://{}:7070", host.address());
        let unix = format!("unix://{}", self.folder.path().join(host.name()).display());
        let first = format!("{}:7070", self.hosts[0].address());
        let mut command = host.command(binaries::program("farpool"));
        command.args(["node", "--collaborate", "--name", host.name(), "--allow-remote-tcp"]);
        command.args(["--listen", &tcp, "--listen", &unix, "--drain-timeout", "100ms"]);
        command.arg("--rack-key-file").arg(self.folder.path().join(RACK_KEY_FILE));
        command.args(UNHELD);
        if at != 0 {
            command.args(["--join", &first]);
        }
        self.nodes[at] = Some(Daemon::start_command(command, thresholds));
    }

    /// Starts a node that lends.
    fn join_server(&mut self, at: usize) {
        self.join(at, &[]);
        wait_until("the node offers", PATIENCE, || {
            (self.status(at)["offered_bytes"].as_u64() >= Some(OFFER_BYTES)).then_some(())
        });
    }

    /// Starts a node that never lends, and has no memory left for its own programs.
    fn join_client(&mut self, at: usize) {
        self.some = Some(Hog::start(&self.hosts[at], SOME_BYTES));
        self.join(at, &["--min", "1%:2%", "--max", "3%:4%"]);
        wait_until("the node is a client", PATIENCE, || {
            (self.status(at)["class"] == "client").then_some(())
        });
    }

    /// A node's status, requested on its host.
    fn status(&self, at: usize) -> Value {
        let script = "exec 3<>/dev/tcp/127.0.0.1/7081 && \
                      printf 'GET /v1/status HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3";
        let mut command = self.hosts[at].command("bash");
        let answer = command.args(["-c", script]).stdin(Stdio::null()).output().expect("bash");
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        let body = text.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
        serde_json::from_str(body).unwrap_or(Value::Null)
    }

    /// Whether all memory that B's programs have borrowed is ready and on this host.
    fn is_all_on(&self, host: usize) -> bool {
        let blade = format!("{}:7070", self.hosts[host].address());
        let status = self.status(1);
        let borrowed = status["borrowed"].as_array().cloned().unwrap_or_default();
        let is_there = |grant: &Value| grant["node"] == *blade && grant["state"] == "ready";
        !borrowed.is_empty() && borrowed.iter().all(is_there)
    }

    fn wait_for_all_on(&self, host: usize, what: &str) {
        wait_until(what, PATIENCE, || self.is_all_on(host).then_some(()));
    }

    /// Waits until a node has lent nothing, and its blade holds no memory of others.
    fn wait_until_free(&self, at: usize, what: &str) {
        wait_until(what, PATIENCE, || {
            let status = self.status(at);
            let is_free = status["lent_bytes"] == 0 && status["lent_used_bytes"] == 0;
            is_free.then_some(())
        });
    }

    /// Ends the programs normally, as if their time were over.
    fn end_programs(&self) {
        std::fs::write(self.folder.path().join("over"), "").expect("a file");
    }

    /// Starts a program on B that checks every page it reads, until it is told to end.
    fn program(&self) -> Running {
        let directory = tempfile::tempdir().expect("directory");
        let stats = directory.path().join("stats.json");
        let mut command = self.hosts[1].command(binaries::program("farpool"));
        command.args(["run", "--local", "24MiB", "--pool", "http://127.0.0.1:7081"]);
        command.args(["--quota", "192MiB", "--allow-remote-tcp", "--stats"]).arg(&stats);
        let mut running = Run::with(command, Some(stats), Some(directory))
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", "2", "--progress", "--seconds", "600"])
            .args(["--seed", SEED, "--ops", OPS, "--until"])
            .args([self.folder.path().join("over")])
            .patience(Duration::from_secs(180))
            .start();
        running.wait_for_output("filled", 2);
        running
    }
}

#[test]
fn a_node_takes_its_memory_back_and_the_data_moves_to_another() {
    let _turn = turn();
    let Some(mut story) = Story::start() else {
        return;
    };
    story.join_server(0);
    story.join_client(1);
    let mut running = story.program();
    story.wait_for_all_on(0, "B's data is on A");
    story.join_server(2);
    let hog = Hog::start(&story.hosts[0], HOG_BYTES);
    story.wait_for_all_on(2, "B's data has moved from A to C");
    story.wait_until_free(0, "A's blade is empty");
    assert!(running.is_running(), "stderr: {}", running.stderr());
    assert_eq!(story.status(0)["grants_cut_off"], 0, "within the deadline");
    assert_eq!(story.status(1)["grants_lost"], 0);
    story.end_programs();
    let outcome = running.finish();
    outcome.require_success();
    outcome.require_far();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
    story.wait_until_free(2, "C's memory is free when the program has ended");
    drop(hog);
}

#[test]
fn what_a_killed_program_had_comes_back_and_a_killed_donor_gives_no_wrong_data() {
    let _turn = turn();
    let Some(mut story) = Story::start() else {
        return;
    };
    story.join_server(0);
    story.join_client(1);
    let killed = story.program();
    story.wait_for_all_on(0, "B's data is on A");
    tree::end(killed.pid());
    story.wait_until_free(0, "A's memory is free when the program's lease is over");
    drop(killed);
    let unlucky = story.program();
    story.wait_for_all_on(0, "B's data is on A again");
    if let Some(donor) = &mut story.nodes[0] {
        donor.kill();
    }
    unlucky.finish().require_lost(&format!("tcp://{}:7070", story.hosts[0].address()));
}

#[test]
fn who_does_not_move_in_time_is_cut_off_and_says_what_it_lost() {
    let _turn = turn();
    let Some(mut story) = Story::start() else {
        return;
    };
    story.join_server(0);
    story.join_client(1);
    let stuck = story.program();
    let mut other = story.program();
    story.wait_for_all_on(0, "the data of both is on A");
    story.join_server(2);
    // The keeper is stopped, too, so that nothing of this program receives the request to move.
    stuck.pause(true, true);
    let hog = Hog::start(&story.hosts[0], HOG_BYTES);
    wait_until("B's programs shall move", PATIENCE, || {
        let status = story.status(1);
        status["borrowed"].as_array()?.iter().any(|grant| grant["state"] == "moving").then_some(())
    });
    let told = Instant::now();
    story.wait_until_free(0, "A has its memory back");
    assert!(told.elapsed() < 2 * RECLAIM_DEADLINE, "after {:?}", told.elapsed());
    // Which of the two counts it depends on whose clock was first.
    let (cut_off, lost) = (&story.status(0)["grants_cut_off"], &story.status(1)["grants_lost"]);
    assert!(*cut_off != 0 || *lost != 0, "nothing was left in time: {cut_off} {lost}");
    assert!(other.is_running(), "stderr: {}", other.stderr());
    stuck.pause(false, true);
    stuck.finish().require_lost(&format!("tcp://{}:7070", story.hosts[0].address()));
    story.wait_for_all_on(2, "the other's data has moved to C");
    story.end_programs();
    let outcome = other.finish();
    outcome.require_success().require_far();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
    drop(hog);
}

/// Far memory that the key-value server requests, and a number of keys for which its memory is too
/// small.
const FAR_BYTES: u64 = 128 << 20;
const KEYS: usize = 60_000;

fn fill(client: &mut Client, version: u32) {
    wait_until("most items are kept", PATIENCE, || {
        client.store(0..KEYS, version);
        (client.check(0..KEYS, version) > KEYS * 8 / 10).then_some(())
    });
}

#[test]
fn a_key_value_server_gives_back_what_a_donor_needs() {
    let _turn = turn();
    let Some(mut story) = Story::start() else {
        return;
    };
    story.join_server(0);
    story.join_client(1);
    let socket = story.folder.path().join("kv.sock");
    let mut command = story.hosts[1].command(binaries::program("farpool"));
    command.args(["kv", "-t", "2", "--memory", "16MiB", "--far", "128MiB", "--allow-remote-tcp"]);
    command.args(["--pool", "http://127.0.0.1:7081", "-s"]).arg(&socket);
    let kv = Daemon::start_command(command, &[]);
    let mut client = Client::at(&socket);
    let has_all = |client: &mut Client, what: &str| {
        wait_until(what, PATIENCE, || {
            (client.figure("far_granted_bytes") >= FAR_BYTES).then_some(())
        });
    };
    has_all(&mut client, "A lends");
    story.wait_for_all_on(0, "all of it");
    fill(&mut client, 1);
    let before = client.figure("far_items");
    assert!(before > KEYS as u64 / 2, "{before}");
    story.join_server(2);
    let hog = Hog::start(&story.hosts[0], HOG_BYTES);
    wait_until("A wants its memory back", PATIENCE, || {
        client.check(0..KEYS, 1);
        (client.figure("far_reclaims") > 0).then_some(())
    });
    story.wait_until_free(0, "A's blade is empty");
    assert_eq!(story.status(0)["grants_cut_off"], 0, "within the deadline");
    assert_eq!(client.figure("far_grants_lost"), 0);
    let kept = client.check(0..KEYS, 1);
    let moved = client.figure("far_reclaimed_moved");
    eprintln!("{kept} of {KEYS} were kept, {moved} moved");
    has_all(&mut client, "C lends");
    story.wait_for_all_on(2, "all of it on C");
    fill(&mut client, 2);
    assert!(kv.end(), "it ends in order");
    story.wait_until_free(2, "C has its memory back");
    drop(hog);
}
