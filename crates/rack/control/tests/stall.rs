//! A controller that could not hear for longer than nodes and clients may be silent: none of them
//! is late for that, so nobody takes a node's name and no lease is over.

mod common;

use std::time::{Duration, Instant};

use common::{Agent, Process, SUPERPAGE, small, wait_for};
use farpool_api::{ClientId, ClientSpec, NodeSpec, NodeState, ProblemKind, SegmentId};
use farpool_control::model::NODE_LATE_MS;
use rustix::process::{Pid, Signal, kill_process};

const CLIENT: u128 = 1;
const SEGMENT: u128 = 7;
/// The client's lease.
const LEASE_MS: u64 = NODE_LATE_MS;
/// Longer than both may be silent.
const STALL: Duration = Duration::from_millis(NODE_LATE_MS + 2_000);

/// A controller with a node and a client that has a segment there.
fn rack(folder: &tempfile::TempDir) -> (Process, Agent) {
    let process = Process::start(&folder.path().join("store").display().to_string());
    let api = process.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let spec = ClientSpec {
        host: "n0".into(),
        name: "program".into(),
        pid: 1,
        lease_ms: LEASE_MS,
        tenant: None,
    };
    let client = ClientId::from_u128(CLIENT);
    api.put_client(client, &spec).unwrap();
    api.put_segment(SegmentId::from_u128(SEGMENT), &small(client)).unwrap();
    node.settle(&api);
    (process, node)
}

/// Another daemon of the node's name.
fn twin(node: &Agent) -> NodeSpec {
    let (incarnation, blade_id) = (node.spec.incarnation + 1, node.spec.blade_id + 1);
    NodeSpec { incarnation, blade_id, ..node.spec.clone() }
}

fn stays_as_it_was(process: &Process, node: &mut Agent) {
    let api = process.client();
    let refused = api.put_node("n0", &twin(node)).unwrap_err();
    assert!(refused.is(ProblemKind::NameInUse), "{refused}");
    assert_eq!(api.node("n0").unwrap().state, NodeState::Up);
    let segment =
        api.segment(SegmentId::from_u128(SEGMENT)).expect("its client's lease is not over");
    assert_eq!(segment.client, Some(ClientId::from_u128(CLIENT)));
    node.step(&api);
    assert!(node.answer.grants.iter().any(|grant| grant.segment == segment.id));
    // By the clock that goes on, a node that is silent becomes late as ever.
    wait_for("the node to be late", || {
        (api.node("n0").unwrap().state == NodeState::Late).then_some(())
    });
    api.put_node("n0", &twin(node)).expect("the name is free now");
}

#[test]
fn nobody_is_late_because_the_controller_was_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let (process, mut node) = rack(&folder);
    let pid = Pid::from_child(&process.child);
    kill_process(pid, Signal::STOP).unwrap();
    std::thread::sleep(STALL); // what is tested is that this time passes
    kill_process(pid, Signal::CONT).unwrap();
    stays_as_it_was(&process, &mut node);
}

#[test]
fn nobody_is_late_because_the_store_stalls() {
    let folder = tempfile::tempdir().unwrap();
    let (process, mut node) = rack(&folder);
    let pid = Pid::from_child(&process.child);
    let is_store = |thread: i32| {
        let name = format!("/proc/{}/task/{thread}/comm", process.child.id());
        std::fs::read_to_string(name).is_ok_and(|name| name == "store\n")
    };
    let halted = farpool_inject::halt(pid, &is_store).expect("the store's thread can be stopped");
    let until = Instant::now() + STALL;
    let created = std::thread::scope(|scope| {
        let api = process.client();
        let another = small(ClientId::from_u128(CLIENT));
        let work = move || api.put_segment(SegmentId::from_u128(SEGMENT + 1), &another);
        let waits = scope.spawn(work);
        let api = process.client();
        while Instant::now() < until {
            let refused = api.put_node("n0", &twin(&node)).unwrap_err();
            assert!(refused.is(ProblemKind::NameInUse), "{refused}");
            std::thread::sleep(Duration::from_millis(100)); // paces the second daemon's attempts
        }
        assert!(!waits.is_finished(), "an answer came before it was durable");
        drop(halted);
        waits.join().unwrap()
    });
    created.expect("the store went on");
    stays_as_it_was(&process, &mut node);
}
