//! The meaning of a file's columns, and their units.
//!
//! A known name needs no flag, in small or large letters:
//!
//! | meaning | names, with their unit |
//! |---|---|
//! | machine | `vm`, `vm_id`, `id`, `machine`, `machine_id`, `host`, `hostname`, `instance` |
//! | time | `t` (steps), `time_s`, `time_ms`, `time_us`, `time_ns`; `timestamp`, `time`, `datetime`, `date`, `ts` (by their type, see `times`) |
//! | processors | `cpu`, `cpu_cores` (cores), `cpu_mhz`, `cpu_usage` (MHz), `cpu_percent`, `cpu_util_percent`, `cpu_c` (hundredths of a percent of a machine), `avg_cpu` (shares) |
//! | memory | `memory_bytes`, `memory_kib`, `memory_mib`, `memory_gib`, `mem_mib`, `memory_percent`, `mem_util_percent`, `mem_c` (hundredths of a percent), `avg_mem` (shares) |
//! | promised processors | `cpu_cap_mhz`, `cpu_capacity` (MHz) |
//! | promised memory | `mem_cap_kib`, `mem_capacity` (KiB) |
//!
//! Any other is named with its unit as `NAME:UNIT`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use super::Rows;
use super::times::Times;
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum TimeUnit {
    #[default]
    Steps,
    /// This many units to a second.
    PerSecond(f64),
    /// Told by the column's type or by the values, or refused.
    Unknown,
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
    names: &[
        ("t", "steps"),
        ("time_s", "s"),
        ("time_ms", "ms"),
        ("time_us", "us"),
        ("time_ns", "ns"),
        ("timestamp", "auto"),
        ("time", "auto"),
        ("datetime", "auto"),
        ("date", "auto"),
        ("ts", "auto"),
    ],
    units: &[
        ("steps", 1.0, TimeUnit::Steps),
        ("s", 1.0, TimeUnit::PerSecond(1.0)),
        ("ms", 1.0, TimeUnit::PerSecond(1e3)),
        ("us", 1.0, TimeUnit::PerSecond(1e6)),
        ("ns", 1.0, TimeUnit::PerSecond(1e9)),
        ("auto", 1.0, TimeUnit::Unknown),
    ],
};

const CPU_UNITS: &[(&str, f64, CpuUnit)] = &[
    ("cores", 1.0, CpuUnit::Cores),
    ("mhz", 1.0, CpuUnit::Mhz),
    ("share", 1.0, CpuUnit::Machines),
    ("percent", PERCENT, CpuUnit::Machines),
    ("hundredths", HUNDREDTH, CpuUnit::Machines),
];

const MEMORY_UNITS: &[(&str, f64, MemoryUnit)] = &[
    ("bytes", 1.0, MemoryUnit::Bytes),
    ("kib", 1024.0, MemoryUnit::Bytes),
    ("mib", 1_048_576.0, MemoryUnit::Bytes),
    ("gib", 1_073_741_824.0, MemoryUnit::Bytes),
    ("share", 1.0, MemoryUnit::Machines),
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
        ("cpu_util_percent", "percent"),
        ("avg_cpu", "share"),
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
        ("mem_util_percent", "percent"),
        ("avg_mem", "share"),
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

const VM_NAMES: [&str; 8] =
    ["vm", "vm_id", "id", "machine", "machine_id", "host", "hostname", "instance"];

impl<Unit: Copy> Kind<Unit> {
    /// Says that the column is missing, and how to name it.
    fn none(&self, path: &Path, header: &[String]) -> PlanError {
        let known: Vec<&str> = self.names.iter().map(|(name, _)| *name).collect();
        PlanError::foreign(
            path,
            format!(
                "no column for {} among {header:?}: it would be one of {known:?}; name it with {} \
                 NAME:UNIT",
                self.called, self.flag
            ),
        )
    }

    /// Returns None if no column was named and none has a usual name.
    fn look(
        &self,
        path: &Path,
        header: &[String],
        wanted: Option<&Named>,
    ) -> Result<Option<Found<Unit>>, PlanError> {
        let usual =
            |name: &str| self.names.iter().find(|(known, _)| name.eq_ignore_ascii_case(known));
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

fn vm_place(
    path: &Path,
    header: &[String],
    wanted: Option<&Named>,
) -> Result<Option<usize>, PlanError> {
    let is_usual = |name: &String| VM_NAMES.iter().any(|known| name.eq_ignore_ascii_case(known));
    match wanted {
        Some(named) => place(path, header, &named.name).map(Some),
        None => Ok(header.iter().position(is_usual)),
    }
}

fn no_vm(path: &Path, header: &[String]) -> PlanError {
    let reason = format!(
        "no column for the machine among {header:?}: it would be one of {VM_NAMES:?}; name it with \
         --vm-column"
    );
    PlanError::foreign(path, reason)
}

/// The columns of a series. One of processors and memory is enough. A file without a machine
/// column is one machine, and only such a file may leave out the time: its rows are steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeriesColumns {
    pub vm: Option<usize>,
    pub time: Option<Found<TimeUnit>>,
    pub cpu: Option<Found<CpuUnit>>,
    pub memory: Option<Found<MemoryUnit>>,
}

impl SeriesColumns {
    pub(super) fn find(
        path: &Path,
        header: &[String],
        columns: &Columns,
    ) -> Result<Self, PlanError> {
        let found = SeriesColumns {
            vm: vm_place(path, header, columns.vm.as_ref())?,
            time: TIME.look(path, header, columns.time.as_ref())?,
            cpu: CPU.look(path, header, columns.cpu.as_ref())?,
            memory: MEMORY.look(path, header, columns.memory.as_ref())?,
        };
        if found.cpu.is_none() && found.memory.is_none() {
            let reason = format!(
                "no column for memory or processors among {header:?}; name the columns with \
                 --memory-column NAME:UNIT, --cpu-column, --time-column and --vm-column"
            );
            return Err(PlanError::foreign(path, reason));
        }
        match (found.vm, found.time) {
            (Some(_), None) => Err(TIME.none(path, header)),
            _ => Ok(found),
        }
    }

    /// Returns rows of these units, still without a sample.
    pub(super) fn rows(&self, path: &Path) -> Rows {
        let whole = path.file_stem().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Rows {
            names: if self.vm.is_none() { vec![whole] } else { Vec::new() },
            is_nameless: self.vm.is_none(),
            units: (TimeUnit::Steps, self.cpu.map(|it| it.unit), self.memory.map(|it| it.unit)),
            ..Rows::default()
        }
    }

    /// Adds the times to rows that have all else.
    pub(super) fn finish(
        &self,
        path: &Path,
        header: &[String],
        mut rows: Rows,
        times: Times,
    ) -> Result<Rows, PlanError> {
        let named = self.time.map_or("", |time| header[time.at].as_str());
        let (unit, time) = times.finish().map_err(|why| {
            let remedy = format!("name their unit with --time-column {named}:UNIT (s, ms, us, ns)");
            PlanError::foreign(path, format!("column {named:?}: {why}; {remedy}"))
        })?;
        (rows.units.0, rows.time) = (unit, time);
        Ok(rows)
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
        let vm = vm_place(path, header, columns.vm.as_ref())?;
        Ok(PromisedColumns { vm: vm.ok_or_else(|| no_vm(path, header))?, cpu, memory })
    }
}
