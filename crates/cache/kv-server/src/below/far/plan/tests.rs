//! Answers of a pool, one after the other, and the orders that each leads to.

use farpool_api::{Key, Target};
use farpool_units::GIB;

use super::*;

fn place(node: &str) -> Place {
    Place {
        node: node.into(),
        domain: None,
        addresses: vec!["tcp://10.0.0.1:7070".into()],
        key: Some(Key(7)),
        bytes: GIB,
        read_bytes_per_s: 1,
        write_bytes_per_s: 1,
    }
}

fn segment(id: u128, epoch: u64, state: SegmentState) -> ClientSegment {
    ClientSegment {
        id: SegmentId::from_u128(id),
        epoch,
        state,
        place: place("n"),
        target: None,
        waits_for: Vec::new(),
        leave: false,
        deadline_ms: None,
    }
}

fn key(id: u128, epoch: u64) -> PlaceKey {
    (SegmentId::from_u128(id), epoch)
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn heard(plan: &mut Plan, segments: Vec<ClientSegment>, now: Duration) -> Vec<Order> {
    plan.take(Answer::Heard(Ok(Some(segments))), now)
}

/// A plan that has joined and was granted one segment with all it wants, as grant 0.
fn with_one() -> Plan {
    let mut plan = Plan::new(GIB);
    assert_eq!(plan.question(at(0), 0), Some(Question::Join));
    assert_eq!(plan.question(at(0), 0), None, "one question at a time");
    plan.take(Answer::Joined(Ok(())), at(0));
    let ask = plan.question(at(0), 0);
    assert_eq!(ask, Some(Question::Ask { bytes: GIB, avoid: Vec::new() }));
    plan.take(Answer::Granted(Ok(GIB)), at(0));
    assert_eq!(plan.granted_bytes(), 0, "what counts is what the pool names");
    assert!(matches!(plan.question(at(0), 0), Some(Question::Report { .. })));
    let orders = heard(&mut plan, vec![segment(1, 5, SegmentState::Ready)], at(1));
    assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(1, 5)));
    plan.taken(key(1, 5), GrantNumber(0));
    assert_eq!(plan.granted_bytes(), GIB);
    plan
}

fn uses(plan: &mut Plan, now: Duration) -> Vec<ClientSegmentUse> {
    match plan.question(now, GIB) {
        Some(Question::Report { uses, .. }) => uses,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_moved_segment_is_taken_anew_and_the_old_place_is_reported_when_it_is_empty() {
    let mut plan = with_one();
    let target = Some(Target { epoch: 6, place: place("m") });
    let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
    let orders = heard(&mut plan, vec![moving.clone()], at(2));
    assert!(matches!(&orders[0], Order::Take { key: it, .. } if *it == key(1, 6)));
    assert_eq!(orders[1..], [Order::Empty { grant: GrantNumber(0), within: None }]);
    plan.taken(key(1, 6), GrantNumber(1));
    assert!(!uses(&mut plan, at(2))[0].evacuated);
    assert_eq!(heard(&mut plan, vec![moving.clone()], at(3)), [], "it is told once");
    plan.freed(GrantNumber(0));
    let told = &uses(&mut plan, at(3))[0];
    assert_eq!((told.evacuated, told.epoch), (true, 6));
    assert_eq!(heard(&mut plan, vec![segment(1, 6, SegmentState::Ready)], at(4)), []);
    assert!(matches!(plan.question(at(9), 0), Some(Question::Report { .. })), "all is there");
}

#[test]
fn what_a_donor_needs_is_emptied_before_its_deadline_and_asked_for_elsewhere() {
    let mut plan = with_one();
    let (leave, deadline_ms) = (true, Some(9_000));
    let left = ClientSegment { leave, deadline_ms, ..segment(1, 5, SegmentState::Moving) };
    let within = Some(Duration::from_secs(9));
    let orders = heard(&mut plan, vec![left.clone()], at(2));
    assert_eq!(orders, [Order::Empty { grant: GrantNumber(0), within }]);
    assert_eq!(plan.granted_bytes(), 0);
    assert!(matches!(plan.question(at(3), 0), Some(Question::Ask { bytes: GIB, .. })));
    plan.take(Answer::Granted(Err("no room".into())), at(3));
    assert_eq!(plan.take_messages().len(), 1);
    assert!(!uses(&mut plan, at(4))[0].evacuated);
    assert_eq!(heard(&mut plan, vec![left.clone()], at(4)), []);
    plan.freed(GrantNumber(0));
    let told = &uses(&mut plan, at(5))[0];
    assert_eq!((told.evacuated, told.epoch, told.used_bytes), (true, 5, 0));
    assert_eq!(heard(&mut plan, Vec::new(), at(6)), []);
    assert!(matches!(plan.question(at(6), 0), Some(Question::Report { .. })), "not so soon");
    heard(&mut plan, Vec::new(), at(13));
    assert!(matches!(plan.question(at(14), 0), Some(Question::Ask { .. })));
    plan.take(Answer::Granted(Err("no room".into())), at(14));
    assert!(plan.take_messages().is_empty(), "it was said");
}

#[test]
fn a_drain_without_another_place_does_not_wait_for_a_cache() {
    let mut plan = with_one();
    let moving = segment(1, 5, SegmentState::Moving);
    assert_eq!(heard(&mut plan, vec![moving.clone()], at(2)), [], "a place may be found");
    let orders = heard(&mut plan, vec![moving.clone()], at(5));
    assert_eq!(orders, [Order::Empty { grant: GrantNumber(0), within: None }]);
    plan.freed(GrantNumber(0));
    let release = plan.question(at(6), 0);
    assert_eq!(release, Some(Question::Release(SegmentId::from_u128(1))));
    plan.take(Answer::Released(Err("nobody answers".into())), at(6));
    assert!(!matches!(plan.question(at(6), 0), Some(Question::Release(_))), "the lease goes on");
    plan.take(Answer::Granted(Err("no room".into())), at(6));
    assert_eq!(plan.question(at(8), 0), release, "it must be said");
    plan.take(Answer::Released(Ok(true)), at(8));
    let ready = segment(1, 5, SegmentState::Ready);
    assert_eq!(heard(&mut plan, vec![ready], at(9)), [], "given up is given up");
}

#[test]
fn nothing_is_asked_for_while_a_place_is_sought() {
    let mut plan = with_one();
    let moving = segment(1, 5, SegmentState::Moving);
    assert_eq!(heard(&mut plan, vec![moving.clone()], at(20)), []);
    assert_eq!(plan.granted_bytes(), GIB);
    assert!(matches!(plan.question(at(20), 0), Some(Question::Report { .. })));
    // None was found: what is emptied must be replaced.
    let orders = heard(&mut plan, vec![moving], at(23));
    assert_eq!(orders, [Order::Empty { grant: GrantNumber(0), within: None }]);
    assert!(matches!(plan.question(at(23), 0), Some(Question::Ask { bytes: GIB, .. })));
}

#[test]
fn of_a_target_and_what_was_asked_for_meanwhile_only_the_first_is_taken() {
    let target = Some(Target { epoch: 6, place: place("m") });
    let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
    let asked = segment(2, 1, SegmentState::Ready);
    // A place is sought for too long, and memory is asked for in its stead.
    let with_two = || {
        let mut plan = with_one();
        heard(&mut plan, vec![segment(1, 5, SegmentState::Moving)], at(20));
        heard(&mut plan, vec![segment(1, 5, SegmentState::Moving)], at(23));
        assert!(matches!(plan.question(at(23), 0), Some(Question::Ask { .. })));
        plan.take(Answer::Granted(Ok(GIB)), at(23));
        plan
    };
    let mut plan = with_two();
    let orders = heard(&mut plan, vec![moving.clone()], at(24));
    assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(1, 6)));
    plan.taken(key(1, 6), GrantNumber(1));
    assert_eq!(heard(&mut plan, vec![moving.clone(), asked.clone()], at(25)), []);
    assert_eq!(plan.question(at(25), 0), Some(Question::Release(asked.id)));
    let mut plan = with_two();
    let orders = heard(&mut plan, vec![moving.clone(), asked.clone()], at(24));
    assert_eq!(orders.len(), 1, "one of two that arrive together: {orders:?}");
    let mut plan = with_two();
    let orders = heard(&mut plan, vec![segment(1, 5, SegmentState::Moving), asked.clone()], at(24));
    assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(2, 1)));
    plan.taken(key(2, 1), GrantNumber(1));
    assert_eq!(heard(&mut plan, vec![moving, asked], at(25)), [], "the target is not needed");
    assert!(matches!(plan.question(at(25), 0), Some(Question::Report { .. })), "not yet empty");
    plan.take(Answer::Heard(Err("nobody answers".into())), at(25));
    plan.freed(GrantNumber(0));
    assert_eq!(plan.question(at(27), 0), Some(Question::Release(SegmentId::from_u128(1))));
}

#[test]
fn a_lost_blade_is_given_up_and_its_node_not_asked_again_for_a_while() {
    let mut plan = with_one();
    let grant = GrantNumber(0);
    assert_eq!(plan.lost(grant, at(2)), [Order::Drop { grant }]);
    assert_eq!(plan.question(at(2), 0), Some(Question::Release(SegmentId::from_u128(1))));
    plan.take(Answer::Released(Ok(true)), at(2));
    plan.freed(grant);
    let avoid = vec!["n".to_owned()];
    assert_eq!(plan.question(at(3), 0), Some(Question::Ask { bytes: GIB, avoid }));
    plan.take(Answer::Granted(Err("no room".into())), at(3));
    heard(&mut plan, Vec::new(), at(4));
    let ask = plan.question(at(40), 0);
    assert_eq!(ask, Some(Question::Ask { bytes: GIB, avoid: Vec::new() }));
}

#[test]
fn what_the_pool_does_not_take_back_is_used_again() {
    let mut plan = with_one();
    let ready = || vec![segment(1, 5, SegmentState::Ready)];
    plan.lost(GrantNumber(0), at(2));
    assert!(matches!(plan.question(at(2), 0), Some(Question::Release(_))));
    plan.take(Answer::Released(Ok(false)), at(2));
    plan.freed(GrantNumber(0));
    assert_eq!(heard(&mut plan, ready(), at(3)), [], "its blade was just lost");
    let orders = heard(&mut plan, ready(), at(40));
    assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(1, 5)));
    plan.taken(key(1, 5), GrantNumber(1));
    assert_eq!(heard(&mut plan, ready(), at(41)), []);
    let left = ClientSegment { leave: true, ..segment(1, 5, SegmentState::Moving) };
    let orders = heard(&mut plan, vec![left], at(42));
    assert_eq!(orders, [Order::Empty { grant: GrantNumber(1), within: None }]);
    plan.freed(GrantNumber(1));
    assert!(plan.placements.report(0)[0].evacuated);
}

#[test]
fn a_place_that_is_used_again_is_not_reported_as_left() {
    let mut plan = with_one();
    plan.lost(GrantNumber(0), at(2));
    plan.question(at(2), 0);
    plan.take(Answer::Released(Ok(false)), at(2));
    plan.freed(GrantNumber(0));
    let ready = || vec![segment(1, 5, SegmentState::Ready)];
    heard(&mut plan, ready(), at(3));
    assert_eq!(heard(&mut plan, ready(), at(40)).len(), 1);
    plan.taken(key(1, 5), GrantNumber(1));
    let target = Some(Target { epoch: 6, place: place("m") });
    let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
    heard(&mut plan, vec![moving], at(41));
    plan.taken(key(1, 6), GrantNumber(2));
    assert!(!plan.placements.report(0)[0].evacuated, "it is full of items");
    plan.freed(GrantNumber(1));
    assert!(plan.placements.report(0)[0].evacuated);
}

#[test]
fn what_the_pool_calls_lost_or_names_no_more_is_dropped_at_once() {
    let grant = GrantNumber(0);
    let mut plan = with_one();
    let lost = segment(1, 5, SegmentState::Lost);
    assert_eq!(heard(&mut plan, vec![lost.clone()], at(2)), [Order::Drop { grant }]);
    assert_eq!(heard(&mut plan, vec![lost], at(2)), []);
    assert!(matches!(plan.question(at(2), 0), Some(Question::Release(_))));
    let mut plan = with_one();
    assert_eq!(heard(&mut plan, Vec::new(), at(2)), [Order::Drop { grant }]);
    // A pool that has forgotten the server: the grant is dropped too, and the server joins anew.
    let mut plan = with_one();
    assert_eq!(plan.take(Answer::Heard(Ok(None)), at(2)), [Order::Drop { grant }]);
    assert_eq!(plan.question(at(2), 0), Some(Question::Join));
}

#[test]
fn a_pool_that_does_not_answer_changes_nothing_and_is_told_of_once() {
    let mut plan = with_one();
    for second in 2..6 {
        assert!(plan.question(at(2 * second), 0).is_some());
        assert_eq!(plan.take(Answer::Heard(Err("away".into())), at(2 * second)), []);
        assert_eq!(plan.question(at(2 * second), 0), None, "not at once");
        assert_eq!(plan.take_messages().len(), usize::from(second == 2));
    }
    heard(&mut plan, vec![segment(1, 5, SegmentState::Pending)], at(20));
    assert_eq!(plan.granted_bytes(), GIB, "a controller that has started again");
    plan.take(Answer::Heard(Err("away".into())), at(21));
    assert_eq!(plan.take_messages().len(), 1, "another time");
}

#[test]
fn a_place_that_cannot_be_used_is_given_up() {
    let mut plan = Plan::new(GIB);
    plan.take(Answer::Joined(Ok(())), at(0));
    let ready = || vec![segment(1, 5, SegmentState::Ready)];
    assert_eq!(heard(&mut plan, ready(), at(1)).len(), 1);
    plan.not_taken(key(1, 5), "n", "it is on another host", at(1));
    assert_eq!(plan.take_messages().len(), 1);
    assert!(matches!(plan.question(at(1), 0), Some(Question::Release(_))));
    assert_eq!(heard(&mut plan, ready(), at(2)), []);
}

#[test]
fn a_deadline_that_comes_nearer_is_ordered_again() {
    let mut plan = with_one();
    let moving = segment(1, 5, SegmentState::Moving);
    heard(&mut plan, vec![moving.clone()], at(2));
    let grant = GrantNumber(0);
    let orders = heard(&mut plan, vec![moving], at(5));
    assert_eq!(orders, [Order::Empty { grant, within: None }]);
    let by = |deadline_ms| ClientSegment {
        leave: true,
        deadline_ms: Some(deadline_ms),
        ..segment(1, 5, SegmentState::Moving)
    };
    let orders = heard(&mut plan, vec![by(9_000)], at(6));
    assert_eq!(orders, [Order::Empty { grant, within: Some(at(9)) }]);
    assert_eq!(heard(&mut plan, vec![by(8_000)], at(7)), [], "the same moment");
    let orders = heard(&mut plan, vec![by(3_000)], at(8));
    assert_eq!(orders, [Order::Empty { grant, within: Some(at(3)) }]);
}

#[test]
fn a_target_that_cannot_be_used_does_not_end_the_old_place_early() {
    let mut plan = with_one();
    let target = Some(Target { epoch: 6, place: place("m") });
    let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
    assert_eq!(heard(&mut plan, vec![moving.clone()], at(2)).len(), 2);
    plan.not_taken(key(1, 6), "m", "it is on another host", at(2));
    assert!(!matches!(plan.question(at(2), 0), Some(Question::Release(_))), "it is emptied");
    assert_eq!(heard(&mut plan, vec![moving], at(3)), [], "it is not tried again");
    plan.freed(GrantNumber(0));
    assert!(matches!(plan.question(at(4), 0), Some(Question::Release(_))));
}

#[test]
fn superpages_are_dealt_out_so_that_all_have_about_the_same() {
    assert_eq!(deal(5, &[0, 0]), [vec![0, 1, 2], vec![3, 4]]);
    assert_eq!(deal(3, &[4, 1, 2]), [vec![], vec![0, 1], vec![2]]);
    assert_eq!(deal(0, &[0, 0]), [vec![], Vec::<u32>::new()]);
}
