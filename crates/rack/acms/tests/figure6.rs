//! The ACMS paper's Figure 6 as a story: A serves B; at second 30 a big program starts on A and B's
//! demand shrinks; A reclaims from B, then becomes a client of C.

use std::time::Duration;

use farpool_acms::sim::{Load, Network, Note, Setup, World};
use farpool_acms::{Action, Class, MoveReason, RevokeReason};
use farpool_units::GIB;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// C is busy at first, so that B can borrow only from A; it is free when A needs it.
fn world(seed: u64) -> World {
    let loads = vec![
        Load::steady(4 * GIB, 200).then(secs(30), 1_000),
        Load::steady(4 * GIB, 1_000).then(secs(30), 700),
        Load::steady(4 * GIB, 600).then(secs(25), 200),
    ];
    World::new(Setup {
        seed,
        loads,
        network: Network::good(),
        acquainted: false,
        evacuation_ms_max: 5_000,
        stuck_permille: 0,
        notes: true,
    })
}

fn first(world: &World, node: usize, is: impl Fn(&Action) -> bool) -> Duration {
    let found = world.notes.iter().find(|Note { node: by, action, .. }| *by == node && is(action));
    found.unwrap_or_else(|| panic!("missing in {:#?}", world.notes)).at
}

#[test]
fn a_serves_b_then_reclaims_and_becomes_a_client_of_c() {
    for seed in 1..=20 {
        println!("seed {seed}");
        let mut world = world(seed);
        world.run(secs(24));
        let classes = |world: &World| [A, B, C].map(|i| world.member(i).expect("lives").class());
        assert_eq!(classes(&world), [Class::Server, Class::Client, Class::Neutral]);
        let (a, b) = (world.member(A).expect("lives"), world.member(B).expect("lives"));
        assert!(a.bound().all(|(_, client, _)| client == b.config().node));
        assert!(a.bound_bytes() > GIB / 2 && b.usable_bytes() == b.wanted_bytes());

        world.run(secs(36));
        assert_eq!(classes(&world), [Class::Client, Class::Neutral, Class::Server]);
        let a = world.member(A).expect("lives");
        assert_eq!((a.held_bytes(), world.member(B).expect("lives").in_use().count()), (0, 0));
        let c = world.member(C).expect("lives").config().node;
        assert!(a.in_use().all(|(grant, _)| grant.server == c));
        assert!(a.usable_bytes() == a.wanted_bytes() && a.wanted_bytes() > GIB / 2);

        let moved = first(&world, B, |action| matches!(action, Action::MoveOut { .. }));
        let back = first(&world, A, |action| matches!(action, Action::Revoke { .. }));
        let neutral = first(&world, A, |action| {
            matches!(action, Action::ClassChanged { from: Class::Server, .. })
        });
        assert!(moved >= secs(30) && back > moved && back <= neutral.max(moved) + secs(11));
        world.ledger.check_agreement(world.now());
    }
}

#[test]
fn a_client_that_does_not_move_loses_the_grant_and_the_donor_has_its_memory() {
    let mut world = world(3);
    world.load(B).steps.clear();
    world.run(secs(24));
    let held = world.member(A).expect("lives").held_bytes();
    assert!(held > 0);
    // B is cut off before A needs its memory: no RECLAIM reaches it.
    world.network.groups = vec![0, 1, 0];
    world.run(secs(30));
    assert_eq!(world.member(A).expect("lives").held_bytes(), 0);
    let lost = first(&world, B, |action| matches!(action, Action::GrantLost { .. }));
    assert!(lost > secs(24), "{lost:?}");
}

#[test]
fn the_reclaim_names_its_deadline_and_is_answered() {
    let mut world = world(4);
    world.run(secs(60));
    let reclaimed = world.notes.iter().find_map(|note| match note.action {
        Action::MoveOut { deadline: Some(deadline), reason: MoveReason::Reclaimed, .. } => {
            Some((note.at, deadline))
        }
        _ => None,
    });
    if let Some((at, deadline)) = reclaimed {
        assert!(deadline > at + secs(8) && deadline < at + secs(10), "{at:?} {deadline:?}");
    }
    let ends = world.notes.iter().filter_map(|note| match note.action {
        Action::Revoke { reason, .. } => Some(reason),
        _ => None,
    });
    assert!(ends.clone().count() > 0);
    assert!(ends.clone().all(|reason| reason == RevokeReason::Released));
}
