//! A blade that lies is found out: no forged page is ever taken for the one that was stored.

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::liar::{Liar, Lie};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{PATIENCE, binaries, turn};
use farpool_pool::{
    BladeSpec, Completion, Lane, PageError, PageRead, PageWrite, Pool, PoolConfig, SegmentHandle,
    SegmentPage,
};
use farpool_units::PAGE_BYTES;

/// Pages of each segment.
const PAGES: u32 = 500;
/// How often each of them is read while the blade tells one kind of lie.
const ROUNDS: u32 = 4;
/// The exit code of the stress program that read wrong data.
const WRONG_DATA_CODE: i32 = 9;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE_BYTES]);

fn content(segment: u8, page: u32, version: u8) -> Page {
    let mut bytes = [version; PAGE_BYTES];
    bytes[..4].copy_from_slice(&page.to_le_bytes());
    bytes[4] = segment;
    Page(bytes)
}

fn finish(lane: &mut Lane) -> Vec<Completion> {
    let mut done = Vec::new();
    while lane.in_flight() > 0 {
        lane.wait(&mut done);
    }
    done.sort_by_key(|it| it.token);
    done
}

fn write(lane: &mut Lane, segment: SegmentHandle, version: u8) {
    for page in 0..PAGES {
        let local = content(segment.index().try_into().expect("few"), page, version);
        let at = SegmentPage { segment, page };
        // SAFETY: the page outlives the wait for its completion.
        unsafe { lane.write(&[PageWrite { at, from: local.0.as_ptr(), token: 0 }]) }.expect("sent");
        assert_eq!(finish(lane)[0].result, Ok(()));
    }
}

/// Reads each page by itself: its bytes, or the error.
fn read(lane: &mut Lane, segment: SegmentHandle) -> Vec<Result<Page, PageError>> {
    let mut read = Vec::new();
    for page in 0..PAGES {
        let mut local = Page([0xee; PAGE_BYTES]);
        let at = SegmentPage { segment, page };
        // SAFETY: the page outlives the wait for its completion.
        unsafe { lane.read(&[PageRead { at, into: local.0.as_mut_ptr(), token: 0 }]) }
            .expect("sent");
        read.push(finish(lane)[0].result.map(|()| local));
    }
    read
}

struct Stored {
    liar: Liar,
    pool: Pool,
    lane: Lane,
    segments: [SegmentHandle; 2],
    /// Dropped last.
    _blade: Blade,
}

/// Two segments whose pages were written twice through a liar.
fn stored(seals_pages: bool) -> Stored {
    let blade = Blade::start("512MiB");
    let liar = Liar::start(blade.tcp());
    let address: farpool_pool::Address = liar.address().parse().expect("an address");
    let pool = Pool::connect(PoolConfig {
        blades: vec![BladeSpec::from(address)],
        client: farpool_pool::fresh_client().expect("random numbers"),
        client_name: "forged".into(),
        quota_bytes: 1 << 30,
        sharing_group: None,
        deadline: PATIENCE,
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    });
    let pool = pool.expect("the blade is there");
    let segments = [(); 2].map(|()| pool.create_segment().expect("a segment"));
    segments.iter().for_each(|it| pool.allocate_superpage(*it, 0).expect("a superpage"));
    let mut lane = pool.lane().expect("a lane");
    for version in [1, 2] {
        segments.iter().for_each(|segment| write(&mut lane, *segment, version));
    }
    Stored { liar, pool, lane, segments, _blade: blade }
}

#[test]
fn no_page_of_a_lying_blade_is_taken_if_pages_are_sealed() {
    let _turn = turn();
    let mut it = stored(true);
    let segment = it.segments[0];
    for lie in Lie::ALL {
        it.liar.tell(lie);
        let before = it.liar.told();
        for _ in 0..ROUNDS {
            for (page, read) in read(&mut it.lane, segment).into_iter().enumerate() {
                assert_eq!(read.map(drop), Err(PageError::Forged), "{lie:?}, page {page}");
            }
        }
        assert_eq!(it.liar.told() - before, (ROUNDS * PAGES) as usize, "{lie:?}");
    }
    it.liar.tell(Lie::None);
    let all = read(&mut it.lane, segment);
    let is_right = |(page, read): (u32, &Result<Page, PageError>)| {
        read.as_ref().is_ok_and(|it| it.0 == content(0, page, 2).0)
    };
    assert!((0..).zip(&all).all(is_right), "an honest blade is believed again");
    assert!(!it.liar.has_seen(&[2; 64]), "the blade can read a page");
    it.pool.goodbye();
}

/// Without seals the same lies are believed: the test above would show it.
#[test]
fn without_seals_a_lying_blade_is_believed() {
    let _turn = turn();
    let mut it = stored(false);
    for lie in Lie::ALL {
        it.liar.tell(lie);
        for (page, read) in (0..).zip(read(&mut it.lane, it.segments[0])) {
            let read = read.expect("taken").0;
            assert_ne!(read, content(0, page, 2).0, "{lie:?}, page {page}");
        }
    }
    assert!(it.liar.has_seen(&[2; 64]));
    it.pool.goodbye();
}

/// Runs a program that checks all it reads, while the blade lies.
fn run(door: Door, lie: Lie, seal: &str) -> Outcome {
    let blade = Blade::start("512MiB");
    let liar = Liar::start(blade.tcp());
    let mut running = Run::through(door, "16MiB")
        .blade(&liar.address())
        .args(["--seal", seal])
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", "2", "--progress", "--seconds", "3"])
        .start();
    running.wait_for_output("filled", 2);
    running.wait_until_far();
    liar.tell(lie);
    running.finish()
}

#[test]
fn a_program_never_sees_what_a_lying_blade_returns() {
    let _turn = turn();
    for door in [Door::Sidecar, Door::Preload] {
        for lie in [Lie::Flipped, Lie::Stale, Lie::Swapped, Lie::Zeroed] {
            let outcome = run(door, lie, "remote");
            assert_ne!(outcome.code, WRONG_DATA_CODE, "{lie:?}: {}", outcome.stdout);
            assert_ne!(outcome.code, 0, "{lie:?}: it was told no lie");
            let named = outcome.stderr.contains("its seal does not fit");
            assert!(named, "{lie:?}: {} {}", outcome.code, outcome.stderr);
        }
    }
}

#[test]
fn a_program_without_seals_sees_it() {
    let _turn = turn();
    let outcome = run(Door::Sidecar, Lie::Zeroed, "never");
    assert_eq!(outcome.code, WRONG_DATA_CODE, "{} {}", outcome.stdout, outcome.stderr);
}

#[test]
fn a_run_without_seals_takes_no_blade_by_tcp() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    for (seal, is_taken) in [("remote", false), ("always", true), ("never", true)] {
        let mut running = Run::far("64MiB")
            .blade(&blade.address(Transport::Unix))
            .args(["--seal", seal])
            .program("sleep")
            .arg("1000")
            .start();
        running.program_pid(); // then its board is there
        let mut farpool = std::process::Command::new(binaries::program("farpool"));
        farpool.args([
            "blades",
            &running.pid().to_string(),
            "--add",
            &blade.address(Transport::Tcp),
        ]);
        let added = farpool.output().expect("farpool blades");
        let said = String::from_utf8_lossy(&added.stderr).into_owned();
        assert_eq!(added.status.success(), is_taken, "{seal}: {said}");
        assert_eq!(said.contains("--seal always"), !is_taken, "{said}");
        assert!(running.is_running());
        drop(running);
    }
}
