//! A stopped program does not move its data by the time that a donor needs its memory. The donor
//! gets its memory back in any case, other programs continue, and when the stopped program runs
//! again it ends and reports what it lost. collaborate.rs tests this without a controller.

use std::time::Duration;

use farpool_e2e::hog::Hog;
use farpool_e2e::stage::{PATIENCE, Stage};
use farpool_e2e::{network, turn, wait_until};
use farpool_hosts::{Hosts, Wiring};
use serde_json::Value;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
/// Each host's memory.
const HOST_BYTES: u64 = 1 << 30;
/// Memory in use on a host so that it lends less than is granted to either program, and still has
/// room for both programs' data.
const HOG_BYTES: u64 = 620 << 20;
/// How long the controller gives a program to move out of memory that a donor needs.
const RECLAIM_DEADLINE: Duration = Duration::from_secs(30);
/// How late a busy machine may be.
const SLACK: Duration = Duration::from_secs(20);

/// The controller's uptime at the first event of a kind.
fn time_of(events: &[Value], kind: &str) -> Option<Duration> {
    let event = events.iter().find(|event| event["kind"] == kind)?;
    event["uptime_ms"].as_u64().map(Duration::from_millis)
}

#[test]
fn a_donor_has_its_memory_back_from_a_program_that_is_stopped() {
    let _turn = turn();
    let builder = Hosts::builder(3, Wiring::Bridge).memory_limit_bytes(HOST_BYTES);
    let Some(hosts) = network::make(builder) else { return };
    let addresses: Vec<_> = hosts.iter().map(farpool_hosts::Host::address).collect();
    let mut stage = Stage::new(hosts, B);
    stage.start_control(&[]);
    let _borrower = stage.borrower(B);
    let _a = stage.node(A, addresses[A], "512MiB");
    let (mut stuck, mut other) = (stage.program(B, "600"), stage.program(B, "600"));
    stuck.wait_for_output("filled", 2);
    other.wait_for_output("filled", 2);
    let _c = stage.node(C, addresses[C], "512MiB");
    assert_eq!(stage.places(), [("A".into(), "ready".into()), ("A".into(), "ready".into())]);

    // Its keeper is asked to move the data, but no process can do it.
    stuck.pause(true, false);
    let _hog = Hog::start(&stage.hosts()[A], HOG_BYTES);
    wait_until("A has its memory back", PATIENCE, || {
        let node = stage.ask(&["node", "show", "A"]);
        (node["granted_bytes"] == 0 && node["used_bytes"] == 0).then_some(())
    });
    let took = wait_until("the events to say when", PATIENCE, || {
        let events = stage.events();
        let (told, lost) = ("segment-reclaimed", "segment-memory-lost");
        Some(time_of(&events, lost)?.saturating_sub(time_of(&events, told)?))
    });
    assert!(took < RECLAIM_DEADLINE + SLACK, "after {took:?}");
    assert!(other.is_running(), "{}", other.stderr());
    let of_other = ("C".to_owned(), "ready".to_owned());
    assert!(stage.places().contains(&of_other), "{:?}", stage.places());

    stuck.pause(false, false);
    let outcome = stuck.finish();
    outcome.require_lost(&format!("tcp://{}:7070", addresses[A]));
    let said = &outcome.stderr;
    assert!(said.contains("node A has lost memory of this program"), "{said}");
    wait_until("only the other's memory is left", PATIENCE, || {
        (stage.places() == [of_other.clone()]).then_some(())
    });
    stage.end_programs();
    let outcome = other.finish();
    outcome.require_success().require_far();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
}
