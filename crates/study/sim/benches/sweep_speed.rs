//! How fast the simulator is, and how much memory it takes, beside libCacheSim in the same run.
//!
//! `cargo bench -p farpool-sim --bench sweep_speed -- [--rounds N] [PYTHON]` where PYTHON
//! can `import libcachesim` (0.3.5). 20 million requests, Zipf of exponent 1 over 2^20 pages: four
//! policies at six sizes in one process, then the exact curve of LRU, then samples. The best of N
//! rounds counts, since other programs can only add to a time.

use std::error::Error;
use std::io::{BufWriter, Write};
use std::process::Command;
use std::time::Instant;

use farpool_policy::CacheKind;
use farpool_sim::misses::{CacheConfig, DensePages, MissPolicy};
use farpool_sim::mrc::{LruCurve, Population, Rate, SAMPLES, sampled_lru};
use farpool_sim::sweep::{memory_bytes, sweep};
use farpool_sim::synthetic::Synthetic;

const REQUESTS: usize = 20_000_000;
const PAGES: u32 = 1 << 20;
const KINDS: [CacheKind; 4] = [CacheKind::Lru, CacheKind::Fifo, CacheKind::Clock, CacheKind::Sieve];
const SIZES: [usize; 6] = [16_384, 65_536, 131_072, 262_144, 524_288, 786_432];

/// The same simulations in one process, with libCacheSim's default table and with one sized for the
/// trace.
const ORACLE: &str = r#"
import resource, sys, time
import libcachesim as l
trace, requests, power = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
started = time.monotonic()
counts = []
for policy in (l.LRU, l.FIFO, l.Clock, l.Sieve):
    for size in sys.argv[4].split(","):
        options = l.ReaderInitParam(ignore_obj_size=True)
        reader = l.TraceReader(trace, l.TraceType.ORACLE_GENERAL_TRACE, options)
        cache = policy(cache_size=int(size), hashpower=power)
        counts.append(round(cache.process_trace(reader)[0] * requests))
taken = time.monotonic() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("SWEEP", taken, peak, ",".join(map(str, counts)))
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = farpool_benchargs::arguments().peekable();
    let mut rounds = 3;
    if arguments.next_if(|argument| argument == "--rounds").is_some() {
        rounds = arguments.next().ok_or("--rounds needs a number")?.parse()?;
    }
    let python = arguments.next();
    let made = Synthetic::zipf(PAGES, REQUESTS, 42);
    let trace = DensePages { pages: &made.pages, page_count: made.page_count };
    let ours = our_sweep(trace, rounds)?;
    let peak_kib = peak_rss_kib()?;
    println!("peak of the process, trace included: {} MiB", peak_kib / 1024);
    curve(trace, rounds, &ours.misses);
    samples(trace)?;
    if let Some(python) = python {
        beside_the_oracle(&python, trace, &ours, peak_kib)?;
    }
    Ok(())
}

fn configs(kind: CacheKind) -> impl Iterator<Item = CacheConfig> {
    SIZES
        .into_iter()
        .map(move |capacity| CacheConfig { policy: MissPolicy::Online(kind), capacity })
}

struct Swept {
    /// With one thread and with two.
    times_s: [f64; 2],
    misses: Vec<u64>,
}

fn our_sweep(trace: DensePages<'_>, rounds: usize) -> Result<Swept, Box<dyn Error>> {
    for kind in KINDS {
        let configs: Vec<_> = configs(kind).collect();
        let (time_s, _) = best(rounds, || sweep(trace, &configs, 1, |_| {}));
        println!("{kind:<6} six sizes, one thread: {:6.1} M requests/s", rate_m(6, time_s));
    }
    let configs: Vec<_> = KINDS.into_iter().flat_map(configs).collect();
    let mut times_s = [0.0; 2];
    let mut misses = Vec::new();
    for (threads, time) in [1, 2].into_iter().zip(&mut times_s) {
        let (time_s, counted) = best(rounds, || sweep(trace, &configs, threads, |_| {}));
        let announced = memory_bytes(PAGES.into(), REQUESTS as u64, &configs, threads) >> 20;
        println!(
            "{} simulations, {threads} threads: {time_s:.2} s, {:.1} M requests/s, {announced} MiB \
             announced beside the trace",
            configs.len(),
            rate_m(configs.len(), time_s)
        );
        (*time, misses) = (time_s, counted?);
    }
    Ok(Swept { times_s, misses })
}

fn curve(trace: DensePages<'_>, rounds: usize, lru_misses: &[u64]) {
    let (time_s, curve) = best(rounds, || LruCurve::new(trace, |_| {}));
    let wrong = SIZES.iter().zip(lru_misses).filter(|(size, lru)| curve.misses(**size) != **lru);
    println!(
        "exact LRU curve, all sizes: {time_s:.2} s, {:.1} M requests/s; {} of {} sizes differ from \
         a cache of that size; {} MiB announced",
        rate_m(1, time_s),
        wrong.count(),
        SIZES.len(),
        LruCurve::memory_bytes(PAGES.into()) >> 20
    );
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn samples(trace: DensePages<'_>) -> Result<(), Box<dyn Error>> {
    let exact = LruCurve::new(trace, |_| {});
    let of = Population::new(trace);
    let sizes: Vec<usize> = (1..=64).map(|step| PAGES as usize * step / 64).collect();
    for share in [0.1, 0.01, 0.001] {
        let rate = Rate::new(share)?;
        let (time_s, estimate) = best(1, || sampled_lru(&of, &sizes, rate, |_| {}));
        let estimate = estimate?;
        let off = sizes
            .iter()
            .zip(&estimate.miss_ratios)
            .map(|(size, ratio)| (ratio - exact.misses(*size) as f64 / REQUESTS as f64).abs());
        let off: Vec<f64> = off.collect();
        let worst = off.iter().copied().fold(0.0, f64::max);
        let mean = off.iter().sum::<f64>() / 64.0;
        println!(
            "samples of {share}: {:.0} M requests/s each, error {mean:.4} on average, {worst:.4} \
             at most; {estimate}",
            rate_m(1, time_s) * SAMPLES as f64
        );
    }
    Ok(())
}

fn beside_the_oracle(
    python: &str,
    trace: DensePages<'_>,
    ours: &Swept,
    peak_kib: u64,
) -> Result<(), Box<dyn Error>> {
    let file = tempfile::NamedTempFile::new()?;
    let mut writer = BufWriter::new(file.as_file());
    for (time, page) in (0u32..).zip(trace.pages) {
        writer.write_all(&time.to_le_bytes())?;
        writer.write_all(&u64::from(*page).to_le_bytes())?;
        writer.write_all(&1u32.to_le_bytes())?;
        // None of the four policies reads the next request.
        writer.write_all(&(-1i64).to_le_bytes())?;
    }
    writer.flush()?;
    drop(writer);
    let sizes = SIZES.map(|size| size.to_string()).join(",");
    for power in ["24", "20"] {
        let run = Command::new(python)
            .args(["-c", ORACLE])
            .arg(file.path())
            .args([&REQUESTS.to_string(), power, &sizes])
            .output()?;
        let said = String::from_utf8(run.stdout)?;
        let line = said.lines().find_map(|line| line.strip_prefix("SWEEP "));
        let line = line.ok_or_else(|| String::from_utf8_lossy(&run.stderr).into_owned())?;
        let [time_s, peak, counts] = line.split(' ').collect::<Vec<_>>()[..] else {
            return Err("the oracle said something else".into());
        };
        let (time_s, their_kib): (f64, u64) = (time_s.parse()?, peak.parse()?);
        let counts = counts.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let different = counts.iter().zip(&ours.misses).filter(|(a, b)| a != b).count();
        println!(
            "libCacheSim, table of 2^{power}: {time_s:.1} s, {} MiB; we take 1/{:.1} of its time \
             with one thread, 1/{:.1} with two, {} % of its memory; {different} of {} miss counts \
             differ",
            their_kib / 1024,
            time_s / ours.times_s[0],
            time_s / ours.times_s[1],
            peak_kib * 100 / their_kib,
            counts.len()
        );
    }
    Ok(())
}

/// Returns the best time of `rounds` rounds in seconds, and the last answer.
fn best<T>(rounds: usize, mut work: impl FnMut() -> T) -> (f64, T) {
    let mut round = || {
        let started = Instant::now();
        let answer = work();
        (started.elapsed().as_secs_f64(), answer)
    };
    let (mut best_s, mut answer) = round();
    for _ in 1..rounds {
        let (time_s, again) = round();
        best_s = best_s.min(time_s);
        answer = again;
    }
    (best_s, answer)
}

/// Returns millions of requests per second over `passes` passes.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn rate_m(passes: usize, time_s: f64) -> f64 {
    (passes * REQUESTS) as f64 / time_s / 1e6
}

fn peak_rss_kib() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).ok_or("no VmHWM")?;
    Ok(kib.parse()?)
}
