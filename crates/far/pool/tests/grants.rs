//! A pool whose blade lends under grants: what the client sees when its grant changes.

mod common;

use common::{AMPLE, Blades, Pages, config, finish};
use farpool_blade::{BladeConfig, GrantId, GrantSpec};
use farpool_pool::{
    BladeSpec, ClientLimits, Grant, GrantKey, Lane, PageError, PageRead, PageWrite, Pool,
    PoolConfig, PoolError, RateLimit, SegmentHandle, SegmentPage,
};
use farpool_units::SUPERPAGE_BYTES;
use std::sync::Arc;
use std::time::Instant;

const KEY: GrantKey = GrantKey(99);

fn spec(epoch: u64) -> GrantSpec {
    GrantSpec {
        id: GrantId(5),
        epoch,
        key: KEY,
        bytes: 2 * SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    }
}

fn granting(transport: &str) -> Blades {
    let mut blades = Blades::start(&[]);
    let config = BladeConfig { require_grants: true, ..BladeConfig::default() };
    blades.add(transport, config);
    blades.serving[0].as_ref().expect("serves").blade().set_grant(&spec(1)).expect("set");
    blades
}

fn config_under(blades: &Blades, epoch: u64) -> PoolConfig {
    let grant = Some(Grant { key: KEY, epoch });
    let blade = BladeSpec { grant, ..blades.addresses[0].clone().into() };
    PoolConfig { blades: vec![blade], ..config(blades) }
}

fn segment_of(pool: &Pool, superpages: u32) -> SegmentHandle {
    let segment = pool.create_segment().expect("segment");
    (0..superpages).for_each(|sma| pool.allocate_superpage(segment, sma).expect("memory"));
    segment
}

fn write(lane: &mut Lane, segment: SegmentHandle, pages: &[u32]) -> Vec<Result<(), PageError>> {
    let local = Pages::of_patterns(pages.iter().map(|&page| u64::from(page)));
    let write = |(token, &page): (u64, &u32)| {
        let at = SegmentPage { segment, page };
        PageWrite { at, from: local.at(token), token }
    };
    let writes: Vec<_> = (0u64..).zip(pages).map(write).collect();
    // SAFETY: the pages outlive the wait for their completions.
    unsafe { lane.write(&writes) }.expect("submitted");
    finish(lane, pages.len())
}

fn read(
    lane: &mut Lane,
    segment: SegmentHandle,
    pages: &[u32],
) -> (Vec<Result<(), PageError>>, Pages) {
    let mut local = Pages::of_patterns(pages.iter().map(|_| !0));
    let read = |(token, &page): (u64, &u32)| {
        let at = SegmentPage { segment, page };
        PageRead { at, into: local.at_mut(token), token }
    };
    let reads: Vec<_> = (0u64..).zip(pages).map(read).collect();
    // SAFETY: as above.
    unsafe { lane.read(&reads) }.expect("submitted");
    (finish(lane, pages.len()), local)
}

#[test]
fn without_its_grant_a_pool_does_not_connect_and_says_why() {
    let blades = granting("tcp");
    let refused = Pool::connect(config(&blades)).expect_err("no grant");
    assert!(refused.to_string().contains("no grant"), "{refused}");
    let refused = Pool::connect(config_under(&blades, 0)).expect_err("an old epoch");
    assert!(refused.to_string().contains("issued again"), "{refused}");
    Pool::connect(config_under(&blades, 1)).expect("the right one").goodbye();
}

#[test]
fn memory_under_a_grant_is_not_shared_by_descriptor() {
    let blades = granting("shm");
    let pool = Pool::connect(config_under(&blades, 1)).expect("connect");
    let segment = pool.create_segment().expect("segment");
    let refused = pool.allocate_superpage(segment, 0).expect_err("no descriptor");
    assert!(matches!(refused, PoolError::NotShareable { .. }), "{refused}");
}

#[test]
fn a_pool_whose_grant_is_taken_back_gets_errors_and_never_other_bytes() {
    for transport in ["unix", "tcp"] {
        let blades = granting(transport);
        let pool = Pool::connect(config_under(&blades, 1)).expect("connect");
        let segment = segment_of(&pool, 2);
        let over = pool.allocate_superpage(segment, 2).expect_err("all that is granted");
        assert!(matches!(over, PoolError::Full { .. }), "{over}");
        let mut lane = pool.lane().expect("lane");
        let pages: Vec<u32> = (0..64).collect();
        assert!(write(&mut lane, segment, &pages).iter().all(Result::is_ok));
        let blade = Arc::clone(blades.serving[0].as_ref().expect("serves").blade());
        let revoked = std::thread::scope(|scope| {
            let revoking = scope.spawn(|| blade.revoke_grant(GrantId(5), 1).expect("revoke"));
            let until = Instant::now() + AMPLE;
            loop {
                let (done, local) = read(&mut lane, segment, &pages);
                for (token, (page, done)) in (0u64..).zip(pages.iter().zip(&done)) {
                    if done.is_ok() {
                        let expected = common::pattern(u64::from(*page));
                        assert!(*local.bytes(token) == expected, "page {page}");
                    }
                }
                if done.iter().all(|done| matches!(done, Err(PageError::BladeLost(_)))) {
                    break;
                }
                assert!(Instant::now() < until, "it still reads: {done:?}");
            }
            revoking.join().expect("no panic")
        });
        assert_eq!((revoked.clients, revoked.freed_bytes), (1, 2 * SUPERPAGE_BYTES));
        assert_eq!(blades.used_bytes(0), 0);
        let lost = pool.allocate_superpage(segment, 5).expect_err("lost");
        assert!(lost.to_string().contains("grant"), "{lost}");
    }
}

#[test]
fn a_pool_keeps_to_its_own_limits() {
    let blades = granting("tcp");
    let mut config = config_under(&blades, 1);
    let rate = RateLimit { bytes_per_s: 8 << 20, burst_bytes: 1 << 20 };
    let limits = ClientLimits::new(RateLimit::UNLIMITED, rate);
    config.blades[0].limits = Some(Arc::new(limits));
    let pool = Pool::connect(config).expect("connect");
    let segment = segment_of(&pool, 1);
    let mut lane = pool.lane().expect("lane");
    let pages: Vec<u32> = (0..768).collect(); // 3 MiB
    let start = Instant::now();
    assert!(write(&mut lane, segment, &pages).iter().all(Result::is_ok));
    let seconds = start.elapsed().as_secs_f64();
    assert!(3.0 <= 1.0 + 8.0 * seconds, "3 MiB in {seconds} s");
    let (done, _local) = read(&mut lane, segment, &pages[..8]);
    assert!(done.iter().all(Result::is_ok));
}
