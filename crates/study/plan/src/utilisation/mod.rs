//! What virtual machines used over time, dense: machine by step by (processor, memory).
//!
//! Files are Parquet or CSV with one row per machine and time; see [`columns`] for the known names
//! and units. Reading is in two halves: `parquet` and `csv` only fetch numbers, `times` finds what
//! unit times are in, `build` checks every value.

mod build;
pub mod columns;
mod csv;
mod parquet;
mod times;

use std::fmt;
use std::path::Path;

use serde::Serialize;

use crate::PlanError;
pub use columns::{Columns, CpuUnit, MemoryUnit, Named, TimeUnit};

/// The treatment of shares of a machine above 100 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Above {
    /// They are clipped to 100 % and counted.
    #[default]
    Clip,
    /// They are kept and counted.
    Keep,
    /// The file is refused.
    Refuse,
}

/// How a file is read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub columns: Columns,
    /// Seconds per step, in files that do not count steps; samples of one step become their
    /// maximum. By default the median distance of two samples, or 300 s if the file counts
    /// steps.
    pub step_s: Option<f64>,
    pub above: Above,
}

/// A virtual machine and, if known, the amounts it was promised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vm {
    pub name: String,
    /// In the unit of [`Utilisation::cpu_unit`].
    pub cpu_provisioned: Option<f64>,
    /// In the unit of [`Utilisation::memory_unit`].
    pub memory_provisioned: Option<f64>,
}

/// Corrections made to the samples before planning; each is reported to the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Mended {
    /// Shares of a machine above 100 %.
    pub above_100_percent: usize,
    /// Samples missing between two others of their machine: the previous value is held.
    pub held: usize,
    /// Samples missing before a machine's first and after its last: taken as no use.
    pub absent: usize,
    /// Samples in the step of another one of their machine: the largest counts.
    pub merged: usize,
}

/// All machines of a file over all its steps.
#[derive(Clone, PartialEq)]
pub struct Utilisation {
    pub vms: Vec<Vm>,
    pub steps: usize,
    pub step_s: f64,
    pub cpu_unit: CpuUnit,
    pub memory_unit: MemoryUnit,
    pub mended: Mended,
    /// The treatment of shares above 100 %.
    pub above: Above,
    /// The file says what processors were used; if not, it is 0.
    pub has_cpu: bool,
    /// The file says what memory was used; if not, it is 0.
    pub has_memory: bool,
    /// The file names no machine: all of it is one.
    pub is_nameless: bool,
    cpu: Vec<f64>,
    memory: Vec<f64>,
}

impl Utilisation {
    /// Reads a file; `.csv`, `.tsv` and `.txt`, each also with `.gz` or `.zst`, are text, anything
    /// else is Parquet.
    ///
    /// # Errors
    /// It cannot be read, is of another kind, lacks a column, or has an invalid value; with file
    /// and row.
    pub fn read(path: &Path, options: &Options) -> Result<Utilisation, PlanError> {
        let rows = read_rows(path, &options.columns)?;
        build::build(path, rows, options)
    }

    /// Creates it from series in memory, one per machine and all of one length. Units are machines
    /// unless set otherwise.
    pub fn from_series(cpu: &[Vec<f64>], memory: &[Vec<f64>], step_s: f64) -> Utilisation {
        let steps = cpu.first().map_or(0, Vec::len);
        assert_eq!(cpu.len(), memory.len(), "as many series of memory as of processors");
        assert!(cpu.iter().chain(memory).all(|series| series.len() == steps), "of one length");
        let vm = |at: usize| Vm {
            name: at.to_string(),
            cpu_provisioned: None,
            memory_provisioned: None,
        };
        Utilisation {
            vms: (0..cpu.len()).map(vm).collect(),
            steps,
            step_s,
            cpu_unit: CpuUnit::Machines,
            memory_unit: MemoryUnit::Machines,
            mended: Mended::default(),
            above: Above::Keep,
            has_cpu: true,
            has_memory: true,
            is_nameless: false,
            cpu: cpu.concat(),
            memory: memory.concat(),
        }
    }

    /// Reads each machine's promised amounts from a table with one row per machine.
    ///
    /// # Errors
    /// As [`Utilisation::read`]; also when a machine of the series is not in the table.
    pub fn read_provisioned(&mut self, path: &Path, columns: &Columns) -> Result<(), PlanError> {
        let table = read_table(path, columns)?;
        build::provision(self, path, &table)
    }

    /// Returns one machine's processor use over time.
    pub fn cpu(&self, vm: usize) -> &[f64] {
        &self.cpu[vm * self.steps..][..self.steps]
    }

    /// Returns one machine's memory use over time.
    pub fn memory(&self, vm: usize) -> &[f64] {
        &self.memory[vm * self.steps..][..self.steps]
    }

    /// Returns the same with longer steps, each the maximum of those in it. A length that does not
    /// divide is rounded down to whole steps; one below the present length changes nothing.
    #[must_use]
    pub fn with_steps_of(&self, step_s: f64) -> Utilisation {
        let factor = (step_s / self.step_s).floor();
        if !factor.is_finite() || factor < 2.0 {
            return self.clone();
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at least 2, and whole
        let factor = (factor as usize).min(self.steps.max(1));
        let coarser = |values: &[f64]| -> Vec<f64> {
            let series = values.chunks(self.steps.max(1));
            series.flat_map(|series| series.chunks(factor).map(peak)).collect()
        };
        #[allow(clippy::cast_precision_loss)] // of a number of steps
        let step_s = self.step_s * factor as f64;
        let steps = self.steps.div_ceil(factor);
        Utilisation {
            steps,
            step_s,
            cpu: coarser(&self.cpu),
            memory: coarser(&self.memory),
            ..self.clone()
        }
    }

    /// Returns the warnings that a user must read before trusting the results.
    pub fn warnings(&self) -> Vec<String> {
        let Mended { above_100_percent, held, merged, .. } = self.mended;
        let columns = usize::from(self.has_cpu) + usize::from(self.has_memory);
        let all = columns * self.cpu.len();
        let mut warnings = Vec::new();
        if self.is_nameless {
            warnings.push(
                "the file has no column for the machine (--vm-column): all of it is taken as one \
                 machine"
                    .to_owned(),
            );
        }
        if !self.has_cpu {
            warnings.push("the file has no column for processors: they are left out".to_owned());
        }
        if !self.has_memory {
            warnings.push("the file has no column for memory in use: it is left out".to_owned());
        }
        if merged > 0 {
            warnings.push(format!(
                "{merged} samples are in the same step of {} s as another one of their machine, \
                 and the largest counts; --step sets the step",
                self.step_s
            ));
        }
        if above_100_percent > 0 {
            let done = match self.above {
                Above::Keep => "were kept",
                _ => "were clipped to it",
            };
            warnings.push(format!(
                "{above_100_percent} of {all} values are above 100 % of a machine and {done}"
            ));
        }
        if held > 0 {
            warnings.push(format!(
                "{held} of {} samples are missing; the value before was held",
                self.cpu.len()
            ));
        }
        warnings
    }
}

/// Omits the samples: there are millions.
impl fmt::Debug for Utilisation {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Utilisation")
            .field("vms", &self.vms.len())
            .field("steps", &self.steps)
            .field("step_s", &self.step_s)
            .finish_non_exhaustive()
    }
}

/// Returns the largest of non-negative values; 0 if there are none.
pub fn peak(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// A file's columns as read; `cpu` or `memory` is empty if the file lacks it. `vm` holds indices
/// into `names`, which are in the order of first
/// appearance.
#[derive(Debug, Default)]
struct Rows {
    names: Vec<String>,
    vm: Vec<u32>,
    time: Vec<f64>,
    cpu: Vec<f64>,
    memory: Vec<f64>,
    /// The unit of time is steps or seconds; a column that the file lacks has no unit.
    units: (TimeUnit, Option<CpuUnit>, Option<MemoryUnit>),
    is_nameless: bool,
    /// Added to an index to name a row to the user.
    first_row: usize,
}

/// The machines' promised amounts, as read from the file.
#[derive(Debug, Default)]
struct ProvisionTable {
    names: Vec<String>,
    cpu: Option<(CpuUnit, Vec<f64>)>,
    memory: Option<(MemoryUnit, Vec<f64>)>,
    first_row: usize,
}

fn is_csv(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase());
    let name = name.unwrap_or_default();
    let plain = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    [".csv", ".tsv", ".txt"].iter().any(|ending| plain.ends_with(ending))
}

fn read_rows(path: &Path, columns: &Columns) -> Result<Rows, PlanError> {
    match is_csv(path) {
        true => csv::read_rows(path, columns),
        false => parquet::read_rows(path, columns),
    }
}

fn read_table(path: &Path, columns: &Columns) -> Result<ProvisionTable, PlanError> {
    match is_csv(path) {
        true => csv::read_table(path, columns),
        false => parquet::read_table(path, columns),
    }
}
