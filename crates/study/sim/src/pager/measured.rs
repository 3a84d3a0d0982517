//! The file of costs: the costs, the machine they hold on, and the probes behind them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Costs, Probe};

/// Costs, where they hold, and the probes they were fitted to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCosts {
    /// The version of Farpool that was measured.
    pub version: String,
    /// The machine.
    pub machine: String,
    /// Where far memory was; if empty, on a blade of the run's own, over shared memory.
    pub blades: Vec<String>,
    /// Memory of a run that counts against its limit, cannot be far, and is not the program's: the
    /// pager and its code.
    pub own_bytes: u64,
    /// Runs of each probe in each place, of which the median counts; 0 in files of versions that
    /// took the fastest.
    #[serde(default)]
    pub rounds: u32,
    /// What else the machine did meanwhile, if it was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// How well the costs explain the probes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
    /// The costs.
    pub costs: Costs,
    /// The probes they were fitted to.
    pub probes: Vec<Probe>,
}

/// A probe whose time the costs explain no better than this does not fit: predictions from such
/// costs would be wrong by as much.
pub const FIT_ERROR_MAX_PERMILLE: u32 = 150;
/// More than this much of the processors used by others disturbs a measurement.
const LOAD_NOTICED_PERMILLE: u32 = 50;

/// Other users of the machine during a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Time of all processors that other programs used, in thousandths.
    pub others_permille: u32,
    /// Time of all processors that the hypervisor gave to others, in thousandths.
    pub stolen_permille: u32,
}

impl Load {
    /// True if it is enough to disturb a measurement.
    #[must_use]
    pub fn is_noticed(&self) -> bool {
        self.others_permille.max(self.stolen_permille) > LOAD_NOTICED_PERMILLE
    }
}

/// The errors of the probes' far times as the costs explain them, in thousandths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Root of the mean square.
    pub error_permille: u32,
    /// The largest.
    pub worst_permille: u32,
    /// The probe that has it.
    pub worst_probe: String,
}

impl Fit {
    /// Compares the probes with what the costs make of them. None without probes.
    #[must_use]
    pub fn of(costs: &Costs, probes: &[Probe]) -> Option<Fit> {
        let errors: Vec<(f64, &str)> =
            probes.iter().map(|probe| (error(costs, probe), probe.name.as_str())).collect();
        let (worst, name) =
            errors.iter().copied().max_by(|a, b| a.0.abs().total_cmp(&b.0.abs()))?;
        #[allow(clippy::cast_precision_loss)] // some tens
        let square =
            errors.iter().map(|(error, _)| error * error).sum::<f64>() / errors.len() as f64;
        Some(Fit {
            error_permille: permille(square.sqrt()),
            worst_permille: permille(worst.abs()),
            worst_probe: name.to_owned(),
        })
    }

    /// True if no probe is off by more than [`FIT_ERROR_MAX_PERMILLE`].
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.worst_permille <= FIT_ERROR_MAX_PERMILLE
    }
}

/// Returns the error of a probe's explained far time, as a share of the measured one.
#[allow(clippy::cast_precision_loss)] // of nanoseconds, for a percentage
pub(super) fn error(costs: &Costs, probe: &Probe) -> f64 {
    let explained_ns = probe.local_ns as f64 + costs.added_ps(&probe.events) as f64 / 1e3;
    explained_ns / probe.far_ns.max(1) as f64 - 1.0
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped
fn permille(share: f64) -> u32 {
    (share * 1000.0).round().clamp(0.0, f64::from(u32::MAX)) as u32
}

/// A file without valid costs.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}; farpool sim calibrate --out {path} writes such a file")]
pub struct CostsError {
    /// Which file.
    path: String,
    /// What is wrong with it.
    reason: String,
}

impl MeasuredCosts {
    /// Returns how well the costs explain the probes, also of a file that does not say; None
    /// without
    /// probes.
    #[must_use]
    pub fn fit(&self) -> Option<Fit> {
        Fit::of(&self.costs, &self.probes)
    }

    /// True if pages travel over a socket, not through this machine's shared memory.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.blades.iter().any(|blade| !blade.starts_with("shm://"))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read or holds no valid costs.
    pub fn read(path: &Path) -> Result<Self, CostsError> {
        let wrong = |reason: String| CostsError { path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let measured: Self = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if measured.costs == Costs::default() {
            return Err(wrong("all costs are 0".to_owned()));
        }
        Ok(measured)
    }

    /// Writes it in a form that a person can read and change.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), CostsError> {
        let wrong = |reason: String| CostsError { path: path.display().to_string(), reason };
        let text = toml::to_string(self).map_err(|error| wrong(error.to_string()))?;
        farpool_report::write_atomically(path, text.as_bytes())
            .map_err(|error| wrong(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pager::Events;

    fn probe(name: &str, far_ns: u64) -> Probe {
        let events = Events { demand_fetches: 1000, ..Events::default() };
        Probe { name: name.to_owned(), local_ns: 1_000_000, far_ns, events }
    }

    #[test]
    fn a_fit_names_its_worst_probe_and_is_not_good_beyond_15_percent() {
        let costs = Costs { demand_fetch_ps: 9_000_000, ..Costs::default() };
        // 1 ms and 1,000 fetches of 9 us: 10 ms are explained.
        let good = Fit::of(&costs, &[probe("a", 10_000_000), probe("b", 9_500_000)]).unwrap();
        assert_eq!((good.worst_permille, good.worst_probe.as_str()), (53, "b"));
        assert!(good.is_good() && good.error_permille < good.worst_permille);
        let bad = Fit::of(&costs, &[probe("a", 10_000_000), probe("c", 30_000_000)]).unwrap();
        assert_eq!((bad.worst_permille, bad.worst_probe.as_str()), (667, "c"));
        assert!(!bad.is_good());
        assert_eq!(Fit::of(&costs, &[]), None);
    }
}
