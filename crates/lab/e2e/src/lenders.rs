//! A rack whose nodes die while a program checks every page that it reads, of which there are
//! copies, or parity, on other nodes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ports::free_address;
use crate::rack::{Daemon, answer, ask};
use crate::run::{Run, Running};
use crate::wait_until;

/// How long to wait for what takes no time.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Copying is slow on purpose while the program uses its far memory, and a node has its name again
/// 5 s after its death.
pub const COPYING: Duration = Duration::from_secs(120);
/// The nodes' names.
pub const NAMES: [&str; 7] = ["n0", "n1", "n2", "n3", "n4", "n5", "n6"];
/// What each of them lends, unless said otherwise.
pub const DONATED: &str = "512MiB";
/// The program's host, which lends to itself last.
pub const HOST: &str = "n0";
/// Where the controller keeps its state.
const STORE: &str = "control.redb";
/// Shortest time between two deaths.
const GAP: Duration = Duration::from_secs(5);
/// How long nodes are killed, in seconds, if not as long as in `make test`.
const SECONDS_VARIABLE: &str = "FARPOOL_RACK_SECONDS";
const SECONDS: u64 = 30;

/// A controller and its nodes.
#[derive(Debug)]
pub struct Rack {
    /// The controller.
    pub control: Daemon,
    /// By number; None: it is dead.
    pub nodes: Vec<Option<Daemon>>,
    folder: tempfile::TempDir,
    /// What each node lends.
    donated: Vec<String>,
    redundancy: &'static str,
}

impl Rack {
    /// Starts so many nodes, for programs with this redundancy.
    ///
    /// # Panics
    /// If they do not all lend in time.
    pub fn start(count: usize, redundancy: &'static str) -> Rack {
        Rack::start_with(&[DONATED; NAMES.len()][..count], redundancy)
    }

    /// Starts nodes that lend this much each.
    ///
    /// # Panics
    /// If they do not all lend in time.
    pub fn start_with(donated: &[&str], redundancy: &'static str) -> Rack {
        let folder = tempfile::tempdir().expect("folder");
        let listen = free_address().to_string();
        let control = Daemon::control(&listen, &folder.path().join(STORE));
        let (nodes, sizes) = (Vec::new(), donated.iter().map(ToString::to_string).collect());
        let mut rack = Rack { control, nodes, folder, donated: sizes, redundancy };
        for (name, donated) in NAMES.iter().zip(donated) {
            rack.nodes.push(Some(Daemon::node(&rack.control.address, name, donated)));
        }
        wait_until("all nodes lend", PATIENCE, || (rack.lending() == donated.len()).then_some(()));
        rack
    }

    /// How many nodes are up and lend all that they donate.
    fn lending(&self) -> usize {
        let nodes = answer(&self.control.address, &["node", "list"]);
        let lends = |node: &&Value| {
            let (lendable, donated) = (&node["lendable_bytes"], &node["donate_bytes"]);
            node["state"] == "up" && lendable.is_u64() && lendable == donated
        };
        nodes["nodes"].as_array().map_or(0, |nodes| nodes.iter().filter(lends).count())
    }

    /// The address of a node.
    ///
    /// # Panics
    /// If it is dead.
    pub fn address_of(&self, at: usize) -> String {
        self.nodes[at].as_ref().map(|node| node.address.clone()).expect("a node that lives")
    }

    /// Kills a node.
    pub fn kill(&mut self, at: usize) {
        if let Some(mut node) = self.nodes[at].take() {
            node.kill();
        }
    }

    /// Kills the controller; another one takes its place.
    pub fn restart_control(&mut self) {
        self.control.kill();
        let listen = self.control.address.trim_start_matches("http://");
        self.control = Daemon::control(listen, &self.folder.path().join(STORE));
    }

    /// Kills a node; another one of its name starts, empty, and is taken once the first is missed.
    pub fn replace(&mut self, at: usize) {
        self.kill(at);
        let node = Daemon::node(&self.control.address, NAMES[at], &self.donated[at]);
        self.nodes[at] = Some(node);
    }

    /// The segments that may have memory of a program, also while they move: a node takes its
    /// memory back when the machine is short of it.
    ///
    /// # Panics
    /// If the controller does not answer.
    pub fn segments(&self) -> Vec<Value> {
        let segments = answer(&self.control.address, &["segment", "list"]);
        let mut segments = segments["segments"].as_array().cloned().expect("a list");
        segments.retain(|it| it["state"] == "ready" || it["state"] == "moving");
        segments
    }

    /// The nodes that the program may have memory on.
    pub fn used(&self) -> Vec<String> {
        let segments = self.segments();
        let places =
            segments.iter().flat_map(|it| [&it["place"]["node"], &it["target"]["place"]["node"]]);
        let nodes: BTreeSet<&str> = places.filter_map(Value::as_str).collect();
        nodes.into_iter().map(str::to_owned).collect()
    }

    /// A run on the rack's memory.
    pub fn run(&self) -> Run {
        self.run_of_tenant("default").redundancy(self.redundancy)
    }

    /// A run of a tenant, with the redundancy that the rack has for that.
    pub fn run_of_tenant(&self, tenant: &str) -> Run {
        let pool = ["--pool", &self.control.address, "--host", HOST, "--tenant", tenant];
        Run::far("16MiB").args(pool)
    }

    /// A program of so many MiB that checks what it reads until it is told to end; part of it is
    /// far.
    ///
    /// # Panics
    /// If it does not start.
    pub fn checker(&self, run: Run, mib: u32, operations: &str) -> Running {
        let mut running = run
            .own_program("farpool-stress")
            .args(["--mib", &mib.to_string(), "--threads", "2", "--progress", "--seed", "23"])
            .args(["--seconds", "86400", "--ops", operations, "--until"])
            .arg(self.folder.path().join("over"))
            .patience(PATIENCE * 4)
            .start();
        running.wait_for_output("filled", 2);
        running.wait_until_far();
        running
    }

    /// All that the program read was right, to the end.
    ///
    /// # Panics
    /// If it was not, or anything was lost.
    pub fn finish(&self, running: Running) {
        std::fs::write(self.folder.path().join("over"), "").expect("a file");
        let outcome = running.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    }
}

/// What the controller knows of the rack is shown if the test fails.
impl Drop for Rack {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for list in [&["node", "list"][..], &["segment", "list"], &["events"]] {
                let told = ask(&self.control.address, list);
                println!("{}: {}", list.join(" "), String::from_utf8_lossy(&told.stdout));
            }
        }
    }
}

/// The number of the node of this name.
///
/// # Panics
/// If there is none.
pub fn number_of(name: &str) -> usize {
    NAMES.iter().position(|it| *it == name).expect("a node of ours")
}

/// Superpages that would be lost with a node; None before anything is told.
pub fn degraded(running: &Running) -> Option<u64> {
    running.told()?["total"]["degraded_superpages"].as_u64()
}

/// Waits until nothing of the program would be lost with a node any more.
///
/// # Panics
/// If that takes too long, or the program ends.
pub fn wait_for_copies(running: &mut Running) {
    wait_until("all copies to be there", COPYING, || {
        assert!(running.is_running(), "{}", running.stderr());
        (degraded(running)? == 0).then_some(())
    });
}

/// Waits until so many pages more were fetched.
///
/// # Panics
/// If that takes too long, or far memory is lost.
pub fn wait_for_fetches(running: &Running, count: u64) {
    let before = running.fetched().unwrap_or(0);
    wait_until("pages to be fetched", COPYING, || {
        let has_failed = running.stderr().contains("far memory is lost");
        assert!(!has_failed, "{}", running.stderr());
        (running.fetched()? > before + count).then_some(())
    });
}

/// Waits until a program has told that a node is lost, and has fetched pages since.
///
/// # Panics
/// If that takes too long, or far memory is lost.
pub fn wait_until_it_goes_on(running: &Running) {
    wait_until("the loss to be told", PATIENCE, || {
        running.stderr().contains("read from their copies").then_some(())
    });
    wait_for_fetches(running, 1000);
}

/// One node after the other dies, each once what the last one cost is made again.
///
/// # Panics
/// If anything is lost or wrong, or no node dies that is used.
pub fn die_one_after_the_other(rack: &mut Rack, running: &mut Running) {
    let given = std::env::var(SECONDS_VARIABLE).ok();
    let seconds = given.map_or(SECONDS, |text| text.parse().expect("a number of seconds"));
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds));
    let (mut deaths, mut hits, mut slowest) = (0, 0, Duration::ZERO);
    let mut last = usize::MAX;
    while begun.elapsed() < length {
        let used = wait_until("memory in use, none of which moves", COPYING, || {
            // What a node takes back would be a second loss, should there be no room for it.
            let is_ready = |it: &Value| it["state"] == "ready";
            let mut used = Some(rack.used()).filter(|_| rack.segments().iter().all(is_ready))?;
            // The controller believes in it for 5 s.
            used.retain(|name| NAMES.get(last) != Some(&name.as_str()));
            Some(used).filter(|used| !used.is_empty())
        });
        // Each fourth time any node, else one that the program uses.
        let any = NAMES[deaths % rack.nodes.len()];
        let name = if deaths % 4 == 3 { any } else { &used[deaths % used.len()] };
        let at = number_of(name);
        let is_hit = used.iter().any(|name| name == NAMES[at]);
        let died = Instant::now();
        let blade = rack.address_of(at);
        rack.replace(at);
        last = at;
        (deaths, hits) = (deaths + 1, hits + usize::from(is_hit));
        if is_hit {
            // Before it has noticed the loss nothing seems to be missing.
            wait_until("the program to have left the blade", PATIENCE, || {
                assert!(running.is_running(), "{}", running.stderr());
                (!running.blades().contains(&blade)).then_some(())
            });
            wait_for_copies(running);
            slowest = slowest.max(died.elapsed());
        }
        println!("death {deaths} of {used:?}: {} ({is_hit}), {:?}", NAMES[at], died.elapsed());
        wait_until("the next death", PATIENCE, || (died.elapsed() >= GAP).then_some(()));
    }
    println!("{deaths} deaths, {hits} of nodes in use; copies again after {slowest:?} at most");
    assert!(hits > 0, "{deaths} deaths");
}
