//! Servers of many stacks of memory with small cores under each: how many stacks fit, their power,
//! capacity and throughput.
//!
//! ```text
//! budget      = (supply - other) * (1 - margin)
//! stack       = cores * core + network + port + max(floor, memory per GB/s * GB/s)
//! stacks      = least of: ports, board share * board / (package of stack + package of port),
//!               budget / stack
//! power       = other + stacks * stack / (1 - margin)
//! ```
//!
//! With a switch on the board a cluster of stacks shares one port: ports, area and power are then
//! counted by cluster. All figures are in a [`Catalog`], a TOML file; the one that ships marks
//! those that its thesis does not print.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::data::{Check, parse};

const CM2_PER_SQUARE_INCH: f64 = 6.4516;
/// So that 11.9999999999 clusters, which are 12 but for rounding, do not become 11.
const ROUNDING: f64 = 1e-9;

/// The catalog that ships with the program.
pub const GUTIERREZ: (&str, &str) =
    ("gutierrez-2015", include_str!("../data/dense/gutierrez-2015.toml"));

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    pub name: String,
    pub title: String,
    pub date: String,
    pub source: String,
    pub server: Server,
    pub package: Package,
    pub port: Port,
    #[serde(rename = "design")]
    pub designs: Vec<Design>,
}

/// The server that a design is built into.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// Height, in rack units.
    pub units: f64,
    pub supply_w: f64,
    pub other_w: f64,
    pub margin: f64,
    pub ports_max: u32,
    /// One side of the square board.
    pub board_inch: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    pub stack_cm2: f64,
    pub port_cm2: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    pub power_w: f64,
}

/// A switch on the board.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    pub cm2: f64,
    pub power_w: f64,
    /// Cores that share the switch and its one port.
    pub cores: u32,
}

/// A kind of stack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Design {
    pub name: String,
    pub title: String,
    /// Share of the board that is available for stacks and ports.
    pub board_share: f64,
    pub memory: String,
    pub memory_gb: f64,
    pub memory_w_per_gbs: f64,
    /// The least power that the memory draws.
    #[serde(default)]
    pub unlisted_memory_floor_w: f64,
    pub core: String,
    pub core_w: f64,
    #[serde(default)]
    pub unlisted_core_mw: f64,
    /// The network interface on the stack.
    pub network_w: f64,
    #[serde(default)]
    pub unlisted_stack_w: f64,
    pub requests_per_core_s: Option<f64>,
    pub request: Option<String>,
    pub switch: Option<Switch>,
    pub configurations: Vec<Configuration>,
}

/// A stack with a number of cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    pub cores: u32,
    /// The largest bandwidth to the stack's memory.
    pub gbs_per_stack: f64,
    #[serde(default)]
    pub unlisted_w: f64,
    #[serde(default = "yes")]
    pub has_switch: bool,
}

fn yes() -> bool {
    true
}

/// What limits the number of stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    Ports,
    Area,
    Power,
}

/// A server full of stacks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Built {
    pub design: String,
    pub cores_per_stack: u32,
    pub stacks: u32,
    pub switches: u32,
    pub ports: u32,
    pub cores: u32,
    pub limit: Limit,
    pub area_cm2: f64,
    pub stack_w: f64,
    pub power_w: f64,
    pub memory_gb: f64,
    pub bandwidth_gbs: f64,
    pub requests_per_s: Option<f64>,
    pub requests_per_j: Option<f64>,
    pub requests_per_s_gb: Option<f64>,
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
        let (server, package) = (&catalog.server, &catalog.package);
        check.positive("server.units", server.units)?;
        check.positive("server.supply_w", server.supply_w)?;
        check.not_negative("server.other_w", server.other_w)?;
        check.share("server.margin", server.margin)?;
        check.positive("server.ports_max", f64::from(server.ports_max))?;
        check.positive("server.board_inch", server.board_inch)?;
        check.positive("package.stack_cm2", package.stack_cm2)?;
        check.not_negative("package.port_cm2", package.port_cm2)?;
        check.not_negative("port.power_w", catalog.port.power_w)?;
        if server.supply_w <= server.other_w || server.margin >= 1.0 {
            return Err(check.wrong("server.supply_w", "nothing is left for stacks"));
        }
        if catalog.designs.is_empty() {
            return Err(check.wrong("design", "there is none"));
        }
        catalog.designs.iter().try_for_each(|design| check_design(check, design))?;
        Ok(catalog)
    }

    /// Returns the design of this name.
    pub fn design(&self, name: &str) -> Option<&Design> {
        self.designs.iter().find(|design| design.name == name)
    }

    /// Returns a stack's power at a bandwidth, with its port if it has its own.
    pub fn stack_w(&self, design: &Design, with: &Configuration, gbs: f64, floor_w: f64) -> f64 {
        let core_w = design.core_w + design.unlisted_core_mw / 1000.0;
        let port_w = if switch_of(design, with).is_some() { 0.0 } else { self.port.power_w };
        let memory_w = (design.memory_w_per_gbs * gbs).max(floor_w);
        let rest_w = design.network_w + design.unlisted_stack_w + with.unlisted_w;
        f64::from(with.cores) * core_w + rest_w + port_w + memory_w
    }

    /// Returns a server's power when its stacks and switches draw `inside_w`.
    pub fn power_w(&self, inside_w: f64) -> f64 {
        self.server.other_w + inside_w / (1.0 - self.server.margin)
    }

    /// Fills a server with stacks, each at its largest bandwidth.
    pub fn build(&self, design: &Design, with: &Configuration) -> Built {
        let server = &self.server;
        let stack_w =
            self.stack_w(design, with, with.gbs_per_stack, design.unlisted_memory_floor_w);
        let switch = switch_of(design, with);
        let (in_cluster, switch_cm2, switch_w) = match switch {
            Some(switch) => {
                (switch.cores / with.cores, switch.cm2, switch.power_w + self.port.power_w)
            }
            None => (1, 0.0, 0.0),
        };
        let stacks = f64::from(in_cluster);
        let cluster_cm2 = stacks * self.package.stack_cm2 + switch_cm2 + self.package.port_cm2;
        let cluster_w = stacks * stack_w + switch_w;
        let board_cm2 = design.board_share * server.board_inch.powi(2) * CM2_PER_SQUARE_INCH;
        let budget_w = (server.supply_w - server.other_w) * (1.0 - server.margin);
        let limits = [
            (server.ports_max, Limit::Ports),
            (whole(board_cm2 / cluster_cm2), Limit::Area),
            (whole(budget_w / cluster_w), Limit::Power),
        ];
        let least = limits.into_iter().min_by_key(|(clusters, _)| *clusters);
        let (clusters, limit) = least.expect("there are three");
        let (stacks, cores) = (clusters * in_cluster, clusters * in_cluster * with.cores);
        let power_w = self.power_w(f64::from(clusters) * cluster_w);
        let memory_gb = f64::from(stacks) * design.memory_gb;
        let requests_per_s = design.requests_per_core_s.map(|each| each * f64::from(cores));
        Built {
            design: design.name.clone(),
            cores_per_stack: with.cores,
            stacks,
            switches: if switch.is_some() { clusters } else { 0 },
            ports: clusters,
            cores,
            limit,
            area_cm2: f64::from(clusters) * cluster_cm2,
            stack_w,
            power_w,
            memory_gb,
            bandwidth_gbs: f64::from(stacks) * with.gbs_per_stack,
            requests_per_s,
            requests_per_j: requests_per_s.map(|requests| requests / power_w),
            requests_per_s_gb: requests_per_s.filter(|_| stacks > 0).map(|r| r / memory_gb),
        }
    }

    /// Builds every design with every number of cores, or only the design `only`.
    pub fn build_all(&self, only: Option<&str>) -> Vec<Built> {
        let designs = self.designs.iter().filter(|design| only.is_none_or(|o| o == design.name));
        let all = designs.flat_map(|design| {
            design.configurations.iter().map(move |with| self.build(design, with))
        });
        all.collect()
    }
}

fn switch_of<'a>(design: &'a Design, with: &Configuration) -> Option<&'a Switch> {
    design.switch.as_ref().filter(|_| with.has_switch)
}

/// Returns the number of whole units that fit.
fn whole(fit: f64) -> u32 {
    let fit = (fit + ROUNDING).floor().clamp(0.0, f64::from(u32::MAX / 4096));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within the bounds
    let whole = fit as u32;
    whole
}

fn check_design(check: Check<'_>, design: &Design) -> Result<(), PlanError> {
    let key = |what: &str| format!("design {:?}, {what}", design.name);
    check.share(&key("board_share"), design.board_share)?;
    check.positive(&key("memory_gb"), design.memory_gb)?;
    check.not_negative(&key("memory_w_per_gbs"), design.memory_w_per_gbs)?;
    check.not_negative(&key("unlisted_memory_floor_w"), design.unlisted_memory_floor_w)?;
    check.positive(&key("core_w"), design.core_w)?;
    check.not_negative(&key("network_w"), design.network_w)?;
    check.not_negative_if(&key("requests_per_core_s"), design.requests_per_core_s)?;
    if let Some(switch) = &design.switch {
        check.not_negative(&key("switch.cm2"), switch.cm2)?;
        check.not_negative(&key("switch.power_w"), switch.power_w)?;
    }
    for with in &design.configurations {
        let key = |what: &str| key(&format!("{} cores, {what}", with.cores));
        check.positive(&key("cores"), f64::from(with.cores))?;
        if with.cores > 4096 {
            return Err(check.wrong(&key("cores"), "more than 4,096 under one stack"));
        }
        check.not_negative(&key("gbs_per_stack"), with.gbs_per_stack)?;
        if let Some(switch) = switch_of(design, with).filter(|switch| switch.cores < with.cores) {
            let reason = format!("more than the {} of a switch", switch.cores);
            return Err(check.wrong(&key("cores"), reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog() -> Catalog {
        Catalog::parse(Path::new(GUTIERREZ.0), GUTIERREZ.1).expect("it ships")
    }

    #[test]
    fn the_least_of_ports_area_and_power_decides() {
        let mut catalog = catalog();
        let design = catalog.design("mercury-a7").expect("there").clone();
        let with = design.configurations[0].clone();
        let built = catalog.build(&design, &with);
        assert_eq!((built.stacks, built.limit), (96, Limit::Ports));
        catalog.server.ports_max = 1000;
        let built = catalog.build(&design, &with);
        // 0.77 x 13 x 13 square inches over 6.615 cm2; the thesis says 128.
        assert_eq!((built.stacks, built.limit), (126, Limit::Area));
        catalog.server.supply_w = 161.0;
        assert_eq!(catalog.build(&design, &with).limit, Limit::Power);
    }

    #[test]
    fn figures_that_cannot_be_are_refused_with_their_key() {
        let cases = [
            (
                "memory_gb = 4.0",
                "memory_gb = 0.0",
                "\"mercury-a7\", memory_gb: 0 is not above zero",
            ),
            ("core_w = 0.1", "core_w = -0.1", "core_w"),
            ("supply_w = 750.0", "supply_w = 100.0", "nothing is left"),
            ("{ cores = 1,", "{ cores = 0,", "cores"),
            ("stack_cm2 = 4.41\n", "", "missing field `stack_cm2`"),
            ("cores = 24", "cores = 1", "more than the 1 of a switch"),
        ];
        for (from, to, reason) in cases {
            let text = GUTIERREZ.1.replacen(from, to, 1);
            assert_ne!(text, GUTIERREZ.1, "{from} is in it");
            let error = Catalog::parse(Path::new("my.toml"), &text).expect_err(reason).to_string();
            assert!(error.starts_with("my.toml: ") && error.contains(reason), "{error}");
        }
    }
}
