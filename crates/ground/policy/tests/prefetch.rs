//! What the prefetchers gain on patterns, and what they waste without one.

use farpool_policy::{MAX_PREFETCH_PAGES, PrefetchKind, PrefetchWindow, Rng};
use proptest::prelude::*;
use std::collections::HashSet;

/// A local memory that never evicts: pages are local once fetched. Its counts are the result.
#[derive(Debug, Default)]
struct Far {
    local: HashSet<u64>,
    used: HashSet<u64>,
    faults: u64,
    prefetched: u64,
}

impl Far {
    /// Runs accesses of (thread, page) and returns the counts.
    fn run(kind: PrefetchKind, accesses: impl IntoIterator<Item = (u32, u64)>) -> Self {
        let mut prefetcher = kind.build();
        let mut far = Self::default();
        let mut window = PrefetchWindow::EMPTY;
        for (thread, page) in accesses {
            far.used.insert(page);
            if far.local.insert(page) {
                far.faults += 1;
                prefetcher.on_fault(thread, page, &mut window);
                assert!(window.len() <= MAX_PREFETCH_PAGES);
                assert!(window.pages().all(|p| p != page), "the fault itself is no prefetch");
                far.prefetched += window.pages().filter(|p| far.local.insert(*p)).count() as u64;
            }
        }
        far
    }

    /// Returns the pages fetched that were never used.
    fn wasted(&self) -> u64 {
        self.local.difference(&self.used).count() as u64
    }
}

const BASE: u64 = 1 << 20;
const LEARNING: [PrefetchKind; 2] = [PrefetchKind::Sequential, PrefetchKind::Trend];

#[test]
fn a_scan_of_n_pages_faults_about_n_over_64_times() {
    for kind in LEARNING {
        let up = Far::run(kind, (0..10_000).map(|i| (1, BASE + i)));
        let down = Far::run(kind, (0..10_000).map(|i| (1, BASE - i)));
        for far in [up, down] {
            assert!(far.faults <= 10_000 / 64 + 20, "{kind}: {} faults", far.faults);
            assert!(far.wasted() <= 64, "{kind}: {} wasted", far.wasted());
        }
    }
}

#[test]
fn a_long_scan_settles_on_one_fault_per_chunk() {
    let mut prefetcher = PrefetchKind::Sequential.build();
    let (mut page, mut window) = (BASE + 17, PrefetchWindow::EMPTY);
    for _ in 0..100 {
        prefetcher.on_fault(1, page, &mut window);
        page += u64::from(window.len()) + 1;
    }
    assert_eq!(page % 64, 0);
    assert_eq!(window.len(), 63);
}

#[test]
fn eight_interleaved_streams_of_one_thread_are_all_followed() {
    let accesses = (0..2_000).flat_map(|i| (0..8).map(move |s| (1, BASE * (s + 1) + i)));
    let far = Far::run(PrefetchKind::Sequential, accesses);
    assert!(far.faults <= 16_000 / 64 + 8 * 12, "{} faults", far.faults);
}

#[test]
fn threads_do_not_disturb_each_other() {
    for kind in LEARNING {
        let accesses =
            (0..2_000).flat_map(|i| (0..16).map(move |t| (t, BASE * u64::from(t + 1) + i)));
        let far = Far::run(kind, accesses);
        assert!(far.faults <= 32_000 / 64 + 16 * 20, "{kind}: {} faults", far.faults);
    }
}

#[test]
fn a_stream_survives_stray_faults_between_its_own() {
    let mut rng = Rng::new(5);
    let accesses: Vec<_> = (0..4_000u64)
        .flat_map(|i| [(1, BASE + i), (1, 8 * BASE + u64::from(rng.below(1 << 20)))])
        .collect();
    let far = Far::run(PrefetchKind::Sequential, accesses);
    assert!(far.faults <= 4_000 + 4_000 / 10, "{} faults", far.faults);
}

#[test]
fn the_trend_finds_strides_that_read_ahead_does_not() {
    let strided = || (0..4_000).map(|i| (1, BASE + i * 7));
    let trend = Far::run(PrefetchKind::Trend, strided());
    assert!(trend.faults < 200, "{} faults", trend.faults);
    assert!(trend.wasted() <= 64);
    let sequential = Far::run(PrefetchKind::Sequential, strided());
    assert_eq!((sequential.faults, sequential.prefetched), (4_000, 0));
}

#[test]
fn a_run_that_is_partly_local_already_is_still_followed() {
    let mut prefetcher = PrefetchKind::Sequential.build();
    let mut window = PrefetchWindow::EMPTY;
    for page in [100, 101] {
        prefetcher.on_fault(1, page, &mut window);
    }
    assert_eq!(window.as_run(), Some(102..106));
    prefetcher.on_fault(1, 110, &mut window);
    assert_eq!(window.as_run(), Some(111..119), "106..110 were local: the stream goes on");
    prefetcher.on_fault(1, 113, &mut window);
    assert_eq!(window.as_run(), Some(114..118), "a fault inside the run halves the window");
}

/// Values that lie across two pages, at random addresses; then a scan by the same thread.
#[test]
fn pairs_of_neighbours_do_not_start_streams_for_long() {
    let mut prefetcher = PrefetchKind::Sequential.build();
    let mut rng = Rng::new(11);
    let mut window = PrefetchWindow::EMPTY;
    let mut fetched = 0;
    for _ in 0..1000 {
        let page = u64::from(rng.below(1 << 30));
        for neighbour in [page, page + 1] {
            prefetcher.on_fault(1, neighbour, &mut window);
            fetched += window.len();
        }
    }
    assert!(fetched < 100, "{fetched} pages fetched in vain");
    let (mut page, mut faults) = (1 << 40, 0);
    while page < (1 << 40) + 64 * 20 {
        prefetcher.on_fault(1, page, &mut window);
        page += u64::from(window.len()) + 1;
        faults += 1;
    }
    assert!(faults < 30, "{faults} faults for 20 chunks");
}

#[test]
fn none_fetches_nothing() {
    let far = Far::run(PrefetchKind::None, (0..100).map(|i| (1, BASE + i)));
    assert_eq!((far.faults, far.prefetched), (100, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn random_access_prefetches_next_to_nothing(seed: u64, pages in 8_192u32..1_000_000) {
        for kind in LEARNING {
            let mut rng = Rng::new(seed);
            let accesses = (0..20_000).map(|_| (1, BASE + u64::from(rng.below(pages))));
            let far = Far::run(kind, accesses);
            let share = far.prefetched as f64 / far.faults as f64;
            prop_assert!(share < 0.02, "{}: {} of {} faults", kind, far.prefetched, far.faults);
        }
    }

    #[test]
    fn random_access_after_scans_prefetches_little(seed: u64) {
        for kind in LEARNING {
            let mut rng = Rng::new(seed);
            let scans = (0..8_000).map(|i| (1, BASE * (1 + i % 8) + i / 8));
            let after = Far::run(kind, scans.clone()).prefetched;
            let random = (0..10_000).map(|_| (1, 20 * BASE + u64::from(rng.below(100_000))));
            let far = Far::run(kind, scans.chain(random));
            prop_assert!(far.prefetched - after < 300, "{}: {}", kind, far.prefetched - after);
        }
    }

    #[test]
    fn any_faults_at_all_give_windows_that_exist(faults in proptest::collection::vec(
        (0u32..4, prop_oneof![0..200u64, u64::MAX - 200..=u64::MAX]), 0..400))
    {
        for kind in PrefetchKind::ALL {
            let mut prefetcher = kind.build();
            let mut window = PrefetchWindow::EMPTY;
            for (thread, page) in &faults {
                prefetcher.on_fault(*thread, *page, &mut window);
                let pages: Vec<_> = window.pages().collect();
                prop_assert_eq!(pages.len(), window.len() as usize);
                let stride = window.stride();
                let mut before = *page;
                for page in pages {
                    prop_assert_eq!(before.checked_add_signed(stride), Some(page));
                    before = page;
                }
            }
        }
    }
}
