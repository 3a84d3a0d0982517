//! Nodes that lend each other memory over real sockets: the answers to a program, and the blades'
//! actions.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{MIB, Node, Program, wait_for};
use farpool_api::{ClientSegment, SegmentState};
use farpool_fabric::{
    Address, ClientId, ConnectError, Control, DescriptorSet, Grant, GrantKey, Session, Spare,
};
use farpool_peer::{Ending, Farewell};
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::{Request, Response, SuperpageNumber};

/// Connects to the blade of a segment as its program does.
fn connect(segment: &ClientSegment, attempt: u128) -> Result<Control, ConnectError> {
    let address: Address = segment.place.addresses[0].parse().unwrap();
    let key = GrantKey(segment.place.key.unwrap().0);
    let session = Session {
        address,
        client: ClientId(attempt),
        client_name: "test".into(),
        grant: Some(Grant { key, epoch: segment.epoch }),
        limits: None,
        purpose: farpool_wire::Purpose::Client,
        quota_bytes: u64::MAX,
        sharing_group: None,
        deadline: common::PATIENCE,
        spare: Spare::default(),
        allow_remote_tcp: false,
        secures_tcp: false,
        asks: None,
        time: farpool_fabric::Time::KERNEL,
        descriptors: Arc::new(DescriptorSet::default()),
        met: farpool_fabric::Met::default(),
    };
    Control::connect(Arc::new(session), 0)
}

/// Whether the blade of a segment accepts its program.
fn is_open(segment: &ClientSegment, attempt: u128) -> bool {
    connect(segment, attempt).is_ok()
}

fn only_ready(segments: &[ClientSegment], bytes: u64) -> Option<ClientSegment> {
    let [segment] = segments else { return None };
    let is_it = segment.state == SegmentState::Ready && segment.place.bytes == bytes;
    is_it.then(|| segment.clone())
}

/// A lends, and B borrows 128 MiB from it for a program, because B has none to give.
fn pair(lease: Duration, deadline: Duration) -> (Node, Node, Program, ClientSegment) {
    let times = move |options: &mut farpool_peer::CollaborateOptions| {
        (options.lease, options.reclaim_deadline) = (lease, deadline);
    };
    let a = Node::start("a", 1, 10, &[], times);
    let b = Node::start("b", 2, 85, &[&a], times);
    let mut program = Program::start(&b, 1, 60_000);
    program.wish(1, 128 * MIB);
    let segment = program.until("a grant", |segments| only_ready(segments, 128 * MIB));
    (a, b, program, segment)
}

#[test]
fn memory_that_its_server_needs_moves_to_another_node() {
    let (a, b, mut program, first) = pair(Duration::from_secs(8), Duration::from_secs(20));
    assert_eq!(first.place.node, a.address.to_string());
    assert!(is_open(&first, 1));
    assert_eq!((a.status().lent_bytes, b.status().borrowed_bytes), (128 * MIB, 128 * MIB));
    let c = Node::start("c", 3, 10, &[&a], |_| {});
    c.wait_for_peers(2);
    program.obeys = false;
    a.set_use(75);
    program.until("both", |segments| {
        let leaves = segments.iter().find(|it| it.leave)?;
        assert_eq!((leaves.id, leaves.state), (first.id, SegmentState::Moving));
        assert!(leaves.deadline_ms.is_some_and(|left| left <= 20_000), "{leaves:?}");
        (Program::ready_bytes(segments) == 128 * MIB).then_some(())
    });
    assert!(is_open(&first, 2), "the data can still be read");
    assert_eq!(a.status().lent_bytes, 128 * MIB);
    program.obeys = true;
    let second = program.until("C's alone", |segments| only_ready(segments, 128 * MIB));
    assert_eq!(second.place.node, c.address.to_string());
    wait_for("A's memory to be free", || (a.status().lent_bytes == 0).then_some(()));
    wait_for("A's blade to be shut", || (!is_open(&first, 3)).then_some(()));
    assert!(is_open(&second, 3));
    assert_eq!((a.status().grants_cut_off, b.status().grants_lost), (0, 0));
}

/// What was given and not written is not taken for what others hold of the node's memory.
#[test]
fn memory_that_was_lent_and_never_written_hides_no_need_of_its_server() {
    let (a, _b, _program, segment) = pair(Duration::from_secs(8), Duration::from_secs(20));
    let mut control = connect(&segment, 1).unwrap();
    let answer = control.call(&Request::CreateSegment { span_superpages: 1 }).unwrap();
    let Response::SegmentCreated { segment, .. } = answer.response else { panic!("{answer:?}") };
    let first = SuperpageNumber(0);
    control.call(&Request::AllocateSuperpages { segment, first, count: 1 }).unwrap();
    let status = wait_for("the use to be seen", || {
        Some(a.status()).filter(|status| status.lent_used_bytes == SUPERPAGE_BYTES)
    });
    assert_eq!(status.own_bytes, common::TOTAL_BYTES / 100 * 10);
}

#[test]
fn a_program_that_does_not_leave_is_cut_off_at_the_deadline() {
    let (a, _b, mut program, first) = pair(Duration::from_secs(8), Duration::from_secs(1));
    program.obeys = false;
    a.set_use(75);
    program.until("lost", |segments| {
        segments.iter().any(|it| it.state == SegmentState::Lost).then_some(())
    });
    wait_for("A's memory to be free", || (a.status().lent_bytes == 0).then_some(()));
    wait_for("A's blade to be shut", || (!is_open(&first, 1)).then_some(()));
    assert_eq!(a.status().grants_revoked, 1);
}

#[test]
fn what_a_silent_program_had_comes_back_after_its_lease() {
    let a = Node::start("a", 1, 10, &[], |_| {});
    let b = Node::start("b", 2, 85, &[&a], |_| {});
    let mut program = Program::start(&b, 1, 6_000);
    program.wish(1, 64 * MIB);
    program.until("a grant", |segments| only_ready(segments, 64 * MIB));
    wait_for("A's memory to be free", || (a.status().lent_bytes == 0).then_some(()));
    let status = b.status();
    assert_eq!((status.clients.len(), status.wanted_bytes), (0, 0));
    assert_eq!(a.status().grants_cut_off, 0, "it was released, not cut off");
}

#[test]
fn what_lies_on_a_node_that_died_is_told_as_lost_and_wanted_anew() {
    let (mut a, b, mut program, first) = pair(Duration::from_secs(8), Duration::from_secs(20));
    a.die();
    let c = Node::start("c", 3, 10, &[&b], |_| {});
    program.until("the loss and a new grant", |segments| {
        let lost = segments.iter().find(|it| it.state == SegmentState::Lost)?;
        assert_eq!(lost.id, first.id);
        (Program::ready_bytes(segments) == 128 * MIB).then_some(())
    });
    assert_eq!(c.status().lent_bytes, 128 * MIB);
}

#[test]
fn a_node_that_ends_lets_others_move_out_and_says_goodbye() {
    let (mut a, b, mut program, _) = pair(Duration::from_secs(8), Duration::from_secs(20));
    let ending = Ending::default();
    let (collaborator, told) = (a.collaborator.take().unwrap(), ending.clone());
    let end = std::thread::spawn(move || collaborator.run(&told));
    ending.ask();
    program.until("nothing left", |segments| segments.is_empty().then_some(()));
    assert_eq!(end.join().unwrap(), Farewell::default());
    b.wait_for_peers(0);
}

#[test]
fn a_node_that_must_end_at_once_says_what_was_lost() {
    let (mut a, _b, _program, _) = pair(Duration::from_secs(8), Duration::from_secs(20));
    let ending = Ending::default();
    ending.ask();
    ending.ask();
    let farewell = a.collaborator.take().unwrap().run(&ending);
    assert_eq!(farewell, Farewell { lent_bytes: 128 * MIB, clients: 0 });
}

#[test]
fn a_server_serves_its_own_programs_and_borrows_when_it_has_become_a_client() {
    let a = Node::start("a", 1, 10, &[], |_| {});
    a.wait_for_class("server");
    let mut program = Program::start(&a, 1, 60_000);
    program.wish(1, 128 * MIB);
    let here = program.until("own memory", |segments| only_ready(segments, 128 * MIB));
    assert_eq!(here.place.node, "a");
    assert!(here.place.addresses[0].starts_with("unix://"), "{:?}", here.place.addresses);
    assert!(is_open(&here, 1));
    let status = a.status();
    assert_eq!((status.here_bytes, status.lent_bytes), (128 * MIB, 0));
    let c = Node::start("c", 3, 10, &[&a], |_| {});
    c.wait_for_class("server");
    a.set_use(60);
    a.wait_for_class("neutral");
    program.report(0);
    assert_eq!(only_ready(&program.segments, 128 * MIB).unwrap().id, here.id, "it stays");
    a.set_use(95);
    a.wait_for_class("client");
    let there = program.until("C's memory", |segments| {
        only_ready(segments, 128 * MIB).filter(|segment| segment.id != here.id)
    });
    assert_eq!(there.place.node, c.address.to_string());
    wait_for("its own memory to be free", || (!is_open(&here, 2)).then_some(()));
}
