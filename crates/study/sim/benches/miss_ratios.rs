//! Every policy's miss ratio on traces that tell policies apart: the table in
//! `farpool_policy::cache`.
//!
//! `cargo bench -p farpool-sim --bench miss_ratios`; seeded, so always the same numbers.
//! With the argument `large`, miss counts on 20 million requests, Zipf over 2^20 pages and mstress
//! over 7 GiB, beside those of libCacheSim.

use std::error::Error;

use farpool_sim::misses::{CacheConfig, DensePages, MissPolicy};
use farpool_sim::sweep::sweep;
use farpool_sim::synthetic::Synthetic;

const REQUESTS: usize = 1_000_000;

/// Local memory in percent of the pages that occur.
const LOCAL_PERCENT: [usize; 2] = [50, 10];

/// Misses of libCacheSim 0.3.5 on the large traces, in the order of the policies' names.
const LIBCACHESIM: [[u64; 13]; 3] = [
    [
        4_029_902, 4_609_532, 3_903_374, 3_392_006, 3_392_006, 3_356_587, 3_438_670, 3_419_320,
        3_573_032, 3_446_476, 3_315_079, 4_674_244, 2_298_039,
    ],
    [
        2_806_291, 3_291_808, 2_719_626, 2_453_385, 2_453_385, 2_467_673, 2_551_096, 2_473_930,
        2_653_076, 2_498_195, 2_417_039, 3_326_467, 1_554_513,
    ],
    [
        1_490_482, 1_671_478, 1_490_459, 1_490_438, 1_490_438, 1_489_994, 1_490_401, 1_490_502,
        1_671_478, 1_490_183, 1_497_059, 1_632_933, 1_343_781,
    ],
];

fn main() -> Result<(), Box<dyn Error>> {
    if farpool_benchargs::arguments().next().as_deref() == Some("large") {
        return large();
    }
    let traces = [
        ("Zipf 1", Synthetic::zipf(1 << 16, REQUESTS, 42)),
        ("hot tenth", Synthetic::mstress(50_000, REQUESTS, 42)),
        ("loop", Synthetic::cycle(50_000, REQUESTS)),
        ("scan, hot set", Synthetic::scan_and_hot_set(50_000, REQUESTS, 42)),
        ("phases", Synthetic::phases(50_000, REQUESTS, 42)),
        ("walk", Synthetic::walk(50_000, REQUESTS, 42)),
        ("one-time visitors", Synthetic::one_time_visitors(1 << 15, REQUESTS, 42)),
    ];
    print!("| local {} % |", LOCAL_PERCENT.map(|percent| percent.to_string()).join(" / "));
    let policies: Vec<_> = MissPolicy::all().collect();
    for (name, _) in &traces {
        print!(" {name} |");
    }
    println!("\n|---|{}", "---|".repeat(traces.len()));
    let mut columns = Vec::new();
    for (_, made) in &traces {
        let mut pages = made.pages.clone();
        pages.sort_unstable();
        pages.dedup();
        let configs: Vec<_> = policies
            .iter()
            .flat_map(|policy| {
                LOCAL_PERCENT.map(|percent| CacheConfig {
                    policy: *policy,
                    capacity: pages.len() * percent / 100,
                })
            })
            .collect();
        columns.push(sweep(dense(made), &configs, 2, |_| {})?);
    }
    for (row, policy) in policies.iter().enumerate() {
        print!("| {policy} |");
        for column in &columns {
            let cells = column[row * LOCAL_PERCENT.len()..][..LOCAL_PERCENT.len()].iter();
            let cells: Vec<_> = cells.map(|misses| ratio(*misses, REQUESTS)).collect();
            print!(" {} |", cells.join(" / "));
        }
        println!();
    }
    Ok(())
}

fn large() -> Result<(), Box<dyn Error>> {
    let requests = 20_000_000;
    let zipf = Synthetic::zipf(1 << 20, requests, 42);
    let mstress = Synthetic::mstress(1_835_008, requests, 42);
    let cases =
        [("zipf", &zipf, 131_072), ("zipf", &zipf, 262_144), ("mstress", &mstress, 917_504)];
    for ((name, made, capacity), theirs) in cases.into_iter().zip(LIBCACHESIM) {
        let configs: Vec<_> =
            MissPolicy::all().map(|policy| CacheConfig { policy, capacity }).collect();
        let ours = sweep(dense(made), &configs, 2, |_| {})?;
        for ((config, ours), theirs) in configs.iter().zip(ours).zip(theirs) {
            let apart = ours.abs_diff(theirs);
            println!(
                "{name} {capacity} {}: {ours}, libCacheSim {theirs}, {apart} apart",
                config.policy
            );
        }
    }
    Ok(())
}

fn dense(made: &Synthetic) -> DensePages<'_> {
    DensePages { pages: &made.pages, page_count: made.page_count }
}

/// Formats three digits without the leading zero.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn ratio(misses: u64, requests: usize) -> String {
    let ratio = format!("{:.3}", misses as f64 / requests as f64);
    ratio.strip_prefix('0').unwrap_or(&ratio).to_owned()
}
