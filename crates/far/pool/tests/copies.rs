//! Superpages with two copies, on blades that stop.

mod common;

use std::time::Duration;

use common::{Blades, Together, drive_until_idle, sample, shared_seals};
use farpool_pool::{
    Alone, BladeIndex, BladeSpec, CopyDesk, FailureDomain, Lane, Mover, PageError, Pool,
    PoolConfig, PoolError, Redundancy, SUPERPAGE_PAGES, Seals, SegmentHandle, Step,
};
use farpool_units::SUPERPAGE_BYTES;

const SUPERPAGES: u32 = 3;
/// The last copy is waited for so long: longer than a busy machine lets an answer wait.
const DEADLINE: Duration = Duration::from_secs(8);

fn config(blades: &Blades) -> PoolConfig {
    let config = common::config(blades);
    PoolConfig {
        seals_pages: true,
        redundancy: Redundancy::Copies(2),
        deadline: DEADLINE,
        ..config
    }
}

fn connect(blades: &Blades) -> Pool {
    Pool::connect(config(blades)).expect("connect")
}

fn allocate(pool: &Pool) -> SegmentHandle {
    common::allocate(pool, SUPERPAGES)
}

/// Writes some pages of every superpage.
fn write(lane: &mut Lane, segment: SegmentHandle, seed: u64) {
    common::write(lane, segment, &sample(SUPERPAGES), seed);
}

/// Reads them, until no blade owes an answer. True if all have the pattern of `seed + page`.
fn reads(lane: &mut Lane, segment: SegmentHandle, seed: u64) -> Result<bool, PageError> {
    let read = common::reads(lane, segment, &sample(SUPERPAGES), seed);
    drive_until_idle(lane);
    read
}

/// Makes what is missing. Returns the number of superpages.
fn complete(pool: &Pool, desk: &dyn CopyDesk) -> u64 {
    let (mut mover, mut made) = (Mover::new(pool), 0);
    loop {
        match mover.complete_copies(desk).expect("made") {
            Step::Moved => made += 1,
            Step::Waiting => panic!("nobody else makes copies"),
            Step::Empty => return made,
        }
    }
}

#[test]
fn what_one_blade_had_is_read_from_the_other_and_copied_to_a_third() {
    let mut blades = Blades::start(&["tcp", "unix"]);
    let pool = connect(&blades);
    let segment = allocate(&pool);
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, 7);
    for blade in 0..2 {
        let bytes = u64::from(SUPERPAGES) * SUPERPAGE_BYTES;
        assert_eq!(blades.used_bytes(blade), bytes, "no two copies on one blade");
        assert_eq!(pool.superpages_only_on(BladeIndex(u8::try_from(blade).expect("few"))), 0);
    }
    blades.stop(0);
    assert_eq!(reads(&mut lane, segment, 7), Ok(true));
    assert_eq!(pool.degraded_superpages(), u64::from(SUPERPAGES));
    assert!(!pool.has_all_copies());
    assert_eq!(pool.superpages_only_on(BladeIndex(1)), u64::from(SUPERPAGES));
    write(&mut lane, segment, 8);

    blades.add("tcp", farpool_blade::BladeConfig { memory_bytes: 1 << 30, ..Default::default() });
    let third = pool.add_blade(&blades.addresses[2].clone().into()).expect("added");
    assert_eq!(complete(&pool, &Alone), u64::from(SUPERPAGES));
    assert!(pool.has_all_copies() && pool.degraded_superpages() == 0);
    assert_eq!(pool.superpages_on(BladeIndex(0)), 0);
    pool.remove_blade(BladeIndex(0)).expect("nothing is missed there");
    blades.stop(1);
    assert_eq!(reads(&mut lane, segment, 8), Ok(true));
    write(&mut lane, segment, 9);
    assert_eq!(reads(&mut lane, segment, 9), Ok(true));
    assert_eq!(pool.superpages_only_on(third), u64::from(SUPERPAGES));
    blades.stop(2);
    assert!(matches!(reads(&mut lane, segment, 9), Err(PageError::BladeLost(_))));
}

/// What the rack's model calls one domain is one, whatever the addresses.
#[test]
fn no_two_copies_lie_in_one_domain_of_the_racks() {
    let blades = Blades::start(&["tcp", "unix", "tcp"]);
    let spec = |at: usize, number| BladeSpec {
        domain: Some(FailureDomain::Named(number)),
        ..blades.addresses[at].clone().into()
    };
    let pool = Pool::new(PoolConfig { blades: Vec::new(), ..config(&blades) });
    [spec(0, 1), spec(1, 1)].iter().for_each(|it| _ = pool.add_blade(it).expect("added"));
    let segment = allocate(&pool);
    assert_eq!(pool.degraded_superpages(), u64::from(SUPERPAGES), "one domain, one copy");
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, 7);
    let nowhere = Mover::new(&pool).complete_copies(&Alone);
    assert!(matches!(nowhere, Err(PoolError::Full { .. })), "{nowhere:?}");
    assert!(!pool.has_all_copies());
    let third = pool.add_blade(&spec(2, 2)).expect("added");
    assert_eq!(complete(&pool, &Alone), u64::from(SUPERPAGES));
    assert_eq!(pool.superpages_on(third), u64::from(SUPERPAGES));
    assert!(pool.has_all_copies());
}

/// The seals of a segment as a child has them.
fn shared(pool: &Pool, segment: SegmentHandle) -> Option<Seals> {
    shared_seals(pool, segment, 0..SUPERPAGES * SUPERPAGE_PAGES)
}

#[test]
fn a_frozen_copy_that_is_lost_is_made_once_for_all_who_share_it() {
    let mut blades = Blades::start(&["tcp", "tcp"]);
    let (parent, child) = (connect(&blades), connect(&blades));
    let segment = allocate(&parent);
    let mut lane = parent.lane().expect("lane");
    write(&mut lane, segment, 3);
    let token = parent.freeze(segment).expect("frozen");
    let theirs = child.attach(&token, shared(&parent, segment)).expect("attached");
    let mut child_lane = child.lane().expect("lane");
    blades.stop(0);
    assert_eq!(reads(&mut lane, segment, 3), Ok(true));
    assert_eq!(reads(&mut child_lane, theirs, 3), Ok(true));

    blades.add("tcp", farpool_blade::BladeConfig { memory_bytes: 1 << 30, ..Default::default() });
    let desk = Together::default();
    for pool in [&parent, &child] {
        pool.add_blade(&blades.addresses[2].clone().into()).expect("added");
        complete(pool, &desk);
        assert_eq!(pool.degraded_superpages(), 0);
        pool.remove_blade(BladeIndex(0)).expect("nothing is missed there");
    }
    let bytes = u64::from(SUPERPAGES) * SUPERPAGE_BYTES;
    assert_eq!(blades.used_bytes(2), bytes, "one of them made it, the other attached it");

    // A grandchild that is born now has both copies, too.
    let grandchild = Pool::new(config(&blades));
    for at in [1, 2] {
        let spec = blades.addresses[usize::from(at)].clone().into();
        grandchild.add_blade_at(BladeIndex(at), &spec).expect("added");
    }
    let token = parent.freeze(segment).expect("frozen already");
    let own = grandchild.attach(&token, shared(&parent, segment)).expect("attached");
    assert_eq!(grandchild.degraded_superpages(), 0);
    blades.stop(1);
    assert_eq!(reads(&mut lane, segment, 3), Ok(true));
    assert_eq!(reads(&mut child_lane, theirs, 3), Ok(true));
    assert_eq!(reads(&mut grandchild.lane().expect("lane"), own, 3), Ok(true));
    grandchild.detach(own).expect("detached");
    child.detach(theirs).expect("detached");
    assert!(parent.thaw(segment).expect("nobody else uses it"));
    write(&mut lane, segment, 4);
    assert_eq!(reads(&mut lane, segment, 4), Ok(true));
}

/// The blade dies between the fork and the child's first steps.
#[test]
fn a_child_that_finds_one_blade_dead_has_what_its_parent_had() {
    let mut blades = Blades::start(&["tcp", "tcp", "tcp"]);
    let (parent, child) = (connect(&blades), connect(&blades));
    let segment = allocate(&parent);
    let mut lane = parent.lane().expect("lane");
    write(&mut lane, segment, 3);
    let token = parent.freeze(segment).expect("frozen");
    blades.stop(1);
    let theirs = child.attach(&token, shared(&parent, segment)).expect("attached");
    assert!(!child.has_all_copies(), "no blade may be spared");
    let mut child_lane = child.lane().expect("lane");
    assert_eq!(reads(&mut child_lane, theirs, 3), Ok(true));
    complete(&child, &Alone);
    assert_eq!(child.degraded_superpages(), 0);
    // Who uses it alone at last writes to it, also where its own copy was lost.
    parent.detach(segment).expect("detached");
    assert!(child.thaw(theirs).expect("it is its own"));
    write(&mut child_lane, theirs, 4);
    blades.stop(0);
    assert_eq!(reads(&mut child_lane, theirs, 4), Ok(true));
}
