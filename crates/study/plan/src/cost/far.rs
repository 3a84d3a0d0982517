//! What a memory blade may cost, after Lim's Figure 8: performance per dollar of memory against the
//! price of everything around the blade's memory, and the price at which the gain is zero.

use serde::Serialize;

use super::{FarMemory, Memory};

/// Where a blade stops paying, at one price of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BreakEven {
    pub memory: String,
    pub date: String,
    pub dollars_per_gib: f64,
    /// All memory of all servers without a blade.
    pub baseline_dollars: f64,
    /// Memory left in the servers, and the blade's memory.
    pub local_dollars: f64,
    pub far_dollars: f64,
    /// The most that blade, switch and ports may cost for all servers; below zero no price is low
    /// enough.
    pub budget_dollars: f64,
    pub budget_per_server_dollars: f64,
    /// The budget relative to the price of the blade's memory.
    pub overhead: f64,
}

/// A point of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Improvement {
    /// Price of blade, switch and ports, relative to the blade's memory.
    pub overhead: f64,
    /// Performance per dollar of memory, relative to without a blade, less 1.
    pub gain: f64,
}

impl FarMemory {
    pub fn break_even(&self, memory: &Memory) -> BreakEven {
        let servers = f64::from(self.servers);
        let price = memory.dollars_per_gib;
        let baseline_dollars = servers * self.baseline_gib * price;
        let local_dollars = servers * self.local_gib * price;
        let far_dollars = self.far_gib * price * self.far_price_ratio;
        let budget_dollars = baseline_dollars * self.performance - local_dollars - far_dollars;
        BreakEven {
            memory: memory.name.clone(),
            date: memory.date.clone(),
            dollars_per_gib: price,
            baseline_dollars,
            local_dollars,
            far_dollars,
            budget_dollars,
            budget_per_server_dollars: budget_dollars / servers,
            overhead: budget_dollars / far_dollars,
        }
    }

    /// Returns the gains from no overhead to `most`, in `steps` equal steps. The price of memory
    /// cancels out.
    pub fn sweep(&self, most: f64, steps: u32) -> Vec<Improvement> {
        let servers = f64::from(self.servers);
        let baseline = servers * self.baseline_gib;
        let gain = |overhead: f64| {
            let far = self.far_gib * self.far_price_ratio * (1.0 + overhead);
            self.performance * baseline / (servers * self.local_gib + far) - 1.0
        };
        (0..=steps)
            .map(|step| most * f64::from(step) / f64::from(steps.max(1)))
            .map(|overhead| Improvement { overhead, gain: gain(overhead) })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_gained_where_it_breaks_even() {
        let far = FarMemory {
            servers: 16,
            baseline_gib: 4.0,
            local_gib: 1.5,
            far_gib: 32.0,
            far_price_ratio: 0.76,
            performance: 0.95,
            ..FarMemory::default()
        };
        let memory = Memory { dollars_per_gib: 15.0, ..Memory::default() };
        let even = far.break_even(&memory);
        // 16 x 4 x 15 x 0.95 = 912, less 16 x 1.5 x 15 = 360, less 32 x 15 x 0.76 = 364.8.
        assert!((even.budget_dollars - 187.2).abs() < 1e-9, "{even:?}");
        let at = far.sweep(even.overhead, 1)[1];
        assert!(at.gain.abs() < 1e-12, "{at:?}");
        assert!(far.sweep(1.0, 4).windows(2).all(|pair| pair[1].gain < pair[0].gain));
    }
}
