//! How long a program stands still when the way to its blade fails and the blade lives: all flows
//! die without a word and new ones work; one bit of a length is flipped; the port refuses for a
//! second; or the blade's process is killed and started again, or taken over, with the same memory.
//! A real program under `farpool run` touches pages all the time, most of them far, over TCP
//! (through a proxy that makes the faults). Its longest pause after each fault is told; after a
//! refusal or restart, what it lasts beyond that. Any wrong byte, or lost page, ends the
//! measurement with an error.
//!
//!     cargo bench -p farpool-bench --bench network_faults -- [TRIALS] [FAULT...] [--json]
//!
//! FAULT is dead-flows, flipped-length, refused-port, restarted-blade, taken-over-blade,
//! killed-blade, stopped-blade, killed-blade-of-group or stopped-blade-of-group; all of them by
//! default.
//!
//! The bar of the project: at most 1 s at p99.

mod program;
mod trials;

use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;

use trials::{NetworkFault, Pauses};

/// The word that makes this file the program under test.
const PROGRAM: &str = "program-under-test";
const TRIALS: usize = 100;
const BAR: Duration = Duration::from_secs(1);

/// What one kind of fault came to.
#[derive(Debug, Serialize)]
struct Row {
    fault: &'static str,
    trials: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// The longest pause of the program in as much time without a fault.
    calm_max_ms: f64,
    pages_read: u64,
    wrong_bytes: u64,
    meets_bar: bool,
}

fn main() -> anyhow::Result<()> {
    let mut own = std::env::args().skip(1);
    if own.next().as_deref() == Some(PROGRAM) {
        let mib = own.next().context("how much memory, in MiB")?.parse()?;
        return program::run(mib);
    }
    let (mut trials, mut is_json, mut faults) = (TRIALS, false, Vec::new());
    for word in farpool_benchargs::arguments() {
        let fault = NetworkFault::ALL.into_iter().find(|fault| fault.word() == word);
        match (word.as_str(), fault) {
            (_, Some(fault)) => faults.push(fault),
            ("--json", _) => is_json = true,
            (number, _) => trials = number.parse().with_context(|| format!("{number:?}"))?,
        }
    }
    if faults.is_empty() {
        faults.extend(NetworkFault::ALL);
    }
    if trials == 0 {
        bail!("no trials");
    }
    if !is_json {
        println!(
            "| fault | trials | p50 ms | p99 ms | max ms | max without a fault ms | pages read, all \
             right | p99 <= 1 s |"
        );
        println!("|---|---|---|---|---|---|---|---|");
    }
    for fault in faults {
        let row = row(fault, &trials::measure(fault, trials)?);
        if is_json {
            println!("{}", serde_json::to_string(&row)?);
        } else {
            row.print();
        }
    }
    Ok(())
}

fn row(fault: NetworkFault, pauses: &Pauses) -> Row {
    let mut sorted = pauses.after_faults_ms.clone();
    sorted.sort_by(f64::total_cmp);
    let p99_ms = quantile(&sorted, 99);
    Row {
        fault: fault.name(),
        trials: sorted.len(),
        p50_ms: quantile(&sorted, 50),
        p99_ms,
        max_ms: quantile(&sorted, 100),
        calm_max_ms: pauses.calm_max_ms,
        pages_read: pauses.pages_read,
        // A wrong one ends the measurement.
        wrong_bytes: 0,
        meets_bar: p99_ms <= BAR.as_secs_f64() * 1e3,
    }
}

/// The least value that so many percent of all do not exceed.
fn quantile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

impl Row {
    fn print(&self) {
        let Row { fault, trials, p50_ms, p99_ms, max_ms, calm_max_ms, pages_read, .. } = self;
        let bar = if self.meets_bar { "met" } else { "**missed**" };
        println!(
            "| {fault} | {trials} | {p50_ms:.0} | {p99_ms:.0} | {max_ms:.0} | {calm_max_ms:.0} | \
             {pages_read} | {bar} |"
        );
    }
}
