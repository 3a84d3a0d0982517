//! Lengths of keys and values.

use super::unit;

/// A distribution of lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sizes {
    Fixed(usize),
    /// Log-normal with this mean; sigma is that of the logarithm.
    LogNormal {
        mean: f64,
        sigma: f64,
    },
}

impl Sizes {
    /// The length at the quantile given by these random bits.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "lengths are positive"
    )]
    pub fn of(&self, bits: u64) -> usize {
        match *self {
            Self::Fixed(bytes) => bytes,
            Self::LogNormal { mean, sigma } => {
                let median = mean.ln() - sigma * sigma / 2.0;
                (median + sigma * normal_quantile(unit(bits))).exp().round() as usize
            }
        }
    }
}

/// The standard normal distribution's quantile, to about 1e-9 (P. J. Acklam's rational
/// approximation).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
    ];
    const TAIL: f64 = 0.02425;
    let polynomial = |factors: &[f64], x: f64| factors.iter().fold(0.0, |sum, it| sum * x + it);
    let p = p.clamp(1e-12, 1.0 - 1e-12);
    let tail = |p: f64| {
        let q = (-2.0 * p.ln()).sqrt();
        polynomial(&C, q) / (polynomial(&D, q) * q + 1.0)
    };
    if p < TAIL {
        tail(p)
    } else if p > 1.0 - TAIL {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        polynomial(&A, r) * q / (polynomial(&B, r) * r + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, x) in
            [(0.5, 0.0), (0.841_344_746, 1.0), (0.977_249_868, 2.0), (0.001_349_898, -3.0)]
        {
            assert!((normal_quantile(p) - x).abs() < 1e-6, "{p}: {}", normal_quantile(p));
        }
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "small sums")]
    fn lengths_have_their_mean() {
        let sizes = Sizes::LogNormal { mean: 1024.0, sigma: 0.5 };
        let count = 200_000u64;
        let sum: usize = (0..count).map(|number| sizes.of(crate::workload::mix(number, 2))).sum();
        let mean = sum as f64 / count as f64;
        assert!((mean - 1024.0).abs() < 10.0, "{mean}");
    }
}
