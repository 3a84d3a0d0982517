//! Miss counts against libCacheSim, an independent and widely used simulator (the wheel of its
//! Python package, pinned: its policies change between versions).
//!
//! `scripts/install-deps.sh test` installs it where `scripts/test.sh` finds it. By hand: set
//! `LIBCACHESIM_PYTHON` to a Python that can `import libcachesim`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use farpool_policy::CacheKind;
use farpool_sim::misses::{CacheConfig, DensePages, MissPolicy, count_misses};
use farpool_sim::sweep::sweep;
use farpool_sim::synthetic::Synthetic;

const REQUESTS: usize = 60_000;

/// Sizes at which the oracle's own limits (queues of whole percents of the capacity) make no
/// difference.
const SIZES: [usize; 6] = [200, 333, 500, 1000, 2501, 6000];

/// Sizes at which the plain policies must agree too.
const SMALL_SIZES: [usize; 4] = [1, 2, 3, 17];

/// How far the misses of random victims may differ. libCacheSim looks for a victim at places of its
/// table given by the low bits of a linear congruential generator; those of 2^16 places repeat a
/// fixed cycle of 2^16 draws, so its victims are not drawn independently and no page is lucky for
/// long. Ours are independent, which [`random_victims_survive_as_theory_says`] checks.
const RANDOM_APART: f64 = 0.025;

/// The policies' names in the Python package.
const NAMES: [(MissPolicy, &str); 13] = [
    (MissPolicy::Online(CacheKind::Lru), "LRU"),
    (MissPolicy::Online(CacheKind::Fifo), "FIFO"),
    (MissPolicy::Online(CacheKind::Clock), "Clock"),
    (MissPolicy::Online(CacheKind::Sieve), "Sieve"),
    (MissPolicy::Online(CacheKind::Lfu), "LFU"),
    (MissPolicy::Online(CacheKind::S3Fifo), "S3FIFO"),
    (MissPolicy::Online(CacheKind::Arc), "ARC"),
    (MissPolicy::Online(CacheKind::Slru), "SLRU"),
    (MissPolicy::Online(CacheKind::TwoQ), "TwoQ"),
    (MissPolicy::Online(CacheKind::Lirs), "LIRS"),
    (MissPolicy::TinyLfuByHits, "WTinyLFU"),
    (MissPolicy::Online(CacheKind::Random), "Random"),
    (MissPolicy::Belady, "Belady"),
];

/// Reads `trace policy size` from the file in its arguments and prints the misses, one line each.
const PROGRAM: &str = r#"
import sys
import libcachesim as l
assert l.__version__ == "0.3.5", l.__version__
for line in open(sys.argv[1]):
    trace, policy, size, requests = line.split()
    options = l.ReaderInitParam(ignore_obj_size=True)
    reader = l.TraceReader(trace, l.TraceType.ORACLE_GENERAL_TRACE, options)
    cache = getattr(l, policy)(cache_size=int(size), hashpower=16)
    misses = cache.process_trace(reader)[0] * int(requests)
    assert abs(misses - round(misses)) < 0.01, misses
    print("MISSES", round(misses), flush=True)
"#;

fn traces() -> Vec<(&'static str, Synthetic)> {
    vec![
        ("zipf", Synthetic::zipf(1 << 14, REQUESTS, 42)),
        ("mstress", Synthetic::mstress(12_000, REQUESTS, 42)),
        ("cycle", Synthetic::cycle(5000, REQUESTS)),
        ("scan-and-hot-set", Synthetic::scan_and_hot_set(10_000, REQUESTS, 42)),
        ("phases", Synthetic::phases(16_000, REQUESTS, 42)),
        ("walk", Synthetic::walk(12_000, REQUESTS, 42)),
        ("one-time-visitors", Synthetic::one_time_visitors(1 << 13, REQUESTS, 42)),
    ]
}

/// Writes the oracle's format: u32 time, u64 object, u32 size, i64 number of the object's next
/// request, from 1.
fn write_oracle_general(path: &Path, pages: &[u32]) {
    let mut next = vec![-1i64; pages.len()];
    let mut seen = HashMap::new();
    for (at, page) in pages.iter().enumerate().rev() {
        let this = i64::try_from(at).unwrap() + 1;
        next[at] = seen.insert(*page, this).unwrap_or(-1);
    }
    let mut file = BufWriter::new(File::create(path).unwrap());
    for (time, (page, next)) in (0u32..).zip(pages.iter().zip(&next)) {
        file.write_all(&time.to_le_bytes()).unwrap();
        file.write_all(&u64::from(*page).to_le_bytes()).unwrap();
        file.write_all(&1u32.to_le_bytes()).unwrap();
        file.write_all(&next.to_le_bytes()).unwrap();
    }
    file.flush().unwrap();
}

/// The plain policies have no queues whose sizes must be rounded, so any capacity must agree.
fn is_plain(policy: MissPolicy) -> bool {
    use CacheKind::{Clock, Fifo, Lfu, Lru, Sieve};
    matches!(policy, MissPolicy::Belady | MissPolicy::Online(Lru | Fifo | Clock | Sieve | Lfu))
}

fn configs() -> Vec<CacheConfig> {
    let at = |policy, capacity| CacheConfig { policy, capacity };
    let usual = NAMES.iter().flat_map(|(policy, _)| SIZES.map(|size| at(*policy, size)));
    let small = NAMES.iter().filter(|(policy, _)| is_plain(*policy));
    usual.chain(small.flat_map(|(policy, _)| SMALL_SIZES.map(|size| at(*policy, size)))).collect()
}

/// Returns the relative difference allowed: none, except for the random policy.
fn allowed(policy: MissPolicy) -> f64 {
    match policy {
        MissPolicy::Online(CacheKind::Random) => RANDOM_APART,
        _ => 0.0,
    }
}

fn oracle_misses(python: &str, folder: &Path, questions: &str) -> Vec<u64> {
    let list = folder.join("questions");
    std::fs::write(&list, questions).unwrap();
    let run = Command::new(python).arg("-c").arg(PROGRAM).arg(&list).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let said = String::from_utf8(run.stdout).unwrap();
    // Some policies print their parameters.
    said.lines().filter_map(|line| line.strip_prefix("MISSES ")?.parse().ok()).collect()
}

#[test]
#[expect(clippy::cast_precision_loss, reason = "miss counts are below 2^53")]
fn every_policy_misses_as_often_as_in_libcachesim() {
    let python = std::env::var("LIBCACHESIM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import libcachesim"]).output();
    if !found.is_ok_and(|found| found.status.success()) {
        println!("SKIPPED: libcachesim is not installed (pip install libcachesim==0.3.5)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (traces, configs) = (traces(), configs());
    let mut questions = String::new();
    let mut ours = Vec::new();
    for (name, trace) in &traces {
        let path = folder.path().join(name);
        write_oracle_general(&path, &trace.pages);
        for config in &configs {
            let (_, theirs) = NAMES.iter().find(|(policy, _)| *policy == config.policy).unwrap();
            let line = format!("{} {theirs} {} {REQUESTS}\n", path.display(), config.capacity);
            questions.push_str(&line);
        }
        let dense = DensePages { pages: &trace.pages, page_count: trace.page_count };
        let counts = sweep(dense, &configs, 2, |_| {}).unwrap();
        ours.extend(configs.iter().zip(counts).map(|(config, misses)| (*name, *config, misses)));
    }
    let theirs = oracle_misses(&python, folder.path(), &questions);
    assert_eq!(ours.len(), theirs.len());
    let mut apart = Vec::new();
    let mut widest: HashMap<MissPolicy, f64> = HashMap::new();
    for ((name, CacheConfig { policy, capacity }, ours), theirs) in ours.iter().zip(&theirs) {
        let share = ours.abs_diff(*theirs) as f64 / REQUESTS as f64;
        let widest = widest.entry(*policy).or_default();
        *widest = widest.max(share);
        if share > allowed(*policy) {
            apart.push(format!("{name} {policy} {capacity}: {ours}, libCacheSim {theirs}"));
        }
    }
    for (policy, _) in NAMES {
        println!("{policy}: at most {:.2} % of requests apart", widest[&policy] * 100.0);
    }
    assert!(apart.is_empty(), "{}\n{} of {}", apart.join("\n"), apart.len(), theirs.len());
}

/// Cycling over n pages with room for c, a page is still resident after n references if none of the
/// misses among them drew it: the hit ratio h solves h = (1 - 1/c)^(n (1 - h)).
#[test]
#[expect(clippy::cast_precision_loss, reason = "miss counts are below 2^53")]
fn random_victims_survive_as_theory_says() {
    let (pages, rounds) = (5000, 60);
    let made = Synthetic::cycle(pages, pages as usize * rounds);
    let trace = DensePages { pages: &made.pages, page_count: made.page_count };
    for capacity in [1000, 2500, 4000] {
        let policy = MissPolicy::Online(CacheKind::Random);
        let misses = count_misses(trace, CacheConfig { policy, capacity }).unwrap();
        let survives = 1.0 - 1.0 / capacity as f64;
        let mut hit_ratio = 0.0;
        for _ in 0..10_000 {
            hit_ratio = survives.powf(f64::from(pages) * (1.0 - hit_ratio));
        }
        // The first round misses everywhere, and so do some more requests until the cache is full
        // and mixed.
        let requests = made.pages.len() as u64;
        let warm = (requests - misses) as f64 / (requests - u64::from(pages)) as f64;
        assert!((warm - hit_ratio).abs() < 0.005, "{capacity}: {warm} {hit_ratio}");
    }
}
