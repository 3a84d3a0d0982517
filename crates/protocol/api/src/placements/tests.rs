//! Answers of a controller, one after the other, and what a client does.

use super::*;
use crate::{Key, Target};

fn place(bytes: u64) -> Place {
    Place {
        node: "n".into(),
        domain: None,
        addresses: vec!["tcp://10.0.0.1:7070".into()],
        key: Some(Key(7)),
        bytes,
        read_bytes_per_s: 1,
        write_bytes_per_s: 1,
    }
}

fn segment(id: u128, epoch: u64, state: SegmentState) -> ClientSegment {
    let (id, place) = (SegmentId::from_u128(id), place(1 << 30));
    let (target, waits_for) = (None, Vec::new());
    ClientSegment { id, epoch, state, place, target, waits_for, leave: false, deadline_ms: None }
}

fn moving(id: u128, epoch: u64, to: u64) -> ClientSegment {
    let target = Some(Target { epoch: to, place: place(1 << 30) });
    ClientSegment { target, ..segment(id, epoch, SegmentState::Moving) }
}

fn to_be_left(id: u128, epoch: u64) -> ClientSegment {
    let deadline_ms = Some(9_000);
    ClientSegment { leave: true, deadline_ms, ..segment(id, epoch, SegmentState::Moving) }
}

/// The size of the memory to ask for, with one copy of all.
fn wanted(placements: &Placements, far_bytes: u64, is_full: bool, quota_bytes: u64) -> Option<u64> {
    let piece = placements.wanted(far_bytes, is_full, quota_bytes)?;
    assert!(piece.avoid.is_empty() && piece.avoid_first.is_empty());
    Some(piece.bytes)
}

fn added(actions: &[Action]) -> Vec<u64> {
    let keys = actions.iter().filter_map(|action| match action {
        Action::Add { key, .. } => Some(key.1),
        Action::Leave { .. } => None,
    });
    keys.collect()
}

#[test]
fn a_segment_moves_from_seat_to_seat_and_is_reported_when_it_has() {
    let mut placements = Placements::new(1);
    let pending = segment(1, 5, SegmentState::Pending);
    assert_eq!(placements.hear(vec![pending]), [], "not usable yet");
    assert_eq!(added(&placements.hear(vec![segment(1, 5, SegmentState::Ready)])), [5]);
    let key = (SegmentId::from_u128(1), 5);
    placements.taken(key, 0, 1);
    assert_eq!(placements.hear(vec![segment(1, 5, SegmentState::Ready)]), []);
    let actions = placements.hear(vec![moving(1, 5, 6)]);
    assert_eq!((added(&actions), actions.len()), (vec![6], 2), "and the old one is left");
    placements.taken((key.0, 6), 1, 1);
    placements.leaving(key);
    assert_eq!(placements.hear(vec![moving(1, 5, 6)]), []);
    assert!(!placements.report(0)[0].evacuated, "somebody may still be there");
    placements.sweep(|entry, _| entry != 0);
    let told = &placements.report(0)[0];
    assert_eq!((told.evacuated, told.epoch), (true, 6));
    assert_eq!(placements.hear(vec![moving(1, 5, 6)]), [], "what was left is not entered again");
    assert_eq!(placements.hear(vec![segment(1, 6, SegmentState::Ready)]), []);
    assert!(!placements.is_moving());
}

#[test]
fn a_place_without_a_target_is_left_for_any_other_and_reported_when_it_is() {
    let mut placements = Placements::new(1);
    let ready = |id| segment(id, 5, SegmentState::Ready);
    assert_eq!(added(&placements.hear(vec![ready(1), ready(2)])), [5, 5]);
    let key = |id| (SegmentId::from_u128(id), 5);
    placements.taken(key(1), 0, 1);
    placements.taken(key(2), 1, 1);
    let actions = placements.hear(vec![to_be_left(1, 5), ready(2)]);
    let placement = Placement { entry: 0, generation: 1, is_leaving: false };
    assert_eq!(actions, [Action::Leave { key: key(1), placement }]);
    placements.leaving(key(1));
    assert!(placements.is_moving());
    assert_eq!(wanted(&placements, 4 << 30, true, u64::MAX), None, "first the move");
    assert!(!placements.report(0)[0].evacuated, "somebody may still be there");
    placements.sweep(|entry, _| entry != 0);
    let told = placements.report(1 << 30);
    assert_eq!((told[0].evacuated, told[0].epoch, told[0].used_bytes), (true, 5, 0));
    assert_eq!((told[1].evacuated, told[1].epoch), (false, 5));
    assert_eq!(placements.hear(vec![to_be_left(1, 5), ready(2)]), [], "not entered again");
    assert_eq!(placements.hear(vec![ready(2), ready(3)]).len(), 1, "and others still are");
}

#[test]
fn a_place_heard_of_only_when_it_shall_be_left_is_never_entered() {
    let mut placements = Placements::new(1);
    assert_eq!(placements.hear(vec![to_be_left(1, 5)]), []);
    assert!(placements.report(0)[0].evacuated);
}

#[test]
fn a_controller_that_still_seeks_a_target_has_nothing_left() {
    let mut placements = Placements::new(1);
    placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
    placements.taken((SegmentId::from_u128(1), 5), 0, 1);
    assert_eq!(placements.hear(vec![segment(1, 5, SegmentState::Moving)]), []);
    assert!(!placements.report(0)[0].evacuated);
}

#[test]
fn what_the_controller_no_longer_names_is_left() {
    let mut placements = Placements::new(1);
    placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
    let key = (SegmentId::from_u128(1), 5);
    placements.taken(key, 3, 2);
    let placement = Placement { entry: 3, generation: 2, is_leaving: false };
    assert_eq!(placements.hear(Vec::new()), [Action::Leave { key, placement }]);
}

#[test]
fn more_is_asked_for_before_what_there_is_runs_out_and_never_beyond_the_quota() {
    let mut placements = Placements::new(1);
    assert_eq!(wanted(&placements, 0, false, 100 << 20), Some(100 << 20));
    placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
    let gib = 1 << 30;
    assert_eq!(wanted(&placements, 100 << 20, false, u64::MAX), None);
    assert_eq!(wanted(&placements, 900 << 20, false, u64::MAX), Some(gib));
    assert_eq!(wanted(&placements, 0, true, gib + (64 << 20)), Some(64 << 20));
    assert_eq!(wanted(&placements, gib, true, gib), None);
    placements.hear(vec![moving(1, 5, 6)]);
    assert_eq!(wanted(&placements, gib, true, u64::MAX), None, "first the move");
}

#[test]
fn memory_that_is_only_waited_for_is_not_asked_for_again() {
    let mut placements = Placements::new(1);
    let quota = 1 << 30;
    let why = |node: &str| vec![format!("node {node} has not confirmed it")];
    let pending =
        |id, node| ClientSegment { waits_for: why(node), ..segment(id, 5, SegmentState::Pending) };
    assert_eq!(placements.waits_for(), None);
    placements.hear(vec![pending(1, "C"), pending(2, "D"), pending(3, "C")]);
    assert_eq!(wanted(&placements, 100 << 20, false, quota), None);
    assert_eq!(wanted(&placements, 0, true, u64::MAX), Some(3 << 30), "but more may be");
    let told = "node C has not confirmed it; node D has not confirmed it";
    assert_eq!(placements.waits_for().as_deref(), Some(told));
    placements.hear(vec![segment(1, 5, SegmentState::Lost)]);
    assert_eq!(
        wanted(&placements, 0, false, quota),
        Some(SEGMENT_MIN_BYTES),
        "what is lost does not come"
    );
}

#[test]
fn shares_of_what_is_far_add_up_to_it() {
    let mut placements = Placements::new(1);
    let all: Vec<_> = (1..=3).map(|id| segment(id, 5, SegmentState::Ready)).collect();
    placements.hear(all);
    let sum: u64 = placements.report(300 << 20).iter().map(|it| it.used_bytes).sum();
    assert_eq!(sum, 300 << 20);
    assert!(placements.report(u64::MAX).iter().all(|it| it.used_bytes == 1 << 30));
}

/// A segment on a host of its own.
fn on(host: u8, bytes: u64) -> ClientSegment {
    let mut segment = segment(host.into(), 5, SegmentState::Ready);
    segment.place.node = format!("n{host}");
    segment.place.addresses = vec![format!("tcp://10.0.0.{host}:7070")];
    segment.place.bytes = bytes;
    segment
}

fn key_on(host: u8) -> PlaceKey {
    (SegmentId::from_u128(host.into()), 5)
}

/// Two copies on hosts 1 and 2, in the entries of these numbers.
fn two_copies(bytes: u64) -> Placements {
    let mut placements = Placements::new(2);
    placements.hear(vec![on(1, bytes), on(2, bytes)]);
    placements.taken(key_on(1), 1, 1);
    placements.taken(key_on(2), 2, 1);
    placements
}

fn names(hosts: &[u8]) -> Vec<String> {
    hosts.iter().map(|host| format!("n{host}")).collect()
}

#[test]
fn copies_are_asked_for_on_other_domains() {
    let mut placements = Placements::new(2);
    let gib = 1 << 30;
    let asked = |placements: &Placements| placements.piece_for(gib);
    let piece = |bytes, avoid: &[u8], avoid_first: &[u8]| {
        let (avoid, avoid_first) = (names(avoid), names(avoid_first));
        Some(Piece { bytes, avoid, avoid_first })
    };
    assert_eq!(asked(&placements), piece(gib, &[], &[]));
    placements.hear(vec![on(1, gib)]);
    assert_eq!(asked(&placements), piece(gib, &[1], &[]));
    placements.hear(vec![on(1, gib), on(2, gib / 4)]);
    assert_eq!(asked(&placements), piece(gib / 4 * 3, &[1], &[2]));
    placements.hear(vec![on(1, gib), on(2, gib)]);
    assert_eq!(asked(&placements), None);
    assert!(placements.will_store() && !placements.can_store());
    placements.taken(key_on(1), 0, 1);
    assert!(!placements.can_store(), "one copy");
    placements.taken(key_on(2), 1, 1);
    assert!(placements.can_store());
    assert_eq!(placements.wanted(gib / 4, false, u64::MAX), None);
    // Twice as much: what is on both is of use, but other hosts are better.
    let more = placements.wanted(gib, false, u64::MAX);
    assert_eq!(more, piece(2 * gib, &[], &[1, 2]));
    assert_eq!(placements.wanted(gib, false, 2 * gib), None, "the quota counts all copies");
    let told = placements.report(gib);
    assert_eq!(told.iter().map(|it| it.used_bytes).collect::<Vec<_>>(), [gib, gib]);
}

/// What the board says if the processes have left this entry.
fn left(entry: usize, reach: Reach) -> impl Fn(usize) -> Reach {
    move |it| if it == entry { reach } else { Reach::All }
}

#[test]
fn a_blade_that_is_away_is_replaced_and_given_back_when_nobody_uses_it_for_long() {
    let gib = 1 << 30;
    let mut placements = two_copies(gib);
    let begun = Instant::now();
    let at = |seconds| begun + Duration::from_secs(seconds);
    placements.look(at(0), left(1, Reach::Some));
    assert_eq!(placements.wanted(0, false, u64::MAX), None, "it may be back soon");
    placements.look(at(2), left(1, Reach::Some));
    let piece = placements.wanted(0, false, u64::MAX).expect("a second copy");
    assert_eq!((piece.bytes, &piece.avoid_first[..]), (SEGMENT_MIN_BYTES, &[][..]));
    assert_eq!(piece.avoid, names(&[2, 1]), "on a third host");
    placements.look(at(3), |_| Reach::All);
    assert_eq!(placements.wanted(0, false, u64::MAX), None, "it is back");
    placements.look(at(4), left(1, Reach::Some));
    placements.look(at(50), left(1, Reach::Some));
    assert_eq!(placements.to_release(at(50)), [], "a process has pages there");
    placements.look(at(51), left(1, Reach::Nobody));
    assert_eq!(placements.to_release(at(80)), []);
    assert_eq!(placements.to_release(at(81)), [key_on(1).0]);
    // Also while the controller, which was restarted, does not know the node yet.
    let pending = ClientSegment { state: SegmentState::Pending, ..on(1, gib) };
    placements.hear(vec![pending, on(2, gib)]);
    placements.look(at(57), left(1, Reach::Nobody));
    assert_eq!(placements.to_release(at(57)), [], "it has a placement: no haste");
    let one = Placements { layout: Layout::copies(1), ..placements };
    assert_eq!(one.to_release(at(99)), [], "what it has may come back with it");
}

#[test]
fn a_place_that_never_becomes_usable_is_replaced_and_given_back() {
    let gib = 1 << 30;
    let mut placements = two_copies(gib);
    let pending = |host| ClientSegment { state: SegmentState::Pending, ..on(host, gib) };
    // The controller has just been restarted: the second one has data.
    placements.hear(vec![on(1, gib), pending(2), pending(3)]);
    let begun = Instant::now();
    placements.look(begun, |_| Reach::All);
    assert_eq!(placements.wanted(gib, false, u64::MAX), None, "room for half as much again");
    let later = begun + NEVER_READY_LIMIT;
    placements.look(later, |_| Reach::All);
    let piece = placements.wanted(gib, false, u64::MAX).expect("memory elsewhere");
    assert_eq!(piece.avoid, names(&[3]));
    assert_eq!(placements.to_release(later), [key_on(3).0]);
}

#[test]
fn a_dead_blade_is_replaced_while_another_is_left_and_when_all_entries_are_taken() {
    let gib = 1 << 30;
    let begun = Instant::now();
    let dies = |placements: &mut Placements, host: u8| {
        placements.look(begun, left(host.into(), Reach::Nobody));
        placements.look(begun + AWAY_PATIENCE, left(host.into(), Reach::Nobody));
    };
    // Host 1 is drained to host 3 when host 2 dies, or host 3 does.
    for dead in [2, 3] {
        let mut placements = two_copies(gib);
        let target = Some(Target { epoch: 6, place: on(3, gib).place });
        let drained = ClientSegment { target, state: SegmentState::Moving, ..on(1, gib) };
        placements.hear(vec![drained, on(2, gib)]);
        placements.leaving(key_on(1));
        placements.taken((key_on(1).0, 6), 3, 1);
        assert_eq!(placements.wanted(gib, false, u64::MAX), None, "first the move");
        dies(&mut placements, dead);
        assert!(placements.wanted(gib, false, u64::MAX).is_some(), "{dead}");
    }
    let mut placements = Placements::new(2);
    let hosts = 1..=6;
    placements.hear(hosts.clone().map(|host| on(host, gib)).collect());
    hosts.for_each(|host| placements.taken(key_on(host), host.into(), 1));
    assert_eq!(placements.wanted(3 * gib, true, u64::MAX), None, "as many as there may be");
    dies(&mut placements, 4);
    let piece = placements.wanted(3 * gib, false, u64::MAX).expect("one in its stead");
    assert!(piece.avoid.contains(&names(&[4])[0]));
}

#[test]
fn a_grant_beside_another_copy_is_of_no_use() {
    let placements = two_copies(1 << 30);
    let piece = Piece { bytes: 1, avoid: names(&[1]), avoid_first: names(&[2]) };
    let beside = |host: u8| Place { node: "other".into(), ..on(host, 1).place };
    assert!(!placements.is_of_use(&beside(1), &piece), "on the host of what is to be avoided");
    assert!(placements.is_of_use(&beside(2), &piece) && placements.is_of_use(&beside(3), &piece));
}

#[test]
fn lost_memory_is_given_back_and_left_while_more_is_asked_for() {
    let gib = 1 << 30;
    let mut placements = two_copies(gib);
    let lost = || ClientSegment { state: SegmentState::Lost, ..on(1, gib) };
    let actions = placements.hear(vec![lost(), on(2, gib)]);
    assert!(matches!(actions[..], [Action::Leave { key, .. }] if key == key_on(1)), "{actions:?}");
    placements.leaving(key_on(1));
    assert_eq!(placements.to_release(Instant::now()), [key_on(1).0]);
    assert!(!placements.is_moving(), "nothing is on it");
    assert!(placements.wanted(0, false, u64::MAX).is_some());
    let releasing = ClientSegment { state: SegmentState::Releasing, ..on(1, gib) };
    placements.hear(vec![releasing, on(2, gib)]);
    assert_eq!(placements.to_release(Instant::now()), []);
    let actions = placements.hear(vec![on(2, gib)]);
    assert_eq!(actions, []);
    let mut one = Placements::new(1);
    one.hear(vec![on(1, gib)]);
    one.taken(key_on(1), 1, 1);
    assert_eq!(one.hear(vec![lost()]), [], "without copies the program has to learn of it");
}

/// Groups with parity on these hosts, in the entries of their numbers.
fn groups_on(hosts: std::ops::RangeInclusive<u8>, bytes: u64) -> Placements {
    let mut placements = Placements::with_parity();
    placements.hear(hosts.clone().map(|host| on(host, bytes)).collect());
    hosts.for_each(|host| placements.taken(key_on(host), host.into(), 1));
    placements
}

fn nobody() -> BTreeSet<SegmentId> {
    BTreeSet::new()
}

#[test]
fn parity_is_asked_for_on_five_hosts_and_takes_a_quarter_more() {
    let gib = 1 << 30;
    let mut placements = Placements::with_parity();
    for hosts in 0..5 {
        placements.hear((1..=hosts).map(|host| on(host, gib / 4)).collect());
        assert!(!placements.will_store(), "on {hosts} hosts");
        let piece = placements.piece_for(gib).expect("one more");
        let all: Vec<u8> = (1..=hosts).collect();
        assert_eq!((piece.bytes, piece.avoid, piece.avoid_first), (gib / 4, names(&all), vec![]));
    }
    let placements = groups_on(1..=5, gib / 4);
    assert!(placements.can_store() && placements.piece_for(gib).is_none());
    assert_eq!(placements.far_bytes_of(5 * gib), 4 * gib);
    assert_eq!(placements.goal(gib, true, 5 * gib / 4), None, "the quota counts the parity");
    let told: u64 = placements.report(gib / 2).iter().map(|it| it.used_bytes).sum();
    assert_eq!(told, gib / 2 / 4 * 5);
}

#[test]
fn parity_grows_where_it_is_and_on_a_further_host_where_that_is_refused() {
    let gib = 1 << 30;
    let mut placements = groups_on(1..=5, gib);
    assert_eq!(placements.goal(gib, false, u64::MAX), None);
    let goal = placements.goal(4 * gib, false, u64::MAX).expect("it is nearly full");
    assert_eq!(goal, 8 * gib);
    let larger = |host: u8| Some(Need::Larger { id: key_on(host).0, more_bytes: gib });
    assert_eq!(placements.need_for(goal, &nobody()), larger(1));
    // The first one has grown, and the second one is not asked again.
    let rest = |first: ClientSegment| {
        std::iter::once(first).chain((2..=5).map(|host| on(host, gib))).collect::<Vec<_>>()
    };
    placements.hear(rest(on(1, 2 * gib)));
    assert_eq!(placements.need_for(goal, &nobody()), larger(2));
    // If one of five cannot grow, it would be of no use that the others do.
    let piece = placements.need_for(goal, &BTreeSet::from([key_on(2).0]));
    let further = Piece { bytes: 2 * gib, avoid: names(&[1, 2, 3, 4, 5]), avoid_first: vec![] };
    assert_eq!(piece, Some(Need::Piece(further)));
    // What moves stays as large as it is.
    let target = Some(Target { epoch: 6, place: on(6, gib).place });
    let moves = ClientSegment { target, state: SegmentState::Moving, ..on(1, gib) };
    placements.hear(rest(moves));
    assert!(matches!(placements.need_for(goal, &nobody()), Some(Need::Piece(_))));
}

#[test]
fn a_lost_host_of_parity_is_replaced_by_a_further_one() {
    let gib = 1 << 30;
    let mut placements = groups_on(1..=5, gib);
    let begun = Instant::now();
    placements.look(begun, left(3, Reach::Nobody));
    placements.look(begun + AWAY_PATIENCE, left(3, Reach::Nobody));
    let goal = placements.goal(gib, false, u64::MAX).expect("four hosts are too few");
    let Some(Need::Piece(piece)) = placements.need_for(goal, &nobody()) else {
        panic!("growing is of no use");
    };
    assert!(piece.bytes >= (gib + FREE_MIN_BYTES) / 4, "{}", piece.bytes);
    assert_eq!(piece.avoid, names(&[1, 2, 4, 5, 3]));
    let four = (1..=6).filter(|host| *host != 3);
    placements.hear(four.map(|host| on(host, gib)).collect());
    placements.taken(key_on(6), 6, 1);
    placements.look(begun + AWAY_PATIENCE, |_| Reach::All);
    assert_eq!(placements.goal(gib, false, u64::MAX), None);
    assert!(placements.can_store());
}
