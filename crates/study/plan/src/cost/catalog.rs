//! Catalogs: what can be bought, with prices, powers, dates and sources.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::data::{Check, parse};

/// Catalogs that ship with the program, by name.
pub const PRESETS: [(&str, &str); 2] = [
    ("lim-2010", include_str!("../../data/cost/lim-2010.toml")),
    ("present", include_str!("../../data/cost/present.toml")),
];

/// The text of a catalog that ships with the program.
pub fn preset(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Returns the latest price of memory in the catalog `present` that was paid and not merely
/// expected.
///
/// # Panics
/// Never with the catalog that ships; a test reads it.
pub fn latest_memory() -> Memory {
    let text = preset("present").expect("it ships");
    let catalog = Catalog::parse(Path::new("present"), text).expect("it is tested");
    let mut paid = catalog.memories.into_iter().filter(|memory| !memory.is_expected);
    paid.next_back().expect("it has prices")
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    pub name: String,
    pub title: String,
    pub date: String,
    pub source: String,
    /// The server that the others are compared with.
    pub baseline: Option<String>,
    pub model: Option<Model>,
    #[serde(default, rename = "server")]
    pub servers: Vec<Server>,
    #[serde(default, rename = "workload")]
    pub workloads: Vec<Workload>,
    pub far_memory: Option<FarMemory>,
    #[serde(default, rename = "memory")]
    pub memories: Vec<Memory>,
    /// Other known figures, in words.
    #[serde(default, rename = "figure")]
    pub figures: Vec<Figure>,
}

/// The cost of running a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Power drawn over the largest power.
    pub activity_factor: f64,
    /// Amortised power delivery, over electricity.
    pub k1: f64,
    /// Electricity for cooling, over that for servers.
    pub l1: f64,
    /// Amortised cooling equipment, over electricity for cooling.
    pub k2: f64,
    pub dollars_per_kwh: f64,
    /// A server's lifetime.
    pub hours: f64,
    pub servers_per_rack: u32,
    pub rack_dollars: f64,
    pub rack_power_w: f64,
    /// True if power and cooling include the rack's power.
    pub count_rack_power: bool,
    pub date: String,
    pub source: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub name: String,
    #[serde(default)]
    pub similar_to: String,
    pub date: String,
    pub source: String,
    pub components: Vec<Component>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    pub name: String,
    pub dollars: f64,
    pub power_w: f64,
}

/// Each server's speed at a workload; only ratios count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    pub name: String,
    pub performance: BTreeMap<String, f64>,
}

/// Servers that share a memory blade, against the same servers with all memory local.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FarMemory {
    pub servers: u32,
    /// Memory of a server without a blade.
    pub baseline_gib: f64,
    /// Memory of a server with a blade.
    pub local_gib: f64,
    /// Memory of the blade, for all servers.
    pub far_gib: f64,
    /// Price of the blade's memory, relative to the servers'.
    pub far_price_ratio: f64,
    /// Performance with the blade, relative to without.
    pub performance: f64,
    pub date: String,
    pub source: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    pub name: String,
    pub dollars_per_gib: f64,
    /// A forecast.
    #[serde(default)]
    pub is_expected: bool,
    pub date: String,
    pub source: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub name: String,
    pub value: String,
    pub date: String,
    pub source: String,
}

impl Server {
    pub fn dollars(&self) -> f64 {
        self.components.iter().map(|component| component.dollars).sum()
    }

    pub fn power_w(&self) -> f64 {
        self.components.iter().map(|component| component.power_w).sum()
    }
}

impl Catalog {
    /// Parses and checks a file's text.
    ///
    /// # Errors
    /// It is not TOML, a key is missing or unknown, or a value is invalid; with file, key and
    /// reason.
    pub fn parse(path: &Path, text: &str) -> Result<Catalog, PlanError> {
        let catalog: Catalog = parse(path, text)?;
        let check = Check::new(path);
        if let Some(model) = &catalog.model {
            check_model(check, model)?;
        }
        for (at, server) in catalog.servers.iter().enumerate() {
            check_server(check, server)?;
            if catalog.servers[..at].iter().any(|other| other.name == server.name) {
                return Err(check.wrong("server", format!("{} occurs twice", server.name)));
            }
        }
        catalog.check_names(check)?;
        for memory in &catalog.memories {
            let key = format!("memory {:?}, dollars_per_gib", memory.name);
            check.positive(&key, memory.dollars_per_gib)?;
        }
        if let Some(far) = &catalog.far_memory {
            check_far(check, far)?;
        }
        let dated =
            catalog.memories.iter().map(|memory| (&memory.name, &memory.date, &memory.source));
        let dated = dated.chain(catalog.servers.iter().map(|s| (&s.name, &s.date, &s.source)));
        for (name, date, source) in dated {
            if date.is_empty() || source.is_empty() {
                return Err(check.wrong(name, "a price needs a date and a source"));
            }
        }
        Ok(catalog)
    }

    fn check_names(&self, check: Check<'_>) -> Result<(), PlanError> {
        let is_known = |name: &String| self.servers.iter().any(|server| server.name == *name);
        if let Some(baseline) = self.baseline.as_ref().filter(|name| !is_known(name)) {
            return Err(check.wrong("baseline", format!("there is no server {baseline}")));
        }
        if !self.servers.is_empty() && self.model.is_none() {
            return Err(check.wrong("model", "servers have no bill without it"));
        }
        for workload in &self.workloads {
            for (server, performance) in &workload.performance {
                let key = format!("workload {:?}, performance, {server}", workload.name);
                check.positive(&key, *performance)?;
                if !is_known(server) {
                    return Err(check.wrong(&key, "there is no such server"));
                }
            }
        }
        Ok(())
    }
}

fn check_model(check: Check<'_>, model: &Model) -> Result<(), PlanError> {
    check.share("model.activity_factor", model.activity_factor)?;
    let factors = [("k1", model.k1), ("l1", model.l1), ("k2", model.k2)];
    let prices = [
        ("dollars_per_kwh", model.dollars_per_kwh),
        ("rack_dollars", model.rack_dollars),
        ("rack_power_w", model.rack_power_w),
    ];
    for (key, value) in factors.into_iter().chain(prices) {
        check.not_negative(&format!("model.{key}"), value)?;
    }
    check.positive("model.hours", model.hours)?;
    check.positive("model.servers_per_rack", f64::from(model.servers_per_rack))
}

fn check_server(check: Check<'_>, server: &Server) -> Result<(), PlanError> {
    if server.components.is_empty() {
        return Err(check.wrong(&server.name, "it has no components"));
    }
    for component in &server.components {
        let key = |what: &str| format!("server {:?}, {:?}, {what}", server.name, component.name);
        check.not_negative(&key("dollars"), component.dollars)?;
        check.not_negative(&key("power_w"), component.power_w)?;
    }
    check.positive(&format!("server {:?}, dollars in all", server.name), server.dollars())?;
    check.positive(&format!("server {:?}, power_w in all", server.name), server.power_w())
}

fn check_far(check: Check<'_>, far: &FarMemory) -> Result<(), PlanError> {
    check.positive("far_memory.servers", f64::from(far.servers))?;
    check.positive("far_memory.baseline_gib", far.baseline_gib)?;
    check.not_negative("far_memory.local_gib", far.local_gib)?;
    check.positive("far_memory.far_gib", far.far_gib)?;
    check.positive("far_memory.far_price_ratio", far.far_price_ratio)?;
    check.positive("far_memory.performance", far.performance)?;
    match far.local_gib < far.baseline_gib {
        true => Ok(()),
        false => Err(check.wrong("far_memory.local_gib", "not less than without a blade")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ships_can_be_read() {
        for (name, text) in PRESETS {
            let catalog = Catalog::parse(Path::new(name), text).expect(name);
            assert_eq!(catalog.name, name);
        }
        assert_eq!(latest_memory().date, "2025-Q4");
    }

    #[test]
    fn figures_that_cannot_be_are_refused_with_their_key() {
        let good = preset("lim-2010").expect("it ships");
        let cases = [
            ("dollars = 1700.0", "dollars = -1700.0", "\"CPU\", dollars: -1700 is below zero"),
            ("power_w = 135.0", "power_w = 0.0", "\"desk\", power_w in all: 0 is not above zero"),
            ("baseline_gib = 4.0", "baseline_gib = 0.0", "far_memory.baseline_gib"),
            ("servers_per_rack = 40", "servers_per_rack = 0", "model.servers_per_rack"),
            ("dollars_per_gib = 15.0", "dollars_per_gib = nan", "dollars_per_gib"),
            ("hours = 26298.0\n", "", "missing field `hours`"),
            ("activity_factor = 0.75", "activity_factor = 1.75", "model.activity_factor"),
            ("baseline = \"srvr1\"", "baseline = \"srvr9\"", "no server srvr9"),
            ("name = \"srvr2\"", "name = \"srvr1\"", "twice"),
            ("k1 = 1.33", "k1 = 1.33\nk9 = 2", "unknown field `k9`"),
            ("emb2 = 0.05", "emb3 = 0.05", "no such server"),
        ];
        for (from, to, reason) in cases {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from} is in it");
            let error = Catalog::parse(Path::new("my.toml"), &text).expect_err(reason).to_string();
            assert!(error.starts_with("my.toml: ") && error.contains(reason), "{error}");
        }
    }
}
