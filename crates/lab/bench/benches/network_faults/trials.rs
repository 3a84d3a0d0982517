//! Faults on the way of one program, one after the other, and its pauses.

use std::time::{Duration, Instant};

mod copies;

use anyhow::{Context, bail, ensure};
use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::proxy::{Fault, Proxy};
use farpool_e2e::run::{Run, Running};
use farpool_kernel::monotonic_ns;
use farpool_policy::Rng;
use farpool_units::exactly;

use copies::Death;

use crate::PROGRAM;
use crate::program::{THREADS, Touch};

/// The program's memory, and what of it may be local.
const PROGRAM_MIB: &str = "64";
const LOCAL: &str = "16MiB";
/// Short, so that the connection that keeps it is used in every trial, too.
const LEASE: &str = "3s";
/// How long the port refuses.
const REFUSAL: Duration = Duration::from_secs(1);
/// What follows a fault within this time is counted: more than all that waits once, twice and a
/// third time.
const WINDOW: Duration = Duration::from_secs(2);
/// The next fault comes after up to this time more.
const SPREAD_MS: u32 = 300;
/// How long the program may stand still before the measurement is given up.
const PATIENCE: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(10);

/// What happens to the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkFault {
    DeadFlows,
    FlippedLength,
    RefusedPort,
    /// The blade is killed and started again with the same memory.
    RestartedBlade,
    /// Another process takes the blade over while it serves.
    TakenOverBlade,
    /// One of three blades is killed; the program has two copies.
    KilledBlade,
    /// Such a blade is stopped, and says nothing any more.
    StoppedBlade,
    /// One of six blades is killed; the program has parity.
    KilledBladeOfGroup,
    /// Such a blade is stopped.
    StoppedBladeOfGroup,
}

/// The pauses of one program.
#[derive(Debug)]
pub(crate) struct Pauses {
    /// The longest after each fault.
    pub(crate) after_faults_ms: Vec<f64>,
    /// The longest in as much time before the first fault.
    pub(crate) calm_max_ms: f64,
    pub(crate) pages_read: u64,
}

impl NetworkFault {
    pub(crate) const ALL: [NetworkFault; 9] = [
        NetworkFault::DeadFlows,
        NetworkFault::FlippedLength,
        NetworkFault::RefusedPort,
        NetworkFault::RestartedBlade,
        NetworkFault::TakenOverBlade,
        NetworkFault::KilledBlade,
        NetworkFault::StoppedBlade,
        NetworkFault::KilledBladeOfGroup,
        NetworkFault::StoppedBladeOfGroup,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            NetworkFault::DeadFlows => "all flows die, new ones work",
            NetworkFault::FlippedLength => "one bit of a length flips",
            NetworkFault::RefusedPort => "the port refuses for 1 s: beyond that",
            NetworkFault::RestartedBlade => "the blade is killed and restarted: beyond its start",
            NetworkFault::TakenOverBlade => "the blade is taken over by another process",
            NetworkFault::KilledBlade => "one of 3 blades is killed, 2 copies",
            NetworkFault::StoppedBlade => "one of 3 blades is stopped, 2 copies",
            NetworkFault::KilledBladeOfGroup => "one of 6 blades is killed, parity",
            NetworkFault::StoppedBladeOfGroup => "one of 6 blades is stopped, parity",
        }
    }

    /// Its name among the arguments.
    pub(crate) fn word(self) -> &'static str {
        match self {
            NetworkFault::DeadFlows => "dead-flows",
            NetworkFault::FlippedLength => "flipped-length",
            NetworkFault::RefusedPort => "refused-port",
            NetworkFault::RestartedBlade => "restarted-blade",
            NetworkFault::TakenOverBlade => "taken-over-blade",
            NetworkFault::KilledBlade => "killed-blade",
            NetworkFault::StoppedBlade => "stopped-blade",
            NetworkFault::KilledBladeOfGroup => "killed-blade-of-group",
            NetworkFault::StoppedBladeOfGroup => "stopped-blade-of-group",
        }
    }

    /// Makes the fault. Returns the time from which on the program could go on.
    fn strike(self, proxy: &Proxy, number: usize) -> u64 {
        let begun_ns = monotonic_ns();
        match self {
            NetworkFault::DeadFlows => proxy.let_flows_die(),
            // In an answer and in a request by turns.
            NetworkFault::FlippedLength if number.is_multiple_of(2) => {
                proxy.order(Fault::FlipLength)
            }
            NetworkFault::FlippedLength => proxy.order(Fault::FlipRequestLength),
            NetworkFault::RefusedPort => {
                proxy.refuse();
                std::thread::sleep(REFUSAL);
                proxy.serve_again();
                return monotonic_ns();
            }
            _ => unreachable!("it is no fault of the network"),
        }
        begun_ns
    }

    /// Whether it has met the program.
    fn has_struck(self, proxy: &Proxy, number: usize, accepted_before: usize) -> bool {
        match self {
            NetworkFault::FlippedLength => proxy.done() > number,
            _ => proxy.accepted() > accepted_before,
        }
    }
}

/// Measures one program under so many faults of a kind.
pub(crate) fn measure(fault: NetworkFault, trials: usize) -> anyhow::Result<Pauses> {
    match fault {
        NetworkFault::KilledBlade => return copies::measure(Death::Killed, "2", trials),
        NetworkFault::StoppedBlade => return copies::measure(Death::Stopped, "2", trials),
        NetworkFault::KilledBladeOfGroup => {
            return copies::measure(Death::Killed, "parity", trials);
        }
        NetworkFault::StoppedBladeOfGroup => {
            return copies::measure(Death::Stopped, "parity", trials);
        }
        _ => {}
    }
    if matches!(fault, NetworkFault::RestartedBlade | NetworkFault::TakenOverBlade) {
        return restarts(fault, trials);
    }
    let blade = Blade::start_with("256MiB", &["--lease", LEASE]);
    let proxy = Proxy::start(blade.tcp());
    let mut running = start(Run::far(LOCAL).blade(proxy.address()))?;
    let mut random = Rng::new(trials as u64);
    let calm_from_ns = monotonic_ns();
    observe(&mut running, calm_from_ns)?;
    let mut from_ns = Vec::with_capacity(trials);
    for number in 0..trials {
        std::thread::sleep(Duration::from_millis(random.below(SPREAD_MS).into()));
        let before = proxy.accepted();
        let begun_ns = fault.strike(&proxy, number);
        observe(&mut running, begun_ns)?;
        ensure!(fault.has_struck(&proxy, number, before), "fault {number} met nothing");
        from_ns.push(begun_ns);
        let longest_ms = longest_ms(&touches(&running), begun_ns);
        eprintln!("{}: {} of {trials}: {longest_ms:.0} ms", fault.name(), number + 1);
    }
    pauses(&running, &from_ns, calm_from_ns)
}

/// Measures one program whose blade's process is replaced so often.
fn restarts(fault: NetworkFault, trials: usize) -> anyhow::Result<Pauses> {
    let mut blade = Blade::start_persistent("256MiB");
    let mut running = start(Run::far(LOCAL).blade(&blade.address(Transport::Tcp)))?;
    let mut random = Rng::new(trials as u64);
    let calm_from_ns = monotonic_ns();
    observe(&mut running, calm_from_ns)?;
    let mut from_ns = Vec::with_capacity(trials);
    for number in 0..trials {
        std::thread::sleep(Duration::from_millis(random.below(SPREAD_MS).into()));
        let begun_ns = monotonic_ns();
        let is_takeover = fault == NetworkFault::TakenOverBlade;
        if is_takeover {
            ensure!(blade.take_over() == Some(0), "the process before failed");
        } else {
            blade.restart(libc::SIGKILL);
        }
        let ready_ns = monotonic_ns();
        let counted_ns = if is_takeover { begun_ns } else { ready_ns };
        observe(&mut running, counted_ns)?;
        from_ns.push(counted_ns);
        let longest_ms = longest_ms(&touches(&running), counted_ns);
        eprintln!(
            "{}: {} of {trials}: {longest_ms:.0} ms; its start took {} ms",
            fault.name(),
            number + 1,
            (ready_ns - begun_ns) / 1_000_000
        );
    }
    pauses(&running, &from_ns, calm_from_ns)
}

/// Starts the program under test. Some of it is far when this returns.
fn start(run: Run) -> anyhow::Result<Running> {
    let mut running = run.program(std::env::current_exe()?).args([PROGRAM, PROGRAM_MIB]).start();
    running.wait_for_output("filled", THREADS);
    running.wait_until_far();
    Ok(running)
}

/// What the program said of the windows that began then.
fn pauses(running: &Running, from_ns: &[u64], calm_from_ns: u64) -> anyhow::Result<Pauses> {
    let lost = running.told().context("farpool stat")?["total"]["lost"].as_u64();
    ensure!(lost == Some(0), "pages were lost: {lost:?}; {}", running.stderr());
    let touches = touches(running);
    Ok(Pauses {
        after_faults_ms: from_ns.iter().map(|from_ns| longest_ms(&touches, *from_ns)).collect(),
        calm_max_ms: longest_ms(&touches, calm_from_ns),
        pages_read: touches.iter().map(|touch| touch.pages).sum(),
    })
}

fn touches(running: &Running) -> Vec<Touch> {
    running.stdout().lines().filter_map(Touch::read).collect()
}

/// Waits until the time that counts is over and no thread stands still that stood still in it.
fn observe(running: &mut Running, from_ns: u64) -> anyhow::Result<()> {
    let until_ns = from_ns + exactly::<u64, _>(WINDOW.as_nanos());
    std::thread::sleep(Duration::from_nanos(until_ns.saturating_sub(monotonic_ns())));
    let begun = Instant::now();
    loop {
        let said = running.stdout();
        let has_gone_on = |thread: usize| {
            let mut touches = said.lines().rev().filter_map(Touch::read);
            touches.any(|touch| touch.thread == thread && touch.ended_ns >= until_ns)
        };
        if (0..THREADS).all(has_gone_on) {
            return Ok(());
        }
        if !running.is_running() || begun.elapsed() > PATIENCE {
            let wrong = said.lines().find(|line| line.starts_with("WRONG"));
            bail!("the program does not go on: {wrong:?}; {}", running.stderr());
        }
        std::thread::sleep(STEP);
    }
}

/// The longest part of a touch in the window that begins then, in milliseconds.
fn longest_ms(touches: &[Touch], from_ns: u64) -> f64 {
    let until_ns = from_ns + exactly::<u64, _>(WINDOW.as_nanos());
    let in_window = touches.iter().filter(|touch| {
        touch.ended_ns >= from_ns && touch.ended_ns.saturating_sub(touch.took_ns) < until_ns
    });
    let parts = in_window.map(|touch| touch.ended_ns - from_ns.max(touch.ended_ns - touch.took_ns));
    parts.max().map_or(f64::NAN, |longest_ns| longest_ns as f64 / 1e6)
}
