//! How often each key is requested.

use farpool_policy::Rng;
use farpool_units::exactly;

use super::unit;

/// The steepest Zipf law that can be drawn; Twitter's steepest cluster has 2.7.
const ALPHA_MAX: f64 = 4.0;

/// The distribution of requests over keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Popularity {
    Uniform,
    /// The key of rank r is drawn in proportion to r to the power of minus alpha.
    Zipf(f64),
}

/// Whether a Zipf law with this exponent can be drawn.
#[must_use]
pub fn is_alpha(alpha: f64) -> bool {
    alpha > 0.0 && alpha <= ALPHA_MAX
}

/// Draws key numbers below a bound.
///
/// Zipf laws are drawn exactly, without tables, by rejection-inversion (W. Hörmann, G. Derflinger,
/// "Rejection-inversion to generate variates from monotone discrete distributions", ACM TOMACS
/// 6(3), 1996). Ranks are scattered over the numbers, so that popular keys are not adjacent.
#[derive(Debug, Clone)]
pub struct Ranks {
    keys: u64,
    zipf: Option<Zipf>,
    scatter: Scatter,
}

impl Ranks {
    /// Draws from the numbers below `keys`, which is at least one.
    #[must_use]
    pub fn new(popularity: Popularity, keys: u64) -> Self {
        let zipf = match popularity {
            Popularity::Zipf(alpha) if is_alpha(alpha) => Some(Zipf::new(alpha, keys)),
            _ => None,
        };
        Self { keys, zipf, scatter: Scatter::new(keys) }
    }

    #[inline]
    pub fn draw(&mut self, rng: &mut Rng) -> u64 {
        match &self.zipf {
            None => {
                let wide = u128::from(rng.next_u64()) * u128::from(self.keys);
                exactly(wide >> 64)
            }
            Some(zipf) => self.scatter.number_of(zipf.rank(rng) - 1),
        }
    }

    /// The number of the key of this rank, from 0.
    #[must_use]
    pub fn key_of_rank(&self, rank: u64) -> u64 {
        self.scatter.number_of(rank)
    }
}

#[derive(Debug, Clone)]
struct Zipf {
    alpha: f64,
    ranks: f64,
    /// The integral up to the first rank's middle, and up to the last one's end.
    first: f64,
    last: f64,
    /// A rank this near to the drawn point is accepted without a further test.
    near: f64,
}

impl Zipf {
    #[expect(clippy::cast_precision_loss, reason = "key sets are smaller than 2^53")]
    fn new(alpha: f64, ranks: u64) -> Self {
        let ranks = ranks as f64;
        let mut zipf = Self { alpha, ranks, first: 0.0, last: 0.0, near: 0.0 };
        zipf.first = zipf.integral(1.5) - 1.0;
        zipf.last = zipf.integral(ranks + 0.5);
        zipf.near = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    fn density(&self, x: f64) -> f64 {
        (-self.alpha * x.ln()).exp()
    }

    /// The integral of the density: (x^(1 - alpha) - 1) / (1 - alpha), or ln x.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        expm1_ratio((1.0 - self.alpha) * log) * log
    }

    fn inverse(&self, y: f64) -> f64 {
        let t = (y * (1.0 - self.alpha)).max(-1.0);
        (log1p_ratio(t) * y).exp()
    }

    /// Draws a rank, from 1.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "ranks are whole and positive"
    )]
    fn rank(&self, rng: &mut Rng) -> u64 {
        loop {
            let u = self.last + unit(rng.next_u64()) * (self.first - self.last);
            let x = self.inverse(u);
            let rank = (x + 0.5).floor().clamp(1.0, self.ranks);
            if rank - x <= self.near || u >= self.integral(rank + 0.5) - self.density(rank) {
                return rank as u64;
            }
        }
    }
}

/// (e^x - 1) / x, accurate also if x is nearly 0.
fn expm1_ratio(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.exp_m1() / x } else { 1.0 + x / 2.0 }
}

/// ln(1 + x) / x, likewise.
fn log1p_ratio(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.ln_1p() / x } else { 1.0 - x / 2.0 }
}

/// A bijection of the numbers below a bound: multiply and mask, repeated while the result is too
/// large.
#[derive(Debug, Clone)]
struct Scatter {
    keys: u64,
    mask: u64,
}

impl Scatter {
    const fn new(keys: u64) -> Self {
        Self { keys, mask: keys.next_power_of_two() - 1 }
    }

    #[inline]
    const fn number_of(&self, rank: u64) -> u64 {
        let mut number = rank;
        loop {
            // Odd factors and shifted sums are bijections of the numbers below a power of two.
            number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & self.mask;
            number ^= number >> (self.mask.count_ones() / 2 + 1);
            number = number.wrapping_mul(0xbf58_476d_1ce4_e5b9) & self.mask;
            if number < self.keys {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattering_loses_no_key() {
        for keys in [1, 2, 3, 10, 1000, 1024, 65_537] {
            let scatter = Scatter::new(keys);
            let mut seen: Vec<u64> = (0..keys).map(|rank| scatter.number_of(rank)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..keys), "{keys} keys");
        }
    }

    #[test]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "small counts"
    )]
    fn zipf_laws_are_drawn_as_they_are() {
        const KEYS: u64 = 50;
        const DRAWS: u32 = 400_000;
        for alpha in [0.3, 0.99, 1.0, 1.5, 2.7] {
            let mut ranks = Ranks::new(Popularity::Zipf(alpha), KEYS);
            let mut rng = Rng::new(1);
            let mut counts = vec![0u32; KEYS as usize];
            for _ in 0..DRAWS {
                counts[ranks.draw(&mut rng) as usize] += 1;
            }
            let weights: Vec<f64> = (1..=KEYS).map(|rank| (rank as f64).powf(-alpha)).collect();
            let total: f64 = weights.iter().sum();
            let chi_square: f64 = (0..KEYS)
                .map(|rank| {
                    let expected = weights[rank as usize] / total * f64::from(DRAWS);
                    let found = f64::from(counts[ranks.key_of_rank(rank) as usize]);
                    (found - expected).powi(2) / expected
                })
                .sum();
            // 49 degrees of freedom: above 100 with a probability below 1 in 10,000.
            assert!(chi_square < 100.0, "alpha {alpha}: {chi_square}");
        }
    }
}
