//! Copies of far memory whose places a rack chooses: nodes are killed one after the other, and come
//! back empty, while a program checks every page that it reads.

use std::collections::BTreeSet;

use farpool_e2e::lenders::{
    HOST, Rack, die_one_after_the_other, number_of, wait_for_copies, wait_until_it_goes_on,
};
use farpool_e2e::rack::answer;
use farpool_e2e::run::Running;
use farpool_e2e::turn;

fn checker(rack: &Rack) -> Running {
    rack.checker(rack.run().args(["--quota", "512MiB"]), 64, "discard,heap,pipe,protect")
}

/// One node after the other dies, each once the copies that the last one cost are made again.
#[test]
fn nodes_of_a_rack_die_one_after_the_other() {
    let _turn = turn();
    let mut rack = Rack::start(6, "2");
    let mut running = checker(&rack);
    die_one_after_the_other(&mut rack, &mut running);
    rack.finish(running);
}

/// A drain takes a copy to a node that has none, also to the host's own; then the other may die.
#[test]
fn a_drained_node_gives_its_copies_to_one_without_any() {
    let _turn = turn();
    let mut rack = Rack::start(3, "2");
    let mut running = checker(&rack);
    wait_for_copies(&mut running);
    let used = rack.used();
    assert!(used.len() == 2 && !used.iter().any(|it| it == HOST), "{used:?}");
    let task = answer(&rack.control.address, &["node", "drain", &used[0], "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    let after: BTreeSet<String> = rack.used().into_iter().collect();
    assert_eq!(after, BTreeSet::from([HOST.to_owned(), used[1].clone()]));
    wait_for_copies(&mut running);
    rack.kill(number_of(&used[1]));
    wait_until_it_goes_on(&running);
    rack.finish(running);
}

#[test]
fn with_fewer_domains_than_copies_nothing_is_started() {
    let _turn = turn();
    let rack = Rack::start(1, "2");
    let outcome = rack.run().program("true").finish();
    assert_ne!(outcome.code, 0);
    let expected = "2 copies need memory on as many failure domains of the rack";
    assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
}

/// What an operator has set for a tenant applies to its programs, unless they say otherwise.
#[test]
fn a_tenants_programs_have_its_redundancy() {
    let _turn = turn();
    let mut rack = Rack::start(3, "2");
    let set = ["tenant", "set", "payroll", "--redundancy", "2", "--rate", "1GiB"];
    let tenant = answer(&rack.control.address, &set);
    assert_eq!(tenant["redundancy"], "2", "{tenant}");
    let plain = rack.run_of_tenant("payroll").redundancy("none").args(["--quota", "64MiB"]);
    let plain = plain.program("true").finish();
    assert!(plain.code == 0 && !plain.stderr.contains("--redundancy"), "{}", plain.stderr);
    let run = rack.run_of_tenant("payroll").args(["--quota", "512MiB"]);
    let mut running = rack.checker(run, 64, "discard,heap,pipe,protect");
    let said = "farpool: --redundancy 2, as the rack has it for the tenant";
    assert!(running.stderr().contains(said), "{}", running.stderr());
    wait_for_copies(&mut running);
    let used = rack.used();
    assert_eq!(used.len(), 2, "{used:?}");
    rack.kill(number_of(&used[0]));
    wait_until_it_goes_on(&running);
    rack.finish(running);
}
