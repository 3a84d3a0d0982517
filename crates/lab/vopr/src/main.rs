//! Runs trials, as many as are asked for, on all processors: `make soak`.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use anyhow::bail;
use clap::{Parser, ValueEnum};
use farpool_vopr::{Mode, clock, run};

/// Runs pool, fabric and blade under faults, in a time and on a network of their own.
#[derive(Debug, Parser)]
struct Args {
    /// How many seeds to try
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// What to ask for; all by default
    #[arg(long, value_enum)]
    mode: Option<ModeName>,
    /// Try this seed only, and print what it came to
    #[arg(long, conflicts_with_all = ["seeds", "from"], requires = "mode")]
    seed: Option<u64>,
    /// With --seed: print what happens, with the time in the trial
    #[arg(long, requires = "seed")]
    tell: bool,
    /// Threads [default: one per processor]
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    Safety,
    Liveness,
    Copies,
    Parity,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Mode {
        match name {
            ModeName::Safety => Mode::Safety,
            ModeName::Liveness => Mode::Liveness,
            ModeName::Copies => Mode::Copies,
            ModeName::Parity => Mode::Parity,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    name_the_seed_of_a_panic();
    let all = vec![Mode::Safety, Mode::Liveness, Mode::Copies, Mode::Parity];
    let modes = args.mode.map_or(all, |mode| vec![mode.into()]);
    if let Some(seed) = args.seed {
        clock::tell(args.tell);
        for mode in modes {
            match run(seed, mode) {
                Ok(report) => println!("{mode:?} seed {seed}: {report:#?}"),
                Err(violation) => bail!("{mode:?} seed {seed}: {}", violation.0),
            }
        }
        return Ok(());
    }
    let threads =
        args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    for mode in modes {
        soak(mode, args.from, args.seeds, threads)?;
    }
    Ok(())
}

thread_local! {
    /// The trial that this thread runs.
    static TRIAL: Cell<Option<(Mode, u64)>> = const { Cell::new(None) };
}

/// Where a panic ends the process, nobody else can tell which trial it was.
fn name_the_seed_of_a_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if let Some((mode, seed)) = TRIAL.get() {
            eprintln!("{mode:?} seed {seed}:");
        }
        usual(panic);
    }));
}

/// Tries all seeds, and stops at the first violation.
fn soak(mode: Mode, from: u64, seeds: u64, threads: usize) -> anyhow::Result<()> {
    let (next, stop, begun) = (AtomicU64::new(from), AtomicBool::new(false), Instant::now());
    let (read, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= from.saturating_add(seeds) {
                        return;
                    }
                    TRIAL.set(Some((mode, seed)));
                    match run(seed, mode) {
                        Ok(report) => {
                            read.fetch_add(report.tally.read, Relaxed);
                            failed.fetch_add(report.tally.failed, Relaxed);
                        }
                        Err(violation) => {
                            stop.store(true, Relaxed);
                            eprintln!("{mode:?} seed {seed}: {}", violation.0);
                        }
                    }
                }
            });
        }
    });
    if stop.load(Relaxed) {
        bail!("a seed failed; --mode and --seed replay it");
    }
    println!(
        "{mode:?}: {seeds} seeds from {from} in {:.1} s: {} pages read and right, {} ended with an \
         error",
        begun.elapsed().as_secs_f64(),
        read.load(Relaxed),
        failed.load(Relaxed)
    );
    Ok(())
}
