//! Blades that die one after the other, under a program that has two copies of what is far, or
//! parity.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::run::{Run, Running};
use farpool_kernel::monotonic_ns;
use farpool_policy::Rng;
use farpool_units::exactly;

use super::{LOCAL, Pauses, SPREAD_MS, STEP};
use super::{longest_ms, observe, pauses, start, touches};

const MEMORY: &str = "512MiB";
/// How long the copies may take to be made again.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a blade ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    Killed,
    /// It says nothing any more.
    Stopped,
}

/// Measures one program under so many deaths of blades, one at a time.
pub(super) fn measure(death: Death, redundancy: &str, trials: usize) -> anyhow::Result<Pauses> {
    // One more than is needed.
    let count = if redundancy == "parity" { 6 } else { 3 };
    let mut blades: Vec<Blade> = (0..count).map(|_| Blade::start(MEMORY)).collect();
    let mut run = Run::far(LOCAL).redundancy(redundancy);
    for blade in &blades {
        run = run.blade(&blade.address(Transport::Tcp));
    }
    let mut running = start(run)?;
    let mut random = Rng::new(trials as u64);
    let calm_from_ns = monotonic_ns();
    observe(&mut running, calm_from_ns)?;
    let mut from_ns = Vec::with_capacity(trials);
    for number in 0..trials {
        std::thread::sleep(Duration::from_millis(random.below(SPREAD_MS).into()));
        // What comes back is empty: another one is more to be missed.
        let mut used: Vec<&mut Blade> = blades.iter_mut().filter(|blade| is_used(blade)).collect();
        ensure!(used.len() > 1, "one blade has everything");
        let number_of_used: u32 = exactly(used.len());
        let victim = &mut *used[random.below(number_of_used) as usize];
        let begun_ns = monotonic_ns();
        match death {
            Death::Stopped => victim.pause(true),
            Death::Killed => victim.kill(),
        }
        observe(&mut running, begun_ns)?;
        victim.start_again(MEMORY);
        from_ns.push(begun_ns);
        let healed = wait_for_copies(&running)?;
        let longest_ms = longest_ms(&touches(&running), begun_ns);
        eprintln!(
            "{redundancy}, {death:?}: {} of {trials}: {longest_ms:.0} ms; all there after {:.1} s",
            number + 1,
            healed.as_secs_f64()
        );
    }
    pauses(&running, &from_ns, calm_from_ns)
}

fn is_used(blade: &Blade) -> bool {
    blade.stat()["blades"][0]["used_bytes"].as_u64().is_some_and(|bytes| bytes > 0)
}

/// Waits until every superpage has its copies. Returns how long that took.
fn wait_for_copies(running: &Running) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    loop {
        let told = running.told().context("farpool stat")?;
        if told["total"]["degraded_superpages"].as_u64() == Some(0) {
            return Ok(begun.elapsed());
        }
        ensure!(begun.elapsed() < PATIENCE, "too few copies: {}", running.stderr());
        std::thread::sleep(STEP);
    }
}
