//! The highest rate that meets a limit on latency: doubled until the limit breaks, then bisected.
//! Pure.

/// The final ratio of the first rate that broke to the last that held.
const NEAR: f64 = 1.03;

/// A search for the highest rate. [`Self::next`] gives the rate to try, [`Self::take`] takes the
/// result.
#[derive(Debug, Clone, Copy)]
pub struct Sweep {
    held: f64,
    broke: Option<f64>,
    first: f64,
    most: f64,
}

impl Sweep {
    /// Begins at `first` requests per second and does not exceed `most`.
    #[must_use]
    pub const fn new(first: f64, most: f64) -> Self {
        Self { held: 0.0, broke: None, first, most }
    }

    /// The next rate to try. None if the result is close enough.
    #[must_use]
    pub fn next(&self) -> Option<f64> {
        match self.broke {
            None if self.held == 0.0 => Some(self.first),
            None if self.held >= self.most => None,
            None => Some((self.held * 2.0).min(self.most)),
            Some(broke) if self.held > 0.0 => {
                (broke / self.held > NEAR).then(|| f64::midpoint(self.held, broke))
            }
            // Not even the first rate held: the search ends below a thousandth of it.
            Some(broke) => (broke > self.first / 1000.0).then_some(broke / 4.0),
        }
    }

    /// Takes the result for a rate.
    pub fn take(&mut self, rate: f64, held: bool) {
        if held {
            self.held = self.held.max(rate);
        } else {
            self.broke = Some(self.broke.map_or(rate, |broke| broke.min(rate)));
        }
    }

    /// The highest rate that held; 0 if none did.
    #[must_use]
    pub const fn held(&self) -> f64 {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_rate_is_found_within_three_percent() {
        for limit in [30.0, 999.0, 1000.0, 1001.0, 47_123.0, 3e6] {
            let mut sweep = Sweep::new(1000.0, 4e6);
            let mut tries = 0;
            while let Some(rate) = sweep.next() {
                sweep.take(rate, rate <= limit);
                tries += 1;
                assert!(tries < 40, "{limit}");
            }
            assert!(
                sweep.held() <= limit && sweep.held() * 1.031 > limit,
                "{limit}: {}",
                sweep.held()
            );
        }
        let mut sweep = Sweep::new(1000.0, 8000.0);
        while let Some(rate) = sweep.next() {
            sweep.take(rate, true);
        }
        assert_eq!(sweep.held(), 8000.0);
    }
}
