//! A blade whose host's programs use all processors is slow for other hosts, and as fast as ever
//! for its own.

mod common;

use common::*;
use farpool_policy::donor_protection::ProcessorSight;
use farpool_units::PAGE_BYTES;
use farpool_wire::*;
use std::time::{Duration, Instant};

const RATE_BYTES_PER_S: u64 = 1 << 20;
/// Less than 32 MiB take at the rate, which is 31 s.
const UNHELD_MAX: Duration = Duration::from_secs(25);
/// Pages of one read.
const PAGES: u32 = 64;

fn sight(idle_permille: u16) -> ProcessorSight {
    ProcessorSight { processors: 1, idle_permille, waiting_permille: Some(500) }
}

/// How long it takes to read `bytes`.
fn time_to_read(client: &mut Peer, segment: SegmentId, bytes: u64) -> Duration {
    let begun = Instant::now();
    for _ in 0..bytes / (u64::from(PAGES) * PAGE_BYTES as u64) {
        let read = client.read(segment, 0, PAGES);
        assert_eq!(read.pages.len(), PAGES as usize * PAGE_BYTES);
    }
    begun.elapsed()
}

#[test]
fn other_hosts_wait_while_the_processors_are_needed() {
    let blade = TestBlade::of_superpages(4);
    let (mut there, mut here) = (Peer::hello(blade.tcp(), 1), Peer::hello(blade.unix(), 2));
    let ((of_there, _), (of_here, _)) = (there.segment(1), here.segment(1));
    let consider = |sight| blade.serving.blade().consider(&sight, RATE_BYTES_PER_S);
    consider(sight(0));
    assert_eq!(
        blade.serving.blade().donor_protection().expect("held").bytes_per_s,
        RATE_BYTES_PER_S
    );
    // The first MiB is the burst.
    let held = time_to_read(&mut there, of_there, 5 << 19);
    assert!(held >= Duration::from_millis(1400), "{held:?}");
    let unheld = time_to_read(&mut here, of_here, 32 << 20);
    assert!(unheld < UNHELD_MAX, "{unheld:?}");
    consider(sight(500));
    assert_eq!(blade.serving.blade().donor_protection(), None);
    let lifted = time_to_read(&mut there, of_there, 32 << 20);
    assert!(lifted < UNHELD_MAX, "{lifted:?}");
}
