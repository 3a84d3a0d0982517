//! What servers cost to buy and to run, and what far memory may cost.
//!
//! Lim's model (thesis, section 6.3.2), after Patel and others:
//!
//! ```text
//! infrastructure   = price of all components + rack price / servers of a rack
//! burden           = 1 + K1 + L1 + K2 * L1
//! power cooling    = burden * power * activity factor * hours * price of electricity
//! total            = infrastructure + power cooling
//! ```
//!
//! All figures are in a [`Catalog`], a TOML file where each has a date and a source; this module
//! has only the formulas.

mod catalog;
mod far;

use serde::Serialize;

pub use catalog::{
    Catalog, Component, FarMemory, Figure, Memory, Model, PRESETS, Server, Workload, latest_memory,
    preset,
};
pub use far::{BreakEven, Improvement};

/// One server's bill.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bill {
    pub server: String,
    pub power_w: f64,
    /// Components only.
    pub server_dollars: f64,
    /// With the server's share of the rack.
    pub infrastructure_dollars: f64,
    pub power_cooling_dollars: f64,
    pub total_dollars: f64,
}

/// A server's performance per cost, relative to the baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Efficiency {
    pub workload: String,
    pub server: String,
    pub performance: f64,
    pub per_infrastructure: f64,
    pub per_watt: f64,
    pub per_total: f64,
}

/// The name of the row that sums up all workloads.
pub const HARMONIC_MEAN: &str = "harmonic mean";

impl Model {
    /// Returns the cost of electricity with power delivery, cooling and their capital, relative to
    /// the electricity alone.
    pub fn burden(&self) -> f64 {
        1.0 + self.k1 + self.l1 + self.k2 * self.l1
    }

    /// Returns the cost of power and cooling over the lifetime, for a power at the plug.
    pub fn power_cooling_dollars(&self, power_w: f64) -> f64 {
        let kwh = power_w * self.activity_factor * self.hours / 1000.0;
        self.burden() * kwh * self.dollars_per_kwh
    }

    /// Returns a server's share of the rack's price.
    pub fn rack_share_dollars(&self) -> f64 {
        self.rack_dollars / f64::from(self.servers_per_rack)
    }

    /// Returns a server's share of the rack's power.
    pub fn rack_share_w(&self) -> f64 {
        self.rack_power_w / f64::from(self.servers_per_rack)
    }

    pub fn bill(&self, server: &Server) -> Bill {
        let server_dollars = server.dollars();
        let infrastructure_dollars = server_dollars + self.rack_share_dollars();
        let rack_w = if self.count_rack_power { self.rack_share_w() } else { 0.0 };
        let power_cooling_dollars = self.power_cooling_dollars(server.power_w() + rack_w);
        Bill {
            server: server.name.clone(),
            power_w: server.power_w(),
            server_dollars,
            infrastructure_dollars,
            power_cooling_dollars,
            total_dollars: infrastructure_dollars + power_cooling_dollars,
        }
    }
}

impl Catalog {
    /// Returns every server's bill; none for a catalog without a model.
    pub fn bills(&self) -> Vec<Bill> {
        let bill = |model: &Model| self.servers.iter().map(|server| model.bill(server)).collect();
        self.model.as_ref().map(bill).unwrap_or_default()
    }

    /// Returns every server's efficiency under every workload and their harmonic mean, relative to
    /// the baseline.
    pub fn efficiencies(&self) -> Vec<Efficiency> {
        let bills = self.bills();
        let base = self.baseline.as_ref().and_then(|name| bills.iter().find(|b| b.server == *name));
        let Some(base) = base else { return Vec::new() };
        let row = |workload: &str, bill: &Bill, performance: f64| Efficiency {
            workload: workload.to_owned(),
            server: bill.server.clone(),
            performance,
            per_infrastructure: performance * base.infrastructure_dollars
                / bill.infrastructure_dollars,
            per_watt: performance * base.power_w / bill.power_w,
            per_total: performance * base.total_dollars / bill.total_dollars,
        };
        let mut rows = Vec::new();
        for workload in &self.workloads {
            let ours = workload.performance.get(&base.server).copied().unwrap_or(1.0);
            for bill in &bills {
                if let Some(performance) = workload.performance.get(&bill.server) {
                    rows.push(row(&workload.name, bill, performance / ours));
                }
            }
        }
        for bill in &bills {
            let mine = rows.iter().filter(|row| row.server == bill.server);
            let all: Vec<f64> = mine.map(|row| row.performance).collect();
            if all.len() == self.workloads.len() && !all.is_empty() {
                rows.push(row(HARMONIC_MEAN, bill, harmonic_mean(&all)));
            }
        }
        rows
    }
}

/// Returns the harmonic mean: the mean of speeds over equal work.
pub fn harmonic_mean(values: &[f64]) -> f64 {
    #[allow(clippy::cast_precision_loss)] // of a few values
    let count = values.len() as f64;
    count / values.iter().map(|value| 1.0 / value).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bill_is_what_the_formulas_say() {
        let model = Model {
            activity_factor: 0.5,
            k1: 1.0,
            l1: 0.5,
            k2: 1.0,
            dollars_per_kwh: 0.2,
            hours: 1000.0,
            servers_per_rack: 10,
            rack_dollars: 100.0,
            rack_power_w: 20.0,
            count_rack_power: true,
            ..Model::default()
        };
        let part = |dollars, power_w| Component { name: "part".into(), dollars, power_w };
        let server =
            Server { components: vec![part(200.0, 80.0), part(50.0, 18.0)], ..Server::default() };
        let bill = model.bill(&server);
        assert_eq!((bill.server_dollars, bill.infrastructure_dollars), (250.0, 260.0));
        // (98 + 2) W at half activity for 1000 h are 50 kWh, $10, three times over.
        assert!((bill.power_cooling_dollars - 30.0).abs() < 1e-9, "{bill:?}");
        assert!((bill.total_dollars - 290.0).abs() < 1e-9, "{bill:?}");
    }

    #[test]
    fn the_slowest_counts_most_in_a_harmonic_mean() {
        assert!((harmonic_mean(&[1.0, 0.5]) - 2.0 / 3.0).abs() < 1e-12);
    }
}
