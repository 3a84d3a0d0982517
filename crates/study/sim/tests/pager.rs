//! The model of the pager: properties of its counts on any trace, and known counts on some.

use farpool_policy::{PrefetchKind, Rng, VictimKind};
use farpool_sim::References;
use farpool_sim::load::Reference;
use farpool_sim::pager::{Costs, Events, Limit, Settings, events};
use farpool_trace::{Access, Clock, TraceInfo};
use proptest::prelude::*;

const FIRST_PAGE: u64 = 5 << 20;

fn trace(uses: impl IntoIterator<Item = (u32, bool)>, page_count: u32) -> References {
    let reference = |(page, is_write)| Reference {
        ticks: 1,
        page,
        thread: 0,
        line: 0,
        access: if is_write { Access::Write } else { Access::Read },
    };
    let numbers = (0..u64::from(page_count)).map(|page| FIRST_PAGE + page).collect();
    let info = TraceInfo::new("test", 4096, Clock::Requests);
    References::new(uses.into_iter().map(reference).collect(), numbers, 4096, info)
}

fn settings(limit_pages: u64) -> Settings {
    Settings {
        limit: Limit::Pages(limit_pages),
        fixed_pages: 0,
        victims: VictimKind::Clock,
        prefetch: PrefetchKind::Sequential,
        remembers_runs: false,
        seed: 1,
    }
}

/// Touches all pages once, then scans them `passes` times.
fn scan(pages: u32, passes: u32, is_write: bool) -> References {
    let fill = (0..pages).map(|page| (page, true));
    let again = (0..passes).flat_map(move |_| (0..pages).map(move |page| (page, is_write)));
    trace(fill.chain(again), pages)
}

#[test]
fn what_fits_costs_nothing() {
    let trace = scan(6_000, 5, true);
    assert_eq!(events(&trace, &settings(8_000)), Events::default());
    assert_eq!(Costs::default().added_ps(&Events::default()), 0);
}

#[test]
fn scattered_pages_take_more_memory_and_it_is_known_before() {
    let dense = farpool_sim::pager::memory_bytes(0..64_000);
    let scattered = farpool_sim::pager::memory_bytes((0..64_000).map(|page| page * 4096));
    assert!(dense / 64_000 < 32, "{dense}");
    assert!((500..1500).contains(&(scattered / 64_000)), "{scattered}");
}

#[test]
fn a_scan_is_fetched_a_chunk_at_a_time() {
    let (pages, passes) = (32_768, 3);
    let counted = events(&scan(pages, passes, false), &settings(16_384));
    let fetched = counted.demand_fetches + counted.prefetches;
    let all = u64::from(pages * passes);
    assert!(fetched > all * 9 / 10 && fetched <= all, "{counted:?}");
    assert!(counted.demand_fetches < fetched / 30, "{counted:?}");
    assert_eq!(counted.victim_hits, 0, "{counted:?}");
    // First touches beyond the limit are answered in runs of 64.
    assert!(counted.zero_fills < counted.pages_zeroed / 40, "{counted:?}");
}

#[test]
fn pages_that_were_only_read_are_not_written_again_where_that_pays() {
    let mut rng = Rng::new(7);
    let pages = 16_384;
    let fill = (0..pages).map(|page| (page, true));
    let reads: Vec<(u32, bool)> = (0..200_000).map(|_| (rng.below(pages), false)).collect();
    let counted = events(&trace(fill.chain(reads), pages), &settings(8_192));
    assert!(counted.clean_drops > counted.pages_written * 3, "{counted:?}");
    let mut rng = Rng::new(7);
    let fill = (0..pages).map(|page| (page, true));
    let writes: Vec<(u32, bool)> = (0..200_000).map(|_| (rng.below(pages), true)).collect();
    let counted = events(&trace(fill.chain(writes), pages), &settings(8_192));
    // Pages prefetched in vain have not changed.
    assert!(counted.clean_drops <= counted.prefetches, "{counted:?}");
}

#[test]
fn pages_in_use_are_taken_back_and_then_spared() {
    // One page of each chunk is in constant use while a scan goes over the rest.
    let pages = 32_768_u32;
    let uses = (0..pages * 4).flat_map(|step| {
        let page = step % pages;
        [(page, true), (page / 64 % 16 * 64, true)]
    });
    let counted = events(&trace(uses, pages), &settings(16_384));
    let hot = counted.victim_hits;
    assert!(hot > 0 && hot < counted.evictions / 20, "{counted:?}");
}

/// A program that grows by 1,024 pages at a time to 32,768, uses the newest 4,096 four times over
/// and
/// some others: half of what it has in use so far is much less, for most of its time, than half of
/// what it will have.
#[test]
fn a_share_grows_with_the_program_and_costs_more_than_a_share_of_its_peak() {
    let (step, steps) = (1024_u32, 32_u32);
    let mut rng = Rng::new(1);
    let mut uses = Vec::new();
    for now in 0..steps {
        uses.extend((now * step..(now + 1) * step).map(|page| (page, true)));
        let newest = now.saturating_sub(3) * step..(now + 1) * step;
        (0..4).for_each(|_| uses.extend(newest.clone().map(|page| (page, true))));
        uses.extend((0..200).map(|_| (rng.below((now + 1) * step), false)));
    }
    let trace = trace(uses, step * steps);
    let half_of_peak = events(&trace, &settings(u64::from(step * steps) / 2));
    let growing = Limit::Share { permille: 500, least_pages: 4096 };
    let half_so_far = events(&trace, &Settings { limit: growing, ..settings(0) });
    assert!(half_so_far.evictions > half_of_peak.evictions, "{half_so_far:?} {half_of_peak:?}");
    assert!(half_so_far.faults > half_of_peak.faults, "{half_so_far:?} {half_of_peak:?}");
    // The floor of 16 MiB is a limit like any other.
    let floor = Limit::Share { permille: 1, least_pages: 16_384 };
    assert_eq!(events(&trace, &Settings { limit: floor, ..settings(0) }), half_of_peak);
}

#[test]
fn less_local_memory_never_means_fewer_fetches_by_much() {
    let mut rng = Rng::new(3);
    let pages = 16_384;
    let uses: Vec<(u32, bool)> = (0..300_000).map(|at| (rng.below(pages), at % 4 == 0)).collect();
    let trace = trace(uses, pages);
    let fetches = |limit| events(&trace, &settings(limit)).demand_fetches;
    let counts: Vec<u64> = [14_000, 12_000, 8_000, 4_000].into_iter().map(fetches).collect();
    assert!(counts.windows(2).all(|pair| pair[1] > pair[0]), "{counts:?}");
    // Uniform access with half of memory local: about every second use is a fault.
    assert!((110_000..180_000).contains(&counts[2]), "{counts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn the_books_balance(
        seed in 0_u64..1_000_000, pages in 600_u32..9_000, limit in 1_500_u64..6_000, fixed in 0_u64..900,
        spread in 1_u32..9, victims in prop::sample::select(VictimKind::ALL.to_vec()),
        prefetch in prop::sample::select(PrefetchKind::ALL.to_vec()), remembers_runs: bool,
    ) {
        let mut rng = Rng::new(seed);
        let uses: Vec<(u32, bool)> = (0..40_000)
            .map(|at| {
                let page = if rng.below(spread) == 0 { at % pages } else { rng.below(pages) };
                (page, rng.below(3) == 0)
            })
            .collect();
        let settings = Settings {
            limit: Limit::Pages(limit), fixed_pages: fixed, victims, prefetch, remembers_runs, seed,
        };
        let counted = events(&trace(uses, pages), &settings);
        let Events { faults, zero_fills, pages_zeroed, victim_hits, demand_fetches, .. } = counted;
        prop_assert_eq!(faults, zero_fills + victim_hits + demand_fetches);
        prop_assert_eq!(counted.evictions, counted.pages_written + counted.clean_drops);
        prop_assert!(pages_zeroed >= zero_fills && pages_zeroed <= u64::from(pages));
        // A page that came back had left; a page that left and is not back is far or in the buffer.
        let came = victim_hits + demand_fetches + counted.prefetches;
        prop_assert!(came <= counted.evictions);
        prop_assert!(counted.evictions - came <= u64::from(pages));
        prop_assert!(counted.evicted_chunks <= counted.evictions);
    }
}
