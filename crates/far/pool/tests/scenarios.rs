//! What a pool does when blades are full, die, or are cut off, and across fork.

mod common;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use common::{
    Blades, PATIENCE, allocate, config, connect, finish, finish_reads, read, reads, sample,
    submit_reads, submit_writes, try_write, write,
};
use farpool_blade::BladeConfig;
use farpool_pool::{
    Address, Ask, BladeIndex, BladeSpec, FrozenToken, Lane, MAX_SEGMENTS, PageError, Pool,
    PoolConfig, PoolError, SUPERPAGE_PAGES, SegmentHandle,
};
use farpool_units::SUPERPAGE_BYTES;
use rustix::io::Errno;

fn assert_reads_back(lane: &mut Lane, segment: SegmentHandle, pages: &[u32]) {
    for (page, done) in pages.iter().zip(read(lane, segment, pages, 0)) {
        assert_eq!(done, Ok(true), "page {page}");
    }
}

#[test]
fn a_pool_and_its_lanes_may_go_where_threads_go() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Pool>();
    sent::<Lane>();
}

#[test]
fn memory_is_spread_evenly() {
    let blades = Blades::start(&["shm", "tcp"]);
    let pool = connect(&blades);
    let segment = allocate(&pool, 8);
    assert_eq!(blades.used_bytes(0), 4 * SUPERPAGE_BYTES);
    assert_eq!(blades.used_bytes(1), 4 * SUPERPAGE_BYTES);
    let mut lane = pool.lane().expect("lane");
    let pages = sample(8);
    write(&mut lane, segment, &pages, 0);
    assert_reads_back(&mut lane, segment, &pages);
    pool.goodbye();
    drop(pool);
    blades.wait_until_unused();
}

#[test]
fn every_blade_knows_what_was_moved() {
    for transport in ["shm", "unix", "tcp"] {
        let blades = Blades::start(&[transport]);
        let pool = connect(&blades);
        let segment = allocate(&pool, 1);
        let (mut one, mut two) = (pool.lane().expect("lane"), pool.lane().expect("lane"));
        write(&mut one, segment, &[1, 2, 3, 9], 0);
        assert_reads_back(&mut two, segment, &[9, 2]);
        assert_reads_back(&mut one, segment, &[1]);
        for _ in 0..2 {
            pool.keep_alive(); // a report that comes twice counts once
            let totals = blades.serving[0].as_ref().expect("serves").stat().totals;
            let moved = (totals.pages_read.get(), totals.pages_written.get());
            assert_eq!(moved, (3, 4), "{transport}");
        }
    }
}

#[test]
fn when_one_blade_is_full_the_other_gives() {
    let blades = Blades::start_with(&["unix", "shm"], 2 * SUPERPAGE_BYTES);
    let hog = connect(&blades);
    let _three = allocate(&hog, 3); // two on one blade, one on the other
    let pool = connect(&blades);
    let segment = allocate(&pool, 1);
    let full = pool.allocate_superpage(segment, 1).expect_err("nothing left");
    let PoolError::Full { blades: named } = &full else { panic!("{full}") };
    assert!(blades.addresses.iter().all(|it| named.contains(&it.to_string())), "{full}");
    assert!(full.to_string().contains("--memory"), "{full}");
    hog.goodbye();
    drop(hog); // and so lets go of what it shares
    pool.allocate_superpage(segment, 1).expect("there is room again");
}

#[test]
fn a_full_blade_is_named_and_not_taken_for_the_quota() {
    for transport in ["shm", "unix", "tcp"] {
        let blades = Blades::start_with(&[transport], 2 * SUPERPAGE_BYTES);
        let pool = connect(&blades); // wants more than the blade has
        let segment = allocate(&pool, 2);
        let full = pool.allocate_superpage(segment, 2).expect_err("the blade has two");
        assert!(matches!(full, PoolError::Full { .. }), "{full}");
        let told = full.to_string();
        let address = blades.addresses[0].to_string();
        assert!([&address, "32 MiB", "--memory"].iter().all(|it| told.contains(*it)), "{told}");
        assert!(!told.contains("quota"), "{told}");
    }
}

#[test]
fn what_a_blade_allows_one_client_is_told_apart_from_what_it_has() {
    let mut blades = Blades::start(&[]);
    let config = BladeConfig {
        memory_bytes: 4 * SUPERPAGE_BYTES,
        quota_limit_bytes: SUPERPAGE_BYTES,
        ..BladeConfig::default()
    };
    blades.add("unix", config);
    let pool = connect(&blades);
    let segment = allocate(&pool, 1);
    let told = pool.allocate_superpage(segment, 1).expect_err("one is allowed").to_string();
    let address = blades.addresses[0].to_string();
    assert!([&address, "16 MiB", "--quota"].iter().all(|it| told.contains(*it)), "{told}");
    assert!(!told.contains("--memory"), "{told}");
}

#[test]
fn the_quota_holds_over_all_blades() {
    let blades = Blades::start(&["shm", "unix"]);
    let quota_bytes = 3 * SUPERPAGE_BYTES;
    let pool = Pool::connect(PoolConfig { quota_bytes, ..config(&blades) }).expect("connect");
    let segment = allocate(&pool, 3);
    pool.allocate_superpage(segment, 2).expect("has memory already");
    let refused = pool.allocate_superpage(segment, 3);
    assert!(matches!(refused, Err(PoolError::Quota { quota_bytes: q }) if q == quota_bytes));
    pool.free_superpage(segment, 0).expect("freed");
    pool.allocate_superpage(segment, 3).expect("within the quota again");
}

/// A blade frees nothing of a segment that is being written to: the superpage stays then, and is
/// never allocated on a second blade.
#[test]
fn memory_given_back_during_writes_is_never_in_two_places() {
    let blades = Blades::start(&["unix", "unix"]);
    let pool = connect(&blades);
    let segment = allocate(&pool, 4);
    let over = AtomicBool::new(false);
    let (freed, allocated): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut lane = pool.lane().expect("lane");
            let pages: Vec<u32> = (0..3 * SUPERPAGE_PAGES).step_by(64).collect();
            while !over.load(Relaxed) {
                write(&mut lane, segment, &pages, 0);
            }
        });
        // On a loaded machine it takes a while until both have happened.
        let (mut freed, mut allocated) = (Vec::new(), Vec::new());
        let has_both = |freed: &[Result<(), PoolError>]| {
            freed.iter().any(Result::is_ok) && freed.iter().any(Result::is_err)
        };
        let until = std::time::Instant::now() + common::AMPLE;
        while freed.len() < 400 || !has_both(&freed) && std::time::Instant::now() < until {
            freed.push(pool.free_superpage(segment, 3));
            allocated.push(pool.allocate_superpage(segment, 3));
        }
        over.store(true, Relaxed);
        (freed, allocated)
    });
    assert!(allocated.iter().all(Result::is_ok), "{allocated:?}");
    assert!(freed.iter().any(Result::is_ok));
    let refused: Vec<_> = freed.into_iter().filter_map(Result::err).collect();
    assert!(!refused.is_empty(), "no free met a write: nothing was tested");
    assert!(refused.iter().all(|error| matches!(error, PoolError::Refused { .. })), "{refused:?}");
    let mut lane = pool.lane().expect("lane");
    let page = 3 * SUPERPAGE_PAGES + 7;
    write(&mut lane, segment, &[page], 0);
    let token = pool.freeze(segment).expect("frozen");
    let child = connect(&blades);
    let theirs = child.attach(&token, None).expect("attached");
    assert_reads_back(&mut child.lane().expect("lane"), theirs, &[page]);
}

#[test]
fn there_are_only_so_many_segments() {
    let blades = Blades::start(&["unix"]);
    let pool = connect(&blades);
    let all: Vec<_> = (0..MAX_SEGMENTS).map(|_| pool.create_segment().expect("handle")).collect();
    assert!(matches!(pool.create_segment(), Err(PoolError::TooManySegments { .. })));
    pool.detach(all[5]).expect("detached");
    assert_eq!(pool.create_segment().expect("handle"), all[5]);
}

#[test]
fn pages_shared_by_memory_outlive_their_blade() {
    let mut blades = Blades::start(&["shm"]);
    let pool = connect(&blades);
    let mut lane = pool.lane().expect("lane");
    let segment = allocate(&pool, 2);
    let pages = sample(2);
    write(&mut lane, segment, &pages, 0);
    blades.stop(0);
    assert_reads_back(&mut lane, segment, &pages);
    write(&mut lane, segment, &[9], 0);
    assert_reads_back(&mut lane, segment, &[9]);
    let refused = pool.allocate_superpage(segment, 2);
    assert!(matches!(refused, Err(PoolError::BladeLost { .. })), "{refused:?}");
    pool.keep_alive();
    assert_reads_back(&mut lane, segment, &pages);
    assert_eq!(pool.lost()[0].address, blades.addresses[0].to_string());
}

/// Connections that are refused before one is let through; the pool opens that itself.
static REFUSALS_LEFT: AtomicU32 = AtomicU32::new(0);

fn refuse_some(_: &Address) -> Result<Option<OwnedFd>, Errno> {
    let left = REFUSALS_LEFT.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
    left.map_or(Ok(None), |_| Err(Errno::CONNREFUSED))
}

#[test]
fn a_child_tries_again_where_its_parents_pages_are_and_only_there() {
    let blades = Blades::start(&["tcp", "tcp"]);
    let parent = connect(&blades);
    // It lies on the first blade.
    let segment = allocate(&parent, 1);
    write(&mut parent.lane().expect("lane"), segment, &[7], 0);
    let token = parent.freeze(segment).expect("frozen");
    let on: Vec<bool> = (0..2).map(|blade| token.is_on(BladeIndex(blade))).collect();
    assert_eq!(on, [true, false]);
    let config = PoolConfig {
        asks: Some(Arc::new(refuse_some as Ask)),
        blades: Vec::new(),
        ..config(&blades)
    };
    let child = Pool::new(config);
    for (blade, is_met) in on.into_iter().enumerate() {
        REFUSALS_LEFT.store(3, SeqCst);
        let spec = BladeSpec { is_met, ..blades.addresses[blade].clone().into() };
        let added = child.add_blade(&spec);
        assert_eq!(added.is_ok(), is_met, "{added:?}");
        assert_eq!(REFUSALS_LEFT.load(SeqCst), if is_met { 0 } else { 2 });
    }
    let theirs = child.attach(&token, None).expect("attached");
    assert_reads_back(&mut child.lane().expect("lane"), theirs, &[7]);
}

/// A network that refuses to reach a blade is asked again until the deadline: here a short one.
fn connect_impatiently(blades: &Blades) -> Pool {
    Pool::connect(PoolConfig { deadline: PATIENCE, ..config(blades) }).expect("connect")
}

#[test]
fn a_lost_blade_takes_only_its_own_pages() {
    let mut blades = Blades::start(&["tcp", "unix"]);
    let pool = connect_impatiently(&blades);
    let mut lane = pool.lane().expect("lane");
    let segment = allocate(&pool, 2);
    let pages = [3, SUPERPAGE_PAGES + 3];
    write(&mut lane, segment, &pages, 0);
    blades.stop(0);
    let done = read(&mut lane, segment, &pages, 0);
    let lost: Vec<_> = done.iter().filter(|it| it.is_err()).collect();
    assert!(matches!(lost[..], [Err(PageError::BladeLost(blade))] if blade.0 == 0), "{done:?}");
    let survivor = if done[0].is_ok() { pages[0] } else { pages[1] };
    assert_reads_back(&mut lane, segment, &[survivor]);
    pool.allocate_superpage(segment, 2).expect("the other blade gives");
    let survivor_of = u32::from(done[0].is_err());
    let can_store: Vec<u32> = (0..4).filter(|&sma| pool.can_store(segment, sma)).collect();
    assert_eq!(can_store, [survivor_of, 2], "superpage 3 has no memory, one is lost");
    let lost = pool.lost();
    assert_eq!(lost.len(), 1);
    assert_eq!(lost[0].address, pool.describe(lost[0].blade));
}

#[test]
fn a_lost_blade_keeps_only_what_lies_on_it_from_being_shared() {
    let mut blades = Blades::start(&["tcp", "unix"]);
    let pool = connect_impatiently(&blades);
    let segment = allocate(&pool, 2);
    pool.may_share().expect("both answer");
    blades.stop(0);
    let lost = pool.may_share();
    assert!(matches!(lost, Err(PoolError::BladeLost { .. })), "{lost:?}");
    let on_lost = |sma: &u32| pool.blade_of(segment, *sma) == Some(BladeIndex(0));
    let there = (0..2).find(on_lost).expect("one superpage on each");
    assert!(pool.free_superpage(segment, there).is_err(), "a lost blade takes nothing back");
    assert_eq!(pool.blade_of(segment, there), None, "and has nothing any more");
    pool.may_share().expect("nothing lies on the lost one");
    pool.freeze(segment).expect("frozen on the other one");
}

#[test]
fn a_lane_to_a_blade_that_has_just_died_is_a_lane_to_the_others() {
    let mut blades = Blades::start(&["tcp", "unix"]);
    let pool = connect_impatiently(&blades);
    let segment = allocate(&pool, 2);
    blades.stop(0);
    let mut lane = pool.lane().expect("lane");
    assert!(pool.is_lost(BladeIndex(0)) && pool.usable_blades().eq([BladeIndex(1)]));
    let living = (0..2).find(|&sma| pool.can_store(segment, sma)).expect("one of two");
    let pages = [living * SUPERPAGE_PAGES + 5];
    write(&mut lane, segment, &pages, 0);
    assert_reads_back(&mut lane, segment, &pages);
}

#[test]
fn reads_in_flight_when_the_blade_dies_end() {
    for transport in ["unix", "tcp"] {
        let mut blades = Blades::start(&[transport]);
        let pool = connect_impatiently(&blades);
        let mut lane = pool.lane().expect("lane");
        let segment = allocate(&pool, 4);
        let pages: Vec<u32> = (0..4 * SUPERPAGE_PAGES).step_by(2).collect();
        write(&mut lane, segment, &pages, 0);
        let local = submit_reads(&mut lane, segment, &pages);
        blades.stop(0);
        for (page, done) in pages.iter().zip(finish_reads(&mut lane, &pages, 0, &local)) {
            match done {
                Ok(is_right) => assert!(is_right, "page {page}"),
                Err(error) => assert!(matches!(error, PageError::BladeLost(_)), "{error:?}"),
            }
        }
    }
}

/// Cuts every connection of the pool, as a network that resets them would.
fn cut_connections(pool: &Pool) -> usize {
    let ours = (0..65536).filter(|&fd| pool.owns_descriptor(fd));
    ours.filter(|&fd| {
        // SAFETY: the pool has it open and nothing closes it during this test.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::net::shutdown(fd, rustix::net::Shutdown::Both).is_ok()
    })
    .count()
}

#[test]
fn a_cut_network_is_survived() {
    for transport in ["unix", "tcp"] {
        let blades = Blades::start(&[transport]);
        let pool = connect(&blades);
        let mut lane = pool.lane().expect("lane");
        let segment = allocate(&pool, 2);
        for round in 0..30u32 {
            let mut pages: Vec<u32> = (0..300).map(|it| (it * 7 + round * 13) % 8192).collect();
            pages.sort_unstable();
            pages.dedup();
            let _local = submit_writes(&mut lane, segment, &pages, 0);
            assert_eq!(cut_connections(&pool), 2);
            assert!(finish(&mut lane, pages.len()).iter().all(Result::is_ok));
            assert_reads_back(&mut lane, segment, &pages);
            pool.keep_alive();
        }
        pool.allocate_superpage(segment, 2).expect("the control connection came back too");
        assert!(pool.lost().is_empty());
    }
}

#[test]
fn a_lease_that_ran_out_is_noticed_and_takes_no_page() {
    let mut blades = Blades::start(&[]);
    let lease = Duration::ZERO;
    blades.add("shm", BladeConfig { lease, ..BladeConfig::default() });
    let pool = connect(&blades);
    let mut lane = pool.lane().expect("lane");
    let segment = allocate(&pool, 1);
    pool.keep_alive();
    write(&mut lane, segment, &[1], 0);
    assert_eq!(cut_connections(&pool), 1);
    blades.wait_until_forgotten();
    assert_reads_back(&mut lane, segment, &[1]);
    pool.keep_alive();
    assert!(pool.lost()[0].reason.contains("lease"));
    // What it holds stays its own, even when another client needs the room.
    let other = connect(&blades);
    let theirs = other.create_segment().expect("segment");
    let last = (0..).find(|&sma| other.allocate_superpage(theirs, sma).is_err());
    assert_eq!(last, Some(63), "one of the blade's 64 superpages is held");
    assert_reads_back(&mut lane, segment, &[1]);
    write(&mut lane, segment, &[2], 0);
    assert_reads_back(&mut lane, segment, &[1, 2]);
    assert!(pool.allocate_superpage(segment, 1).is_err());
    drop((pool, lane));
    other.allocate_superpage(theirs, 63).expect("there is room as soon as nobody holds it");
}

#[test]
fn a_token_of_another_blade_opens_nothing() {
    let (blades, others) = (Blades::start(&["shm"]), Blades::start(&["shm"]));
    let token = {
        let pool = connect(&blades);
        let segment = allocate(&pool, 1);
        pool.freeze(segment).expect("frozen")
    };
    let refused = connect(&others).attach(&token, None);
    assert!(matches!(refused, Err(PoolError::OtherBlade { .. })), "{refused:?}");
}

/// The child's part of the fork test. True if all is as it should be.
fn child(inherited: Pool, mut config: PoolConfig, token: &FrozenToken, pages: &[u32]) -> bool {
    let Some(old) = (0..65536).find(|&fd| inherited.owns_descriptor(fd)) else {
        return false;
    };
    inherited.forget_after_fork();
    // SAFETY: only asked whether it is open.
    let old = unsafe { BorrowedFd::borrow_raw(old) };
    let closed = rustix::io::fcntl_getfd(old).is_err();
    let Ok(client) = farpool_pool::fresh_client() else {
        return false;
    };
    config.client = client;
    let Ok(pool) = Pool::connect(config) else {
        return false;
    };
    let (Ok(mut lane), Ok(base)) = (pool.lane(), pool.attach(token, None)) else {
        return false;
    };
    let same = reads(&mut lane, base, pages, 0) == Ok(true);
    let refused = try_write(&mut lane, base, &pages[..1], 0) == [Err(PageError::Frozen)];
    let own = allocate(&pool, 1);
    let written = try_write(&mut lane, own, &[5], 0) == [Ok(())];
    pool.goodbye();
    closed && same && refused && written
}

#[test]
fn a_forked_child_reads_what_its_parent_froze() {
    for transport in ["shm", "unix", "tcp"] {
        let blades = Blades::start(&[transport, transport]);
        let config = config(&blades);
        let pool = Pool::connect(config.clone()).expect("connect");
        let mut lane = pool.lane().expect("lane");
        let segment = allocate(&pool, 2);
        let pages = sample(2);
        write(&mut lane, segment, &pages, 0);
        let token = pool.freeze(segment).expect("frozen");
        // SAFETY: the child only uses this pool, memory (glibc's allocator survives fork) and
        // sockets, and leaves by _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            std::mem::forget(lane);
            let good = child(pool, config, &token, &pages);
            // SAFETY: ends the process at once, as intended.
            unsafe { libc::_exit(if good { 0 } else { 1 }) };
        }
        assert!(pid > 0, "fork");
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "the child over {transport}");
        assert_reads_back(&mut lane, segment, &pages);
        assert!(pool.thaw(segment).expect("answered"), "the child has left");
        write(&mut lane, segment, &pages, 0);
        pool.goodbye();
        drop(pool);
        blades.wait_until_unused();
    }
}
