//! Copies of far memory whose places a rack chooses: nodes are killed one after the other, and come
//! back empty, while a program checks every page that it reads.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use farpool_e2e::ports::free_address;
use farpool_e2e::rack::{Daemon, answer};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{turn, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);
/// Copying is slow on purpose while the program uses its far memory, and a node has its name again
/// 5 s after its death.
const COPYING: Duration = Duration::from_secs(120);
const NAMES: [&str; 6] = ["n0", "n1", "n2", "n3", "n4", "n5"];
const DONATED: &str = "512MiB";
/// The program's host, which lends to itself last.
const HOST: &str = "n0";
/// Shortest time between two deaths.
const GAP: Duration = Duration::from_secs(5);
/// How long nodes are killed, in seconds, if not as long as in `make test`.
const SECONDS_VARIABLE: &str = "FARPOOL_RACK_SECONDS";
const SECONDS: u64 = 30;

struct Rack {
    control: Daemon,
    nodes: Vec<Option<Daemon>>,
    folder: tempfile::TempDir,
}

impl Rack {
    fn start(count: usize) -> Rack {
        let folder = tempfile::tempdir().expect("folder");
        let listen = free_address().to_string();
        let control = Daemon::control(&listen, &folder.path().join("control.redb"));
        let mut rack = Rack { control, nodes: Vec::new(), folder };
        for name in &NAMES[..count] {
            rack.nodes.push(Some(Daemon::node(&rack.control.address, name, DONATED)));
        }
        wait_until("all nodes lend", PATIENCE, || (rack.lending() == count).then_some(()));
        rack
    }

    /// How many nodes are up and lend.
    fn lending(&self) -> usize {
        let nodes = answer(&self.control.address, &["node", "list"]);
        let lends = |node: &&serde_json::Value| {
            node["state"] == "up" && node["lendable_bytes"].as_u64() >= Some(512 << 20)
        };
        nodes["nodes"].as_array().map_or(0, |nodes| nodes.iter().filter(lends).count())
    }

    /// Kills a node; another one of its name starts, empty, and is taken once the first is missed.
    fn replace(&mut self, at: usize) {
        if let Some(mut node) = self.nodes[at].take() {
            node.kill();
        }
        self.nodes[at] = Some(Daemon::node(&self.control.address, NAMES[at], DONATED));
    }

    /// The nodes that the program may have memory on, also while it moves: a node takes its memory
    /// back when the machine is short of it.
    fn used(&self) -> Vec<String> {
        let segments = answer(&self.control.address, &["segment", "list"]);
        let segments = segments["segments"].as_array().cloned().expect("a list");
        let is_there = |it: &&serde_json::Value| it["state"] == "ready" || it["state"] == "moving";
        let places = segments.iter().filter(is_there);
        let places = places.flat_map(|it| [&it["place"]["node"], &it["target"]["place"]["node"]]);
        let nodes: BTreeSet<&str> = places.filter_map(serde_json::Value::as_str).collect();
        nodes.into_iter().map(str::to_owned).collect()
    }

    fn run(&self) -> Run {
        let pool = ["--pool", &self.control.address, "--host", HOST];
        Run::far("16MiB").args(pool).redundancy("2")
    }

    /// A program of 64 MiB that runs until it is told to end.
    fn checker(&self, operations: &str) -> Running {
        let mut running = self
            .run()
            .args(["--quota", "512MiB"])
            .own_program("farpool-stress")
            .args(["--mib", "64", "--threads", "2", "--progress", "--seed", "23"])
            .args(["--seconds", "86400", "--ops", operations, "--until"])
            .arg(self.folder.path().join("over"))
            .patience(PATIENCE * 4)
            .start();
        running.wait_for_output("filled", 2);
        running.wait_until_far();
        running
    }

    /// All that the program read was right, to the end.
    fn finish(&self, running: Running) {
        std::fs::write(self.folder.path().join("over"), "").expect("a file");
        let outcome = running.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    }
}

fn degraded(running: &Running) -> Option<u64> {
    running.told()?["total"]["degraded_superpages"].as_u64()
}

/// Waits until the program has all copies.
fn wait_for_copies(running: &mut Running) {
    wait_until("all copies to be there", COPYING, || {
        assert!(running.is_running(), "{}", running.stderr());
        (degraded(running)? == 0).then_some(())
    });
}

fn seconds() -> u64 {
    let given = std::env::var(SECONDS_VARIABLE).ok();
    given.map_or(SECONDS, |text| text.parse().expect("a number of seconds"))
}

/// One node after the other dies, each once the copies that the last one cost are made again.
#[test]
fn nodes_of_a_rack_die_one_after_the_other() {
    let _turn = turn();
    let mut rack = Rack::start(NAMES.len());
    let mut running = rack.checker("discard,heap,pipe,protect");
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds()));
    let (mut deaths, mut hits, mut slowest) = (0, 0, Duration::ZERO);
    let mut last = usize::MAX;
    while begun.elapsed() < length {
        let used = wait_until("memory in use", PATIENCE, || {
            let mut used = rack.used();
            // The controller believes in it for 5 s.
            used.retain(|name| NAMES.get(last) != Some(&name.as_str()));
            Some(used).filter(|used| !used.is_empty())
        });
        // Each fourth time any node, else one that the program uses.
        let any = NAMES[deaths % NAMES.len()];
        let name = if deaths % 4 == 3 { any } else { &used[deaths % used.len()] };
        let at = NAMES.iter().position(|it| *it == name).expect("a node of ours");
        let is_hit = used.iter().any(|name| name == NAMES[at]);
        let died = Instant::now();
        rack.replace(at);
        last = at;
        (deaths, hits) = (deaths + 1, hits + usize::from(is_hit));
        if is_hit {
            wait_until("the loss to be noticed", PATIENCE, || {
                let still = rack.used().iter().any(|name| name == NAMES[at]);
                assert!(running.is_running(), "{}", running.stderr());
                (degraded(&running)? > 0 || !still).then_some(())
            });
            wait_for_copies(&mut running);
            slowest = slowest.max(died.elapsed());
        }
        println!("death {deaths} of {used:?}: {} ({is_hit}), {:?}", NAMES[at], died.elapsed());
        wait_until("the next death", PATIENCE, || (died.elapsed() >= GAP).then_some(()));
    }
    println!("{deaths} deaths, {hits} of nodes in use; copies again after {slowest:?} at most");
    assert!(hits > 0, "{deaths} deaths");
    rack.finish(running);
}

/// A drain takes a copy to a node that has none, also to the host's own; then the other may die.
#[test]
fn a_drained_node_gives_its_copies_to_one_without_any() {
    let _turn = turn();
    let mut rack = Rack::start(3);
    let mut running = rack.checker("discard,heap,pipe,protect");
    wait_for_copies(&mut running);
    let used = rack.used();
    assert!(used.len() == 2 && !used.iter().any(|it| it == HOST), "{used:?}");
    let task = answer(&rack.control.address, &["node", "drain", &used[0], "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    let after: BTreeSet<String> = rack.used().into_iter().collect();
    assert_eq!(after, BTreeSet::from([HOST.to_owned(), used[1].clone()]));
    wait_for_copies(&mut running);
    let other = NAMES.iter().position(|it| *it == used[1]).expect("a node of ours");
    rack.nodes[other] = None;
    wait_until("the loss to be told", PATIENCE, || {
        running.stderr().contains("read from their copies").then_some(())
    });
    let before = running.fetched().unwrap_or(0);
    wait_until("pages to be fetched", COPYING, || {
        (running.fetched()? > before + 1000).then_some(())
    });
    rack.finish(running);
}

#[test]
fn with_fewer_domains_than_copies_nothing_is_started() {
    let _turn = turn();
    let rack = Rack::start(1);
    let outcome = rack.run().program("true").finish();
    assert_ne!(outcome.code, 0);
    let expected = "2 copies need memory on as many failure domains of the rack";
    assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
}
