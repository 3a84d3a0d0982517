//! Groups of superpages with parity, on blades that stop.

mod common;

use std::time::{Duration, Instant};

use common::{AMPLE, Blades, Together, drive_until_idle, shared_seals};
use farpool_pool::{
    Alone, BladeIndex, BladeSpec, CopyDesk, Lane, Mover, PageError, Pool, PoolConfig, PoolError,
    Redundancy, SUPERPAGE_PAGES, SegmentHandle, Step,
};
use farpool_units::SUPERPAGE_BYTES;

/// Two groups, the second of which is not full.
const SUPERPAGES: u32 = 6;
/// A silent blade is waited for so long, if none can be spared: longer than a busy machine lets an
/// answer wait.
const DEADLINE: Duration = Duration::from_secs(8);

fn config(blades: &Blades) -> PoolConfig {
    let config = common::config(blades);
    PoolConfig { seals_pages: true, redundancy: Redundancy::Parity, deadline: DEADLINE, ..config }
}

fn connect(blades: &Blades) -> Pool {
    Pool::connect(config(blades)).expect("connect")
}

/// Blades of so many failure domains.
fn start(blades: usize) -> Blades {
    Blades::start(&["tcp", "unix"].repeat(4)[..blades])
}

fn add(blades: &mut Blades, pool: &Pool) -> BladeIndex {
    blades.add("tcp", farpool_blade::BladeConfig { memory_bytes: 1 << 30, ..Default::default() });
    let address = blades.addresses.last().expect("one was added").clone();
    pool.add_blade(&address.into()).expect("added")
}

/// Waits until the running blades have lent so much: what is freed counts until it is cleared, and
/// a blade frees memory a moment after the last write to it was answered.
fn wait_for_used(blades: &Blades, pool: &Pool, superpages: u64) {
    let until = Instant::now() + AMPLE;
    loop {
        complete(pool, &Alone);
        let running = blades.serving.iter().flatten();
        let used = running.map(|serving| {
            serving.blade().run_scrubs();
            serving.stat().totals.used_bytes.get()
        });
        let used: u64 = used.sum();
        if used == superpages * SUPERPAGE_BYTES {
            return;
        }
        assert!(Instant::now() < until, "{used} bytes are in use, not {superpages} superpages");
        std::thread::yield_now();
    }
}

/// Some pages of every superpage; in some rows of all members, in some of one.
fn sample(superpages: u32) -> Vec<u32> {
    let of = |superpage| [0, 1, 2, 777, 4095 - superpage].map(|p| superpage * SUPERPAGE_PAGES + p);
    (0..superpages).flat_map(of).collect()
}

fn write(lane: &mut Lane, segment: SegmentHandle, seed: u64) {
    common::write(lane, segment, &sample(SUPERPAGES), seed);
}

/// Reads them, until no blade owes an answer. True if all have the pattern of `seed + page`.
fn reads(lane: &mut Lane, segment: SegmentHandle, seed: u64) -> Result<bool, PageError> {
    let read = common::reads(lane, segment, &sample(SUPERPAGES), seed);
    drive_until_idle(lane);
    read
}

/// Makes what is missing. Returns the number of steps.
fn complete(pool: &Pool, desk: &dyn CopyDesk) -> u64 {
    let (mut mover, mut made) = (Mover::new(pool), 0);
    loop {
        match mover.complete_copies(desk).expect("made") {
            Step::Moved => made += 1,
            // A blade frees memory a moment after the last write to it was answered.
            Step::Waiting => std::thread::yield_now(),
            Step::Empty => return made,
        }
    }
}

#[test]
fn any_one_blade_may_die_and_the_next_one_once_its_superpages_are_made_again() {
    for first in 0..6 {
        let mut blades = start(6);
        let pool = connect(&blades);
        let segment = common::allocate(&pool, SUPERPAGES);
        wait_for_used(&blades, &pool, 8); // six, and the parity of two groups
        assert_eq!(pool.degraded_superpages(), 0);
        let mut lane = pool.lane().expect("lane");
        write(&mut lane, segment, 7);
        write(&mut lane, segment, 8);
        for blade in (0..6).map(BladeIndex) {
            assert_eq!(pool.superpages_only_on(blade), 0, "{blade:?}");
        }
        blades.stop(first);
        assert_eq!(reads(&mut lane, segment, 8), Ok(true), "without blade {first}");
        write(&mut lane, segment, 9);
        assert_eq!(reads(&mut lane, segment, 9), Ok(true), "written without blade {first}");
        assert!(!pool.has_all_copies() && pool.degraded_superpages() > 0);

        let seventh = add(&mut blades, &pool);
        assert!(complete(&pool, &Alone) > 0);
        assert!(pool.has_all_copies() && pool.degraded_superpages() == 0);
        assert!(pool.superpages_on(seventh) > 0);
        let first = BladeIndex(u8::try_from(first).expect("few"));
        assert_eq!(pool.superpages_on(first), 0);
        pool.remove_blade(first).expect("nothing is missed there");
        assert_eq!(reads(&mut lane, segment, 9), Ok(true));
        let second = usize::from(first.0 == 0);
        blades.stop(second);
        assert_eq!(reads(&mut lane, segment, 9), Ok(true), "without blades {first:?}, {second}");
        write(&mut lane, segment, 10);
        assert_eq!(reads(&mut lane, segment, 10), Ok(true));
    }
}

#[test]
fn what_two_blades_lose_at_once_is_lost_and_said_to_be() {
    let mut blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(4), 7);
    blades.stop(0);
    blades.stop(1);
    let read = common::read(&mut lane, segment, &sample(4), 7);
    drive_until_idle(&mut lane);
    let lost = read.iter().filter(|it| matches!(it, Err(PageError::BladeLost(_)))).count();
    let right = read.iter().filter(|it| **it == Ok(true)).count();
    assert_eq!(lost + right, read.len(), "{read:?}");
    assert!((5..=10).contains(&lost), "one or two superpages: {read:?}");
    let only = [0, 1].map(|blade| pool.superpages_only_on(BladeIndex(blade)));
    assert_eq!(only.iter().sum::<u64>() * 5, u64::try_from(lost).expect("few"));
}

#[test]
fn memory_that_is_given_back_is_taken_out_of_the_parity() {
    let mut blades = start(6);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(4), 7);
    pool.free_superpage(segment, 2).expect("freed");
    let page = 2 * SUPERPAGE_PAGES;
    assert_eq!(common::read(&mut lane, segment, &[page], 7), [Err(PageError::NotAllocated)]);
    assert!(!pool.has_all_copies(), "the mover has something to do");
    let used: u64 = (0..6).map(|blade| blades.used_bytes(blade)).sum();
    assert_eq!(used, 5 * SUPERPAGE_BYTES, "until it is taken out");
    assert_eq!(complete(&pool, &Alone), 1);
    wait_for_used(&blades, &pool, 4);
    assert!(pool.has_all_copies());

    // Taken again before the mover comes, and after it did.
    pool.free_superpage(segment, 1).expect("freed");
    for superpage in [1, 2] {
        pool.allocate_superpage(segment, superpage).expect("allocated");
        let page = superpage * SUPERPAGE_PAGES;
        let unwritten = common::read(&mut lane, segment, &[page], 7);
        assert_eq!(unwritten, [Err(PageError::Forged)], "nothing old is read");
        let written: Vec<u32> = (0..3).map(|it| superpage * SUPERPAGE_PAGES + it).collect();
        common::write(&mut lane, segment, &written, 8);
    }
    assert_eq!(complete(&pool, &Alone), 0);
    let old: Vec<u32> =
        sample(4).into_iter().filter(|page| [0, 3].contains(&(page / SUPERPAGE_PAGES))).collect();
    let new: Vec<u32> =
        [1, 2].iter().flat_map(|it| (0..3).map(move |p| it * SUPERPAGE_PAGES + p)).collect();
    for blade in 0..6 {
        let at = BladeIndex(u8::try_from(blade).expect("few"));
        let is_of_use = pool.superpages_on(at) > 0;
        if is_of_use {
            blades.stop(blade);
            assert_eq!(common::reads(&mut lane, segment, &old, 7), Ok(true));
            assert_eq!(common::reads(&mut lane, segment, &new, 8), Ok(true));
            break;
        }
    }
    for superpage in 0..4 {
        pool.free_superpage(segment, superpage).expect("freed");
    }
    wait_for_used(&blades, &pool, 0); // the last one takes the parity with it
}

#[test]
fn what_a_dead_blade_had_is_made_while_memory_is_given_back_all_the_time() {
    let mut blades = start(6);
    let pool = connect(&blades);
    let given_back = common::allocate(&pool, 2);
    let has_none: Vec<BladeIndex> =
        (0..6).map(BladeIndex).filter(|blade| pool.superpages_on(*blade) == 0).collect();
    let segment = common::allocate(&pool, 4);
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(4), 7);
    let is_apart =
        |superpage: &u32| has_none.contains(&pool.blade_of(segment, *superpage).unwrap());
    let lost = (0..4).find(is_apart).expect("four of six blades have nothing of the other");
    stop_blade_of(&mut blades, &pool, segment, lost);
    assert_eq!(common::reads(&mut lane, segment, &sample(4), 7), Ok(true));
    drive_until_idle(&mut lane);
    let mut mover = Mover::new(&pool);
    let mut steps = 0;
    while pool.degraded_superpages() > 0 {
        steps += 1;
        assert!(steps < 100, "nothing was made");
        pool.free_superpage(given_back, 0).expect("freed");
        match mover.complete_copies(&Alone).expect("made") {
            Step::Moved => {}
            // A blade frees memory a moment after the last write to it was answered.
            Step::Waiting | Step::Empty => std::thread::yield_now(),
        }
        pool.allocate_superpage(given_back, 0).expect("allocated");
        common::write(&mut lane, given_back, &[0], 8);
        drive_until_idle(&mut lane);
    }
    assert_eq!(common::reads(&mut lane, segment, &sample(4), 7), Ok(true));
}

/// Writes and reads as long as the mover has something to do; at last the pattern of 1.
fn write_beside(lane: &mut Lane, segment: SegmentHandle, mover: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let mover = scope.spawn(mover);
        let mut seed = 8;
        while !mover.is_finished() {
            write(lane, segment, seed);
            assert_eq!(reads(lane, segment, seed), Ok(true));
            seed += 1;
        }
    });
    write(lane, segment, 1);
}

#[test]
fn a_blade_is_left_under_a_program_that_writes() {
    let mut blades = start(6);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, SUPERPAGES);
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, 7);
    let leaving = (0..6).map(BladeIndex).find(|at| pool.superpages_on(*at) > 0).expect("one");
    add(&mut blades, &pool);
    pool.set_leaving(leaving, true);
    write_beside(&mut lane, segment, || {
        let mut mover = Mover::new(&pool);
        while mover.step(leaving, &Alone, || true).expect("moved") != Step::Empty {}
    });
    pool.remove_blade(leaving).expect("left");
    assert_eq!(reads(&mut lane, segment, 1), Ok(true));
    assert_eq!(pool.degraded_superpages(), 0);
    let another = (0..6).find(|it| *it != usize::from(leaving.0)).expect("one");
    blades.stop(another);
    assert_eq!(reads(&mut lane, segment, 1), Ok(true));
}

/// Moves all that it can. Returns the error of a blade with something on it that has no room.
fn leave(pool: &Pool, blade: BladeIndex) -> Result<(), PoolError> {
    let mut mover = Mover::new(pool);
    while mover.step(blade, &Alone, || true)? != Step::Empty {}
    pool.remove_blade(blade)
}

/// Where no blade is left that lies apart, the client's own memory takes all of a group: what fails
/// only with the client is apart from everything.
#[test]
fn what_must_leave_all_blades_goes_into_the_clients_own() {
    let mut blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, SUPERPAGES);
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, 7);
    let all: Vec<BladeIndex> = (0..5).map(BladeIndex).collect();
    all.iter().for_each(|blade| pool.set_leaving(*blade, true));
    assert!(all.iter().any(|blade| matches!(leave(&pool, *blade), Err(PoolError::Full { .. }))));
    let config = farpool_blade::BladeConfig { memory_bytes: 1 << 30, ..Default::default() };
    blades.add("unix", config);
    let address = blades.addresses.last().expect("one was added").clone();
    let own = BladeSpec { is_of_client: true, ..address.into() };
    let own = pool.add_blade(&own).expect("added");
    for blade in all {
        leave(&pool, blade).expect("left");
    }
    assert_eq!(pool.superpages_on(own), 8, "six, and the parity of two groups");
    assert!(pool.degraded_superpages() == 0);
    assert_eq!(reads(&mut lane, segment, 7), Ok(true));
    // What the rack has again is used first.
    (0..5).for_each(|_| _ = add(&mut blades, &pool));
    pool.set_leaving(own, true);
    leave(&pool, own).expect("left");
    assert_eq!(pool.degraded_superpages(), 0);
    blades.stop(7);
    assert_eq!(reads(&mut lane, segment, 7), Ok(true));
}

/// While others have room, the client's own memory is left alone.
#[test]
fn the_clients_own_memory_is_used_last() {
    let mut blades = start(6);
    let specs = (0_u8..)
        .zip(&blades.addresses)
        .map(|(at, address)| BladeSpec { is_of_client: at == 0, ..address.clone().into() });
    let config = PoolConfig { blades: specs.collect(), ..config(&blades) };
    let pool = Pool::connect(config).expect("connect");
    let segment = common::allocate(&pool, SUPERPAGES);
    assert!(pool.superpages_on(BladeIndex(0)) == 0 && pool.degraded_superpages() == 0);
    let mut lane = pool.lane().expect("lane");
    write(&mut lane, segment, 7);
    blades.stop(1);
    assert_eq!(reads(&mut lane, segment, 7), Ok(true));
    assert!(complete(&pool, &Alone) > 0 && pool.has_all_copies());
    assert!(pool.superpages_on(BladeIndex(0)) > 0);
    blades.stop(2);
    assert_eq!(reads(&mut lane, segment, 7), Ok(true));
}

/// What is read for the parity of a page: nothing where it is alone in its row, the other one where
/// there is one, and what it changes where there are more.
#[test]
fn the_parity_of_a_page_is_made_of_few() {
    let blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    let mut lane = pool.lane().expect("lane");
    let pages_read = || {
        let running = blades.serving.iter().flatten();
        running.map(|serving| serving.stat().totals.pages_read.get()).sum::<u64>()
    };
    let expected = [(0, [0, 0]), (1, [1, 1]), (2, [1, 2])];
    for (superpage, reads) in expected {
        for (seed, reads) in (7..).zip(reads) {
            let before = pages_read();
            common::write(&mut lane, segment, &[superpage * SUPERPAGE_PAGES + 5], seed);
            assert_eq!(pages_read() - before, reads, "superpage {superpage}, seed {seed}");
        }
    }
}

#[test]
fn superpages_are_made_again_under_a_program_that_writes() {
    for lost in [0, 1, 4] {
        let mut blades = start(6);
        let pool = connect(&blades);
        let segment = common::allocate(&pool, SUPERPAGES);
        let mut lane = pool.lane().expect("lane");
        write(&mut lane, segment, 7);
        blades.stop(lost);
        assert_eq!(reads(&mut lane, segment, 7), Ok(true));
        add(&mut blades, &pool);
        write_beside(&mut lane, segment, || _ = complete(&pool, &Alone));
        assert!(pool.has_all_copies());
        for blade in (0..6).filter(|it| *it != lost) {
            if pool.superpages_on(BladeIndex(u8::try_from(blade).expect("few"))) > 0 {
                blades.stop(blade);
                assert_eq!(reads(&mut lane, segment, 1), Ok(true), "without {lost}, {blade}");
                break;
            }
        }
    }
}

/// Lanes write pages of the same rows at once; each changes the parity of all of them.
#[test]
fn writers_of_one_row_do_not_undo_each_others_parity() {
    let mut blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    std::thread::scope(|scope| {
        for member in 0..4 {
            let mut lane = pool.lane().expect("lane");
            scope.spawn(move || {
                let pages: Vec<u32> = (0..32).map(|it| member * SUPERPAGE_PAGES + it).collect();
                for seed in 0..40 {
                    common::write(&mut lane, segment, &pages, seed);
                    assert_eq!(common::reads(&mut lane, segment, &pages, seed), Ok(true));
                }
            });
        }
    });
    let pages: Vec<u32> =
        (0..4).flat_map(|member| (0..32).map(move |it| member * SUPERPAGE_PAGES + it)).collect();
    blades.stop(2);
    let mut lane = pool.lane().expect("lane");
    assert_eq!(common::reads(&mut lane, segment, &pages, 39), Ok(true));
}

/// A full group that is written. A lane ended before it was known that page 0 is stored: nobody
/// knows what the parity of that row should be.
fn group_with_a_row_in_doubt() -> (Blades, Pool, SegmentHandle) {
    let blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    common::write(&mut pool.lane().expect("lane"), segment, &sample(4), 7);
    let mut lane = pool.lane().expect("lane");
    let _local = common::submit_writes(&mut lane, segment, &[0], 99);
    drop(lane);
    assert!(!pool.has_all_copies() && pool.degraded_superpages() == 4);
    (blades, pool, segment)
}

fn stop_blade_of(blades: &mut Blades, pool: &Pool, segment: SegmentHandle, superpage: u32) {
    blades.stop(pool.blade_of(segment, superpage).expect("a blade").0.into());
}

/// Of the other rows the parity is as good as ever.
#[test]
fn a_row_in_doubt_costs_no_other_row() {
    let (mut blades, pool, segment) = group_with_a_row_in_doubt();
    let mut lane = pool.lane().expect("lane");
    stop_blade_of(&mut blades, &pool, segment, 1);
    // What nobody can know of the row is the lost blade's page of it.
    let known: Vec<u32> =
        sample(4).into_iter().filter(|it| ![0, SUPERPAGE_PAGES].contains(it)).collect();
    assert_eq!(common::reads(&mut lane, segment, &known, 7), Ok(true));
    let unknown = common::read(&mut lane, segment, &[SUPERPAGE_PAGES], 7);
    assert_ne!(unknown, [Ok(false)], "never something else");
    add(&mut blades, &pool);
    complete(&pool, &Alone);
    assert!(pool.has_all_copies() && pool.degraded_superpages() == 0);
    assert_eq!(common::reads(&mut lane, segment, &known, 7), Ok(true));
    common::write(&mut lane, segment, &sample(4), 8);
    stop_blade_of(&mut blades, &pool, segment, 2);
    assert_eq!(common::reads(&mut lane, segment, &sample(4), 8), Ok(true));
    drive_until_idle(&mut lane);
}

#[test]
fn a_row_in_doubt_is_mended_by_the_mover() {
    let (mut blades, pool, segment) = group_with_a_row_in_doubt();
    let blade = pool.blade_of(segment, 1).expect("a blade");
    assert_eq!(pool.superpages_only_on(blade), 1, "a page of it");
    complete(&pool, &Alone);
    assert!(pool.has_all_copies() && pool.degraded_superpages() == 0);
    assert_eq!(pool.superpages_only_on(blade), 0);
    stop_blade_of(&mut blades, &pool, segment, 1);
    let mut lane = pool.lane().expect("lane");
    assert_eq!(common::reads(&mut lane, segment, &sample(4)[1..], 7), Ok(true));
    drive_until_idle(&mut lane);
}

/// Who writes to it makes its parity from all of it.
#[test]
fn a_row_in_doubt_is_mended_by_who_writes_to_it() {
    let (mut blades, pool, segment) = group_with_a_row_in_doubt();
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &[0], 7);
    assert!(pool.degraded_superpages() == 0);
    stop_blade_of(&mut blades, &pool, segment, 0);
    assert_eq!(common::reads(&mut lane, segment, &sample(4), 7), Ok(true));
    drive_until_idle(&mut lane);
}

#[test]
fn with_too_few_domains_the_rest_is_done_once_there_are_more() {
    let mut blades = start(4);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    assert_eq!(pool.degraded_superpages(), 4, "two of a group are on one blade");
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(4), 7);
    complete(&pool, &Alone);
    assert!(!pool.has_all_copies());
    add(&mut blades, &pool);
    assert!(complete(&pool, &Alone) > 0);
    assert!(pool.has_all_copies() && pool.degraded_superpages() == 0);
    blades.stop(3);
    assert_eq!(common::reads(&mut lane, segment, &sample(4), 7), Ok(true));
}

/// Makes what can be made, which is not all.
fn complete_in_vain(pool: &Pool) {
    let mut mover = Mover::new(pool);
    let mut steps = std::iter::repeat_with(|| mover.complete_copies(&Alone));
    let last = steps.find(|it| !matches!(it, Ok(Step::Moved | Step::Waiting)));
    assert!(matches!(last, Some(Ok(Step::Empty) | Err(PoolError::Full { .. }))), "{last:?}");
    assert!(pool.degraded_superpages() > 0);
}

/// What misses a further blade would not have room if the others had more.
#[test]
fn too_few_blades_are_no_crowd() {
    let mut blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 4);
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(4), 7);
    for blade in 0..2 {
        blades.stop(blade);
        // With the second one two superpages are lost.
        let read = common::read(&mut lane, segment, &sample(4), 7);
        assert!(!read.contains(&Ok(false)), "{read:?}");
        drive_until_idle(&mut lane);
        complete_in_vain(&pool);
        assert!(!pool.is_crowded());
    }
}

/// A full group finds no fifth blade; what another group has on the lost one is made all the same.
#[test]
fn what_finds_no_room_keeps_nothing_else_from_being_made() {
    let mut blades = start(5);
    let pool = connect(&blades);
    let segment = common::allocate(&pool, 5);
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(5), 7);
    stop_blade_of(&mut blades, &pool, segment, 4);
    assert_eq!(common::reads(&mut lane, segment, &sample(5), 7), Ok(true));
    assert_eq!(pool.degraded_superpages(), 5);
    complete_in_vain(&pool);
    assert_eq!(pool.degraded_superpages(), 4);
    assert!(!pool.is_crowded(), "no blade would help by having more");
    stop_blade_of(&mut blades, &pool, segment, 4);
    let page = [4 * SUPERPAGE_PAGES];
    assert_eq!(common::reads(&mut lane, segment, &page, 7), Ok(true));
    drive_until_idle(&mut lane);
}

/// A blade with memory for one superpage is where all others would be apart.
#[test]
fn groups_that_lie_together_for_want_of_room_are_told_until_there_is_some() {
    let mut blades = start(4);
    let pool = connect(&blades);
    let few = farpool_blade::BladeConfig { memory_bytes: SUPERPAGE_BYTES, ..Default::default() };
    blades.add("tcp", few);
    let small = blades.addresses[4].clone();
    let segment = common::allocate(&pool, 4);
    assert!(pool.degraded_superpages() > 0 && !pool.is_crowded(), "there is no fifth blade");
    pool.add_blade(&small.into()).expect("added");
    complete(&pool, &Alone);
    assert!(pool.has_all_copies() && !pool.is_crowded());
    for superpage in 4..8 {
        pool.allocate_superpage(segment, superpage).expect("allocated");
    }
    complete(&pool, &Alone);
    assert!(pool.degraded_superpages() == 4 && pool.is_crowded(), "the fifth is full");
    add(&mut blades, &pool);
    assert!(complete(&pool, &Alone) > 0);
    assert!(pool.has_all_copies() && !pool.is_crowded());
    // What is lost has no room either, and then it has.
    let mut lane = pool.lane().expect("lane");
    common::write(&mut lane, segment, &sample(8), 7);
    blades.stop(0);
    assert_eq!(common::reads(&mut lane, segment, &sample(8), 7), Ok(true));
    complete_in_vain(&pool);
    assert!(pool.is_crowded());
    add(&mut blades, &pool);
    assert!(complete(&pool, &Alone) > 0);
    assert!(pool.has_all_copies() && !pool.is_crowded());
    assert_eq!(common::reads(&mut lane, segment, &sample(8), 7), Ok(true));
}

#[test]
fn a_frozen_superpage_that_is_lost_is_made_once_for_all_who_share_it() {
    for lost in 0..6_u8 {
        let mut blades = start(6);
        let (parent, child) = (connect(&blades), connect(&blades));
        let segment = common::allocate(&parent, SUPERPAGES);
        let mut lane = parent.lane().expect("lane");
        write(&mut lane, segment, 3);
        let token = parent.freeze(segment).expect("frozen");
        let theirs = child.attach(&token, shared_seals(&parent, segment, 0..1)).expect("attached");
        let mut child_lane = child.lane().expect("lane");
        blades.stop(lost.into());
        assert_eq!(reads(&mut lane, segment, 3), Ok(true));
        assert_eq!(reads(&mut child_lane, theirs, 3), Ok(true));
        // A child that is born now finds the blade dead.
        let late = Pool::new(config(&blades));
        for at in (0..6).filter(|at| *at != lost) {
            let spec = blades.addresses[usize::from(at)].clone().into();
            late.add_blade_at(BladeIndex(at), &spec).expect("added");
        }
        let token = parent.freeze(segment).expect("frozen already");
        let own = late.attach(&token, shared_seals(&parent, segment, 0..1)).expect("attached");
        assert_eq!(reads(&mut late.lane().expect("lane"), own, 3), Ok(true));
        late.detach(own).expect("detached");

        blades
            .add("tcp", farpool_blade::BladeConfig { memory_bytes: 1 << 30, ..Default::default() });
        let desk = Together::default();
        for pool in [&parent, &child] {
            pool.add_blade(&blades.addresses[6].clone().into()).expect("added");
            complete(pool, &desk);
            assert_eq!(pool.degraded_superpages(), 0, "without blade {lost}");
            pool.remove_blade(BladeIndex(lost)).expect("nothing is missed there");
        }
        wait_for_used(&blades, &parent, 8); // made once
        let second = u8::from(lost == 0);
        blades.stop(second.into());
        assert_eq!(reads(&mut lane, segment, 3), Ok(true));
        assert_eq!(reads(&mut child_lane, theirs, 3), Ok(true));
        child.detach(theirs).expect("detached");
        assert!(parent.thaw(segment).expect("nobody else uses it"));
        write(&mut lane, segment, 4);
        assert_eq!(reads(&mut lane, segment, 4), Ok(true));
    }
}

#[test]
fn a_quota_counts_the_parity() {
    let blades = start(5);
    let quota_bytes = 5 * SUPERPAGE_BYTES;
    let pool = Pool::connect(PoolConfig { quota_bytes, ..config(&blades) }).expect("connect");
    let segment = common::allocate(&pool, 4);
    let beyond = pool.allocate_superpage(segment, 4);
    assert!(matches!(beyond, Err(PoolError::Quota { .. })), "{beyond:?}");
    pool.detach(segment).expect("detached");
    common::allocate(&pool, 4);
}
