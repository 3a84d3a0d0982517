//! The meaning of a file's columns, and their units.
//!
//! A known name needs no flag:
//!
//! | meaning | names, with their unit |
//! |---|---|
//! | machine | `vm`, `vm_id`, `id` |
//! | time | `t` (steps), `time_s`, `time_ms`, `timestamp` (ms) |
//! | processors | `cpu`, `cpu_cores` (cores), `cpu_mhz`, `cpu_usage` (MHz), `cpu_percent`, `cpu_c` (hundredths of a percent of a machine) |
//! | memory | `memory_bytes`, `memory_kib`, `memory_mib`, `memory_gib`, `mem_mib`, `memory_percent`, `mem_c` (hundredths of a percent) |
//! | promised processors | `cpu_cap_mhz`, `cpu_capacity` (MHz) |
//! | promised memory | `mem_cap_kib`, `mem_capacity` (KiB) |
//!
//! Any other is named with its unit as `NAME:UNIT`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use crate::PlanError;

const PERCENT: f64 = 0.01;
const HUNDREDTH: f64 = 0.0001;

/// The unit of processor use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuUnit {
    Cores,
    Mhz,
    /// Shares of a whole machine.
    #[default]
    Machines,
}

/// The unit of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryUnit {
    Bytes,
    /// Shares of a whole machine.
    #[default]
    Machines,
}

impl fmt::Display for CpuUnit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            CpuUnit::Cores => "cores",
            CpuUnit::Mhz => "MHz",
            CpuUnit::Machines => "machines",
        })
    }
}

/// The unit of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeUnit {
    #[default]
    Steps,
    Seconds,
}

/// A column's name, and its unit if the name does not give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub unit: Option<String>,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Named, String> {
        let (name, unit) = text.split_once(':').map_or((text, None), |(n, u)| (n, Some(u)));
        match name.is_empty() || unit == Some("") {
            true => Err(format!("{text:?} is not a column; write it as NAME or NAME:UNIT")),
            false => Ok(Named { name: name.into(), unit: unit.map(str::to_owned) }),
        }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.unit {
            Some(unit) => write!(to, "{}:{unit}", self.name),
            None => to.write_str(&self.name),
        }
    }
}

/// The columns that the user named; the others are found by their usual names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    pub vm: Option<Named>,
    pub time: Option<Named>,
    pub cpu: Option<Named>,
    pub memory: Option<Named>,
}

/// A column that was found: its index, the factor to the unit used in planning, and that unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Found<Unit> {
    pub at: usize,
    pub factor: f64,
    pub unit: Unit,
}

/// A kind of column: its name in messages, its usual names with their units, and the units.
struct Kind<Unit: 'static> {
    called: &'static str,
    flag: &'static str,
    names: &'static [(&'static str, &'static str)],
    units: &'static [(&'static str, f64, Unit)],
}

const TIME: Kind<TimeUnit> = Kind {
    called: "time",
    flag: "--time-column",
    names: &[("t", "steps"), ("time_s", "s"), ("time_ms", "ms"), ("timestamp", "ms")],
    units: &[
        ("steps", 1.0, TimeUnit::Steps),
        ("s", 1.0, TimeUnit::Seconds),
        ("ms", 0.001, TimeUnit::Seconds),
    ],
};

const CPU_UNITS: &[(&str, f64, CpuUnit)] = &[
    ("cores", 1.0, CpuUnit::Cores),
    ("mhz", 1.0, CpuUnit::Mhz),
    ("percent", PERCENT, CpuUnit::Machines),
    ("hundredths", HUNDREDTH, CpuUnit::Machines),
];

const MEMORY_UNITS: &[(&str, f64, MemoryUnit)] = &[
    ("bytes", 1.0, MemoryUnit::Bytes),
    ("kib", 1024.0, MemoryUnit::Bytes),
    ("mib", 1_048_576.0, MemoryUnit::Bytes),
    ("gib", 1_073_741_824.0, MemoryUnit::Bytes),
    ("percent", PERCENT, MemoryUnit::Machines),
    ("hundredths", HUNDREDTH, MemoryUnit::Machines),
];

const CPU: Kind<CpuUnit> = Kind {
    called: "processors",
    flag: "--cpu-column",
    names: &[
        ("cpu", "cores"),
        ("cpu_cores", "cores"),
        ("cpu_mhz", "mhz"),
        ("cpu_usage", "mhz"),
        ("cpu_percent", "percent"),
        ("cpu_c", "hundredths"),
    ],
    units: CPU_UNITS,
};

const MEMORY: Kind<MemoryUnit> = Kind {
    called: "memory",
    flag: "--memory-column",
    names: &[
        ("memory_bytes", "bytes"),
        ("memory_kib", "kib"),
        ("memory_mib", "mib"),
        ("memory_gib", "gib"),
        ("mem_mib", "mib"),
        ("memory_percent", "percent"),
        ("mem_c", "hundredths"),
    ],
    units: MEMORY_UNITS,
};

const CPU_PROMISED: Kind<CpuUnit> = Kind {
    called: "promised processors",
    names: &[("cpu_cap_mhz", "mhz"), ("cpu_capacity", "mhz")],
    ..CPU
};

const MEMORY_PROMISED: Kind<MemoryUnit> = Kind {
    called: "promised memory",
    names: &[("mem_cap_kib", "kib"), ("mem_capacity", "kib")],
    ..MEMORY
};

const VM_NAMES: [&str; 3] = ["vm", "vm_id", "id"];

impl<Unit: Copy> Kind<Unit> {
    fn find(
        &self,
        path: &Path,
        header: &[String],
        wanted: Option<&Named>,
    ) -> Result<Found<Unit>, PlanError> {
        self.look(path, header, wanted)?.ok_or_else(|| {
            let known: Vec<&str> = self.names.iter().map(|(name, _)| *name).collect();
            PlanError::foreign(
                path,
                format!(
                    "no column for {} among {header:?}: it would be one of {known:?}; name it with \
                     {} NAME:UNIT",
                    self.called, self.flag
                ),
            )
        })
    }

    /// Returns None if no column was named and none has a usual name.
    fn look(
        &self,
        path: &Path,
        header: &[String],
        wanted: Option<&Named>,
    ) -> Result<Option<Found<Unit>>, PlanError> {
        let usual = |name: &str| self.names.iter().find(|(known, _)| *known == name);
        let Some(named) = wanted else {
            let found = header.iter().enumerate().find_map(|(at, name)| Some((at, usual(name)?.1)));
            return found.map(|(at, unit)| self.in_unit(path, at, unit)).transpose();
        };
        let at = place(path, header, &named.name)?;
        let unit = named.unit.as_deref().or_else(|| usual(&named.name).map(|(_, unit)| *unit));
        let unit = unit.ok_or_else(|| {
            let reason = format!(
                "the unit of column {:?} is not known; give it as {} {}:UNIT, one of {:?}",
                named.name,
                self.flag,
                named.name,
                self.unit_names()
            );
            PlanError::foreign(path, reason)
        })?;
        self.in_unit(path, at, unit).map(Some)
    }

    fn in_unit(&self, path: &Path, at: usize, name: &str) -> Result<Found<Unit>, PlanError> {
        let known = self.units.iter().find(|(known, _, _)| *known == name);
        let &(_, factor, unit) = known.ok_or_else(|| {
            let reason = format!(
                "{name:?} is not a unit for {}; choose one of {:?}",
                self.called,
                self.unit_names()
            );
            PlanError::foreign(path, reason)
        })?;
        Ok(Found { at, factor, unit })
    }

    fn unit_names(&self) -> Vec<&str> {
        self.units.iter().map(|(name, _, _)| *name).collect()
    }
}

fn place(path: &Path, header: &[String], name: &str) -> Result<usize, PlanError> {
    let no_such = || PlanError::foreign(path, format!("no column {name:?} among {header:?}"));
    header.iter().position(|column| column == name).ok_or_else(no_such)
}

fn vm_place(path: &Path, header: &[String], wanted: Option<&Named>) -> Result<usize, PlanError> {
    match wanted {
        Some(named) => place(path, header, &named.name),
        None => {
            let found = header.iter().position(|name| VM_NAMES.contains(&name.as_str()));
            found.ok_or_else(|| {
                let reason = format!(
                    "no column for the machine among {header:?}: it would be one of {VM_NAMES:?}; \
                     name it with --vm-column"
                );
                PlanError::foreign(path, reason)
            })
        }
    }
}

/// The four columns of a series.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeriesColumns {
    pub vm: usize,
    pub time: Found<TimeUnit>,
    pub cpu: Found<CpuUnit>,
    pub memory: Found<MemoryUnit>,
}

impl SeriesColumns {
    pub(super) fn find(
        path: &Path,
        header: &[String],
        columns: &Columns,
    ) -> Result<Self, PlanError> {
        Ok(SeriesColumns {
            vm: vm_place(path, header, columns.vm.as_ref())?,
            time: TIME.find(path, header, columns.time.as_ref())?,
            cpu: CPU.find(path, header, columns.cpu.as_ref())?,
            memory: MEMORY.find(path, header, columns.memory.as_ref())?,
        })
    }
}

/// The columns of a table of promised amounts; one of the two is enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromisedColumns {
    pub vm: usize,
    pub cpu: Option<Found<CpuUnit>>,
    pub memory: Option<Found<MemoryUnit>>,
}

impl PromisedColumns {
    pub(super) fn find(
        path: &Path,
        header: &[String],
        columns: &Columns,
    ) -> Result<Self, PlanError> {
        let cpu = CPU_PROMISED.look(path, header, columns.cpu.as_ref())?;
        let memory = MEMORY_PROMISED.look(path, header, columns.memory.as_ref())?;
        if cpu.is_none() && memory.is_none() {
            let reason = format!("no column of {header:?} holds promised amounts");
            return Err(PlanError::foreign(path, reason));
        }
        Ok(PromisedColumns { vm: vm_place(path, header, columns.vm.as_ref())?, cpu, memory })
    }
}
