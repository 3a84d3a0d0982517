//! Popularity as in real caches: the k-th most popular of n items is requested with a frequency
//! proportional to k^-exponent.

use farpool_policy::Rng;

/// A distribution from which ranks are drawn, by binary search in the cumulated frequencies.
#[derive(Debug)]
pub struct Zipf {
    cumulated: Vec<f64>,
}

impl Zipf {
    /// Draws from ranks `0..items`, of which 0 is the most popular.
    #[must_use]
    pub fn new(items: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let cumulate = |rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        };
        Self { cumulated: (1..=items.max(1)).map(cumulate).collect() }
    }

    /// Returns the next rank to request.
    pub fn draw(&self, rng: &mut Rng) -> usize {
        let total = self.cumulated.last().copied().unwrap_or(0.0);
        let at = rng.next_u64() as f64 / u64::MAX as f64 * total;
        let rank = self.cumulated.partition_point(|cumulated| *cumulated < at);
        rank.min(self.cumulated.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_as_the_exponent_says() {
        let (zipf, mut rng) = (Zipf::new(1000, 1.0), Rng::new(4));
        let mut counts = vec![0u32; 1000];
        (0..200_000).for_each(|_| counts[zipf.draw(&mut rng)] += 1);
        let share = |rank: usize| f64::from(counts[rank]) / 200_000.0;
        // The harmonic number of 1000 is 7.485: rank 0 has 13.4 % of all.
        assert!((share(0) - 0.1336).abs() < 0.004, "{}", share(0));
        assert!((share(0) / share(9) - 10.0).abs() < 1.0);
    }
}
