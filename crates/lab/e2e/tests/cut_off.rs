//! A node of a rack loses its network. Programs that use its memory wait for a while. If the
//! network stays down, exactly these programs end, and the node rejoins when the network is back.
//! Together with drains and the controller's death, which rack.rs tests, these are the failures
//! that `make rack-demo` shows.

use farpool_e2e::stage::{PATIENCE, Stage};
use farpool_e2e::{network, turn, wait_until};
use farpool_hosts::{Host, Hosts, Wiring};

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

#[test]
fn a_node_that_is_cut_off_concerns_its_programs_only_and_comes_back() {
    let _turn = turn();
    let Some(hosts) = network::make(Hosts::builder(3, Wiring::Bridge)) else { return };
    let addresses: Vec<_> = hosts.iter().map(Host::address).collect();
    let mut stage = Stage::new(hosts, B);
    stage.start_control(&[]);
    let _borrower = stage.borrower(B);
    // Each node has room for one program.
    let _a = stage.node(A, addresses[A], "256MiB");
    let mut victim = stage.program(B, "600");
    victim.wait_for_output("filled", 2);
    let _c = stage.node(C, addresses[C], "256MiB");
    let mut bystander = stage.program(B, "600");
    bystander.wait_for_output("filled", 2);
    let ready = |name: &str| (name.to_owned(), "ready".to_owned());
    assert_eq!(stage.places(), [ready("A"), ready("C")]);

    let link = |up: bool| stage.hosts()[A].set_link(up).expect("ip link");
    let mut before = None;
    link(false);
    wait_until("the program waits for its pages", PATIENCE, || {
        let now = victim.fetched()?;
        (before.replace(now) == Some(now)).then_some(())
    });
    link(true);
    victim.wait_until_fetched(before.unwrap_or(0));

    link(false);
    victim.finish().require_lost(&format!("tcp://{}:7070", addresses[A]));
    let fetched = bystander.fetched().expect("it runs");
    bystander.wait_until_fetched(fetched);
    wait_until("A is missed", PATIENCE, || {
        (stage.ask(&["node", "show", "A"])["state"] != "up").then_some(())
    });
    link(true);
    wait_until("A takes part again, with nothing lent", PATIENCE, || {
        let node = stage.ask(&["node", "show", "A"]);
        (node["state"] == "up" && node["granted_bytes"] == 0 && node["used_bytes"] == 0)
            .then_some(())
    });
    assert_eq!(stage.places(), [ready("C")]);
    stage.end_programs();
    let outcome = bystander.finish();
    outcome.require_success().require_far();
    assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
}
