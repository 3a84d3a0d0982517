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
    /// The costs.
    pub costs: Costs,
    /// The probes they were fitted to.
    pub probes: Vec<Probe>,
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
