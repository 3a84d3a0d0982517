//! A whole experiment: designs × local sizes × policies over one trace, in parallel, in a fixed
//! order.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use farpool_policy::CacheKind;
use farpool_units::at_most;
use serde::{Deserialize, Serialize};

use crate::design::{Design, DesignError, Preset};
use crate::engine::{Outcome, Program, simulate};
use crate::load::References;

/// Local memory, as users give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LocalSize {
    /// A share of the trace's footprint, in thousandths.
    Permille(u32),
    /// An absolute size.
    Bytes(u64),
}

impl LocalSize {
    /// Returns the pages for a trace with this footprint; rounded down, at least one.
    #[must_use]
    pub fn pages(self, page_count: usize, page_bytes: u64) -> usize {
        let pages = match self {
            Self::Permille(share) => page_count as u64 * u64::from(share) / 1000,
            Self::Bytes(bytes) => bytes / page_bytes,
        };
        at_most::<usize, _>(pages).max(1)
    }
}

impl std::str::FromStr for LocalSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refusal =
            || format!("{text:?} is not a size of local memory; write 75%, 37.5% or 512MiB");
        if let Some(share) = text.strip_suffix('%') {
            let (whole, tenth) = share.split_once('.').unwrap_or((share, "0"));
            let digit = |part: &str| part.parse::<u32>().map_err(|_| refusal());
            let permille = digit(whole)?.saturating_mul(10).saturating_add(digit(tenth)?);
            let is_share = tenth.len() == 1 && (1..=1000).contains(&permille);
            return if is_share { Ok(Self::Permille(permille)) } else { Err(refusal()) };
        }
        let bytes = farpool_units::parse_bytes(text).filter(|bytes| *bytes > 0);
        bytes.map(Self::Bytes).ok_or_else(refusal)
    }
}

impl TryFrom<String> for LocalSize {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl std::fmt::Display for LocalSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Permille(share) if share % 10 == 0 => write!(f, "{}%", share / 10),
            Self::Permille(share) => write!(f, "{}.{}%", share / 10, share % 10),
            Self::Bytes(bytes) => f.write_str(&farpool_units::format_bytes(bytes)),
        }
    }
}

impl From<LocalSize> for String {
    fn from(size: LocalSize) -> Self {
        size.to_string()
    }
}

/// The configurations to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct Experiment {
    /// The designs.
    pub designs: Vec<Design>,
    /// Local memory.
    pub local: Vec<LocalSize>,
    /// Which pages leave local memory.
    pub policies: Vec<CacheKind>,
    /// References that may wait at the same time ([`Program::overlap`]).
    pub overlap: u32,
    /// Length of a tick; by default the trace's own.
    pub tick_ps: Option<u64>,
    /// For random policies.
    pub seed: u64,
    /// Programs like this one that share the far tier.
    pub clients: u32,
}

/// One configuration and its result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// [`Design::name`].
    pub design: String,
    /// Local memory as requested.
    pub local: LocalSize,
    /// Local memory in pages.
    pub local_pages: u64,
    /// The policy's name.
    pub policy: &'static str,
    /// Time in thousandths of the all-local time.
    pub slowdown_permille: u64,
    /// The first program's outcome; all programs do the same.
    pub outcome: Outcome,
}

/// A configuration that cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// [`Design::name`].
    pub design: String,
    /// Local memory as requested.
    pub local: LocalSize,
    /// The reason.
    pub reason: String,
}

/// Simulates all-local memory: the time that slowdowns are relative to.
///
/// # Errors
/// None in fact; the design of [`Preset::Local`] can always be simulated.
pub fn all_local(experiment: &Experiment, trace: &References) -> Result<Outcome, DesignError> {
    let program = program(experiment, trace, trace.page_count().max(1), CacheKind::Fifo);
    let mut outcomes = simulate(&Preset::Local.design(), &[program])?;
    Ok(outcomes.swap_remove(0))
}

fn program<'a>(
    experiment: &Experiment,
    trace: &'a References,
    local_pages: usize,
    policy: CacheKind,
) -> Program<'a> {
    Program {
        references: trace,
        local_pages,
        tick_ps: experiment.tick_ps.unwrap_or_else(|| trace.tick_ps()),
        overlap: experiment.overlap,
        policy,
        seed: experiment.seed,
    }
}

/// Runs every configuration on `threads` threads. Rows are in the order designs, sizes, policies,
/// whichever thread ran them. `done` is called after each.
///
/// # Errors
/// Nothing at all could be simulated.
pub fn run(
    experiment: &Experiment,
    trace: &References,
    threads: usize,
    done: &(dyn Fn(usize) + Sync),
) -> Result<(Outcome, Vec<Result<Row, Refused>>), DesignError> {
    let local = all_local(experiment, trace)?;
    let cells: Vec<(&Design, LocalSize, CacheKind)> = experiment
        .designs
        .iter()
        .flat_map(|design| experiment.local.iter().map(move |&size| (design, size)))
        .flat_map(|(design, size)| experiment.policies.iter().map(move |&p| (design, size, p)))
        .collect();
    let results: Vec<Mutex<Option<Result<Row, Refused>>>> =
        cells.iter().map(|_| Mutex::new(None)).collect();
    let (next, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, cells.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(design, size, policy)) = cells.get(at) else { return };
                    let row = cell(experiment, trace, &local, design, size, policy);
                    if let Ok(mut result) = results[at].lock() {
                        *result = Some(row);
                    }
                    done(finished.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    let rows =
        results.into_iter().filter_map(|result| result.into_inner().ok().flatten()).collect();
    Ok((local, rows))
}

/// Simulates one configuration; `local` is the all-local outcome.
pub(crate) fn cell(
    experiment: &Experiment,
    trace: &References,
    local: &Outcome,
    design: &Design,
    size: LocalSize,
    policy: CacheKind,
) -> Result<Row, Refused> {
    // What is all local has no far memory at any size.
    let pages = match design.is_all_local {
        true => trace.page_count().max(1),
        false => size.pages(trace.page_count(), trace.page_bytes),
    };
    let one = program(experiment, trace, pages, policy);
    let programs = vec![one; experiment.clients.max(1) as usize];
    let mut outcomes = simulate(design, &programs).map_err(|error| Refused {
        design: design.name.clone(),
        local: size,
        reason: error.reason,
    })?;
    let outcome = outcomes.swap_remove(0);
    let ratio = u128::from(outcome.time_ps) * 1000 / u128::from(local.time_ps.max(1));
    Ok(Row {
        design: design.name.clone(),
        local: size,
        local_pages: pages as u64,
        policy: policy.name(),
        slowdown_permille: at_most::<u64, _>(ratio).saturating_sub(1000),
        outcome,
    })
}
