//! The server that machines are packed into, as a TOML file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::data::{Check, parse};
use crate::utilisation::{CpuUnit, MemoryUnit, Utilisation};

const GIB: f64 = farpool_units::GIB as f64;

/// One kind of server. Processors and memory are in the unit of the series, or in one convertible
/// to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub name: String,
    pub cpu_ghz: Option<f64>,
    pub cpu_cores: Option<f64>,
    /// For series that hold shares of a machine: the number of such machines that the server
    /// equals.
    pub cpu_machines: Option<f64>,
    pub memory_gib: Option<f64>,
    pub memory_machines: Option<f64>,
    /// Price of a server without far memory.
    pub price_dollars: Option<f64>,
    /// Price of a GiB of far memory, with its share of blade and switch.
    pub far_price_dollars_per_gib: Option<f64>,
    pub source: Option<String>,
    pub date: Option<String>,
}

impl Server {
    /// Parses and checks a file's text.
    ///
    /// # Errors
    /// It is not TOML, or a value is missing, zero, negative or no number; with file, key and
    /// reason.
    pub fn parse(path: &Path, text: &str) -> Result<Server, PlanError> {
        let server: Server = parse(path, text)?;
        let check = Check::new(path);
        let sizes = [
            ("cpu_ghz", server.cpu_ghz),
            ("cpu_cores", server.cpu_cores),
            ("cpu_machines", server.cpu_machines),
            ("memory_gib", server.memory_gib),
            ("memory_machines", server.memory_machines),
        ];
        for (key, size) in sizes {
            size.map_or(Ok(()), |size| check.positive(key, size))?;
        }
        check.not_negative_if("price_dollars", server.price_dollars)?;
        check.not_negative_if("far_price_dollars_per_gib", server.far_price_dollars_per_gib)?;
        Ok(server)
    }

    /// Returns the machine that the series' shares refer to.
    pub fn machine() -> Server {
        let (name, one) = ("the machine of the series".to_owned(), Some(1.0));
        Server { name, cpu_machines: one, memory_machines: one, ..Server::default() }
    }

    /// Returns processors and memory in the units of the series.
    pub(super) fn capacity(&self, of: &Utilisation) -> Result<(f64, f64), PlanError> {
        let (cpu, key) = match of.cpu_unit {
            CpuUnit::Mhz => (self.cpu_ghz.map(|ghz| ghz * 1000.0), "cpu_ghz"),
            CpuUnit::Cores => (self.cpu_cores, "cpu_cores"),
            CpuUnit::Machines => (self.cpu_machines, "cpu_machines"),
        };
        let (memory, memory_key) = match of.memory_unit {
            MemoryUnit::Bytes => (self.memory_gib.map(|gib| gib * GIB), "memory_gib"),
            MemoryUnit::Machines => (self.memory_machines, "memory_machines"),
        };
        let missing = |key: &str| {
            let name = &self.name;
            PlanError::Question(format!("the server {name:?} has no {key}, which the series needs"))
        };
        // Without processors in the series, any amount of them is enough.
        let cpu = if of.has_cpu { cpu } else { Some(1.0) };
        Ok((cpu.ok_or_else(|| missing(key))?, memory.ok_or_else(|| missing(memory_key))?))
    }
}
