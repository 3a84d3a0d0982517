//! What a node's own programs use, over time.

use std::time::Duration;

use farpool_units::exactly;

use crate::classify::MemoryUse;
use crate::rng::Rng;

/// A node's memory use: a level, a slow wave and noise added to it, and programs that start or end.
#[derive(Clone, Debug)]
pub struct Load {
    /// The node's memory.
    pub total_bytes: u64,
    /// The level, thousandths of the memory; it may exceed 1,000.
    pub level_permille: u64,
    /// Largest noise above the level, thousandths.
    pub noise_permille: u64,
    /// Height of a triangle wave above the level, thousandths, and its period ("diurnal").
    pub wave: Option<(u64, Duration)>,
    /// New levels from given times on, ascending.
    pub steps: Vec<(Duration, u64)>,
}

impl Load {
    /// Creates a load with the same level forever.
    #[must_use]
    pub fn steady(total_bytes: u64, level_permille: u64) -> Self {
        Self { total_bytes, level_permille, noise_permille: 0, wave: None, steps: Vec::new() }
    }

    /// Adds a new level from `at` on.
    #[must_use]
    pub fn then(mut self, at: Duration, level_permille: u64) -> Self {
        self.steps.push((at, level_permille));
        self
    }

    /// Returns the use at `now`.
    pub fn at(&self, now: Duration, rng: &mut Rng) -> MemoryUse {
        let step = self.steps.iter().rev().find(|(at, _)| *at <= now);
        let mut permille = step.map_or(self.level_permille, |(_, level)| *level);
        if let Some((height, period)) = self.wave {
            let period_ms = period.as_millis().max(2);
            let phase = now.as_millis() % period_ms;
            let rise = phase.min(period_ms - phase) * 2;
            permille += exactly::<u64, _>(u128::from(height) * rise / period_ms);
        }
        permille += rng.below(self.noise_permille + 1);
        MemoryUse {
            used_bytes: self.total_bytes / 1000 * permille,
            total_bytes: self.total_bytes,
            pressure_permille: None,
        }
    }
}
