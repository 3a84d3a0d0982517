//! Parity of far memory whose places a rack chooses: nodes die, are drained and take their memory
//! back while a program checks every page that it reads.

use std::collections::BTreeSet;

use farpool_e2e::hog::Hog;
use farpool_e2e::lenders::{
    COPYING, HOST, NAMES, PATIENCE, Rack, degraded, die_one_after_the_other, number_of,
    wait_for_copies, wait_for_fetches, wait_until_it_goes_on,
};
use farpool_e2e::rack::{Daemon, answer};
use farpool_e2e::run::Running;
use farpool_e2e::stage::{self, Stage};
use farpool_e2e::{network, turn, wait_until};
use farpool_hosts::{Hosts, Wiring};
use serde_json::Value;

/// What a run without a quota asks for on each node at first.
const FIRST_BYTES: u64 = 128 << 20;

/// Children share what is frozen, in groups of its own: it grows without a quota.
fn checker(rack: &Rack) -> Running {
    rack.checker(rack.run(), 64, "fork,discard,heap,pipe,protect")
}

/// One node after the other dies, each once what the last one cost is made again.
#[test]
fn nodes_of_a_rack_die_one_after_the_other() {
    let _turn = turn();
    let mut rack = Rack::start(6, "parity");
    let mut running = checker(&rack);
    die_one_after_the_other(&mut rack, &mut running);
    rack.finish(running);
}

/// A node dies for good: what it had is asked for on the sixth, and made there; no other one is
/// asked for more. Then another one may die, after which there are too few hosts, and the program
/// goes on.
#[test]
fn what_a_dead_node_had_is_made_on_a_further_one() {
    let _turn = turn();
    let mut rack = Rack::start(6, "parity");
    let mut running = rack.checker(rack.run(), 64, "discard,heap,pipe,protect");
    wait_for_copies(&mut running);
    let used = rack.used();
    assert!(used.len() == 5 && !used.iter().any(|it| it == HOST), "{used:?}");
    rack.kill(number_of(&used[2]));
    wait_until_it_goes_on(&running);
    wait_until("memory of the sixth node", COPYING, || {
        rack.used().iter().any(|it| it == HOST).then_some(())
    });
    wait_for_copies(&mut running);
    let segments = rack.segments();
    let is_first_size = |it: &Value| it["place"]["bytes"] == FIRST_BYTES;
    assert!(segments.iter().all(is_first_size), "{segments:?}");
    rack.kill(number_of(&used[0]));
    wait_until("the second loss", PATIENCE, || (degraded(&running)? > 0).then_some(()));
    wait_for_fetches(&running, 1000);
    rack.finish(running);
}

/// A drain takes what a node has to one that has nothing of the program; then another may die.
#[test]
fn a_drained_node_gives_what_it_has_to_one_without_any() {
    let _turn = turn();
    let mut rack = Rack::start(6, "parity");
    let mut running = checker(&rack);
    wait_for_copies(&mut running);
    let used = rack.used();
    assert!(used.len() == 5 && !used.iter().any(|it| it == HOST), "{used:?}");
    let task = answer(&rack.control.address, &["node", "drain", &used[0], "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    let after: BTreeSet<String> = rack.used().into_iter().collect();
    let expected = used[1..].iter().cloned().chain([HOST.to_owned()]);
    assert_eq!(after, expected.collect());
    wait_for_copies(&mut running);
    rack.kill(number_of(&used[1]));
    wait_until_it_goes_on(&running);
    rack.finish(running);
}

/// Without a quota a run begins with little. Its segments grow where they are, and what a node has
/// no room for, a further one has.
#[test]
fn memory_grows_where_it_is_and_on_a_further_node() {
    let _turn = turn();
    let donated = ["512MiB", "144MiB", "512MiB", "512MiB", "512MiB", "512MiB"];
    let rack = Rack::start_with(&donated, "parity");
    let mut running = rack.checker(rack.run(), 400, "pipe");
    let bytes_of = |name: &str| {
        let segments = rack.segments();
        let on = segments.iter().filter(|it| it["place"]["node"] == name);
        on.filter_map(|it| it["place"]["bytes"].as_u64()).sum::<u64>()
    };
    wait_until("memory to have grown", COPYING, || {
        assert!(running.is_running(), "{}", running.stderr());
        let grown = NAMES[2..6].iter().filter(|name| bytes_of(name) >= 256 << 20).count();
        // The further node has what n1 lacks, and more only if groups find no room meanwhile.
        (grown >= 3 && bytes_of(HOST) >= FIRST_BYTES).then_some(())
    });
    let segments = rack.segments();
    assert!(segments.len() == 6 && bytes_of("n1") <= 144 << 20, "{segments:?}");
    wait_for_copies(&mut running);
    wait_for_fetches(&running, 1000);
    rack.finish(running);
}

/// Options of a program for which there is enough memory with its parity.
const PARITY: [&str; 4] = ["--redundancy", "parity", "--quota", "512MiB"];
/// Each host's memory, and so much in use on one that it lends nothing any more.
const HOST_BYTES: u64 = 1 << 30;
const HOG_BYTES: u64 = 760 << 20;

/// Hosts that lend, and one with a program. The fields are in the order in which they must be
/// dropped.
struct Donors {
    nodes: Vec<Daemon>,
    _borrower: Daemon,
    stage: Stage,
}

impl Donors {
    /// Of so many hosts the first one runs the program, and five lend to it.
    fn start(hosts: usize) -> Option<(Donors, Running)> {
        let builder = Hosts::builder(hosts, Wiring::Bridge).memory_limit_bytes(HOST_BYTES);
        let mut stage = Stage::new(network::make(builder)?, 0);
        stage.start_control(&[]);
        let borrower = stage.borrower(0);
        let nodes = stage.nodes(1..6, "512MiB");
        let mut running = stage.program_with(0, "600", &PARITY);
        running.wait_for_output("filled", 2);
        wait_for_copies(&mut running);
        Some((Donors { nodes, _borrower: borrower, stage }, running))
    }

    /// Once nothing is missing, a host dies. None of the program's data may be lost or wrong.
    fn end(mut self, mut running: Running) {
        wait_for_copies(&mut running);
        self.nodes[1].kill();
        wait_until_it_goes_on(&running);
        self.stage.end_programs();
        let outcome = running.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    }
}

/// A donor needs its memory back: what it had goes to a sixth host. Then another host may die.
#[test]
fn a_donor_has_its_memory_back_and_nothing_is_missing() {
    let _turn = turn();
    let Some((mut donors, running)) = Donors::start(7) else { return };
    let stage = &donors.stage;
    donors.nodes.extend(stage.nodes(6..7, "512MiB"));
    let donor = stage.hosts()[1].name();
    let hog = Hog::start(&stage.hosts()[1], HOG_BYTES);
    wait_until("the donor has its memory back", stage::PATIENCE, || {
        let node = stage.ask(&["node", "show", donor]);
        (node["granted_bytes"] == 0 && node["used_bytes"] == 0).then_some(())
    });
    let places = stage.places();
    assert!(places.len() == 5 && places.iter().all(|(node, _)| node != donor), "{places:?}");
    donors.end(running);
    drop(hog);
}

/// All donors need their memory back at once: what they had goes into the program's own host, and
/// back to the rack when that has room again. Then a host may die.
#[test]
fn all_donors_have_their_memory_back_and_nothing_is_missing() {
    let _turn = turn();
    let Some((donors, mut running)) = Donors::start(6) else { return };
    let stage = &donors.stage;
    let hogs: Vec<Hog> = (1..6).map(|at| Hog::start(&stage.hosts()[at], HOG_BYTES)).collect();
    wait_until("the donors have their memory back", COPYING, || {
        assert!(running.is_running(), "{}", running.stderr());
        stage.segments().is_empty().then_some(())
    });
    let said = running.stderr();
    assert!(said.contains("no node has room for memory that must move"), "{said}");
    assert!(!said.contains("lost"), "{said}");
    wait_for_copies(&mut running);
    wait_for_fetches(&running, 1000);
    drop(hogs);
    wait_until("the rack has the data again", COPYING, || {
        let ready = stage.places().iter().filter(|(_, state)| state == "ready").count();
        (ready == 5 && !running.blades().contains("spill.sock")).then_some(())
    });
    donors.end(running);
}

#[test]
fn with_fewer_than_five_hosts_nothing_is_started() {
    let _turn = turn();
    let rack = Rack::start(4, "parity");
    let outcome = rack.run().program("true").finish();
    assert_ne!(outcome.code, 0);
    let expected = "--redundancy parity needs memory on 5 failure domains (hosts) of the rack, and \
                    4 had room";
    assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
    wait_until("what it had to be given back", PATIENCE, || {
        let segments = answer(&rack.control.address, &["segment", "list"]);
        segments["segments"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
}
