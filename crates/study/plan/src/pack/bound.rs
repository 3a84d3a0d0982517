//! Lower bounds: no packing has fewer bins, whatever the time spent.

use farpool_units::exactly;

use super::problem::{BIN, Problem};

/// Lower bounds of all packings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// The sum of the fullest dimension, in bins: the peak of sums.
    pub sum: f64,
    /// The fullest dimension.
    pub dimension: usize,
    /// The best bound known, in whole bins.
    pub bins: usize,
}

/// Computes the sum of every dimension, and the bound of Martello and Toth in each: items larger
/// than half a bin never share one, and the space beside them limits the smaller ones.
pub fn lower(problem: &Problem) -> Bound {
    let sums = problem.sums();
    let dimension =
        (0..sums.len()).max_by_key(|at| (sums[*at], std::cmp::Reverse(*at))).unwrap_or(0);
    let most = sums.get(dimension).copied().unwrap_or(0);
    let mut bins = usize::from(problem.items() > 0);
    let mut sizes = Vec::with_capacity(problem.items());
    for (at, sum) in sums.iter().enumerate() {
        // A dimension with less than half of the best bound cannot give a better one: rounding up
        // at most doubles.
        if whole_bins(2 * *sum) < bins {
            continue;
        }
        sizes.clear();
        sizes.extend((0..problem.items()).map(|item| problem.sizes(item)[at]));
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        bins = bins.max(martello_toth(&sizes));
    }
    #[allow(clippy::cast_precision_loss)] // sums are far below 2^53
    let sum = most as f64 / f64::from(BIN);
    Bound { sum, dimension, bins }
}

fn whole_bins(sum: u64) -> usize {
    exactly(sum.div_ceil(u64::from(BIN)))
}

/// Computes the bound L2 (Martello and Toth 1990) over all thresholds; `sizes` descend.
fn martello_toth(sizes: &[u32]) -> usize {
    let half = BIN / 2;
    let prefix: Vec<u64> = std::iter::once(0)
        .chain(sizes.iter().scan(0_u64, |sum, size| {
            *sum += u64::from(*size);
            Some(*sum)
        }))
        .collect();
    let large = sizes.partition_point(|size| *size > half);
    let mut best = whole_bins(*prefix.last().unwrap_or(&0));
    let mut before = None;
    let thresholds = std::iter::once(0).chain(sizes[large..].iter().rev().copied());
    for threshold in thresholds {
        if before.replace(threshold) == Some(threshold) {
            continue;
        }
        // Larger than a bin less the threshold: no item at or above the threshold fits beside them.
        let alone = sizes.partition_point(|size| *size > BIN - threshold);
        let alone = alone.min(large);
        let end = sizes.partition_point(|size| *size >= threshold.max(1));
        let small = prefix[end.max(large)] - prefix[large];
        let beside = (large - alone) as u64 * u64::from(BIN) - (prefix[large] - prefix[alone]);
        best = best.max(large + whole_bins(small.saturating_sub(beside)));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(items: &[&[f64]]) -> Bound {
        let items: Vec<Vec<f64>> = items.iter().map(|item| item.to_vec()).collect();
        lower(&Problem::new(&items).expect("they fit"))
    }

    #[test]
    fn the_fullest_dimension_counts() {
        let found = bound(&[&[0.5, 0.1], &[0.5, 0.1], &[0.5, 0.1]]);
        assert_eq!((found.sum, found.dimension, found.bins), (1.5, 0, 2));
        assert_eq!(bound(&[]).bins, 0);
        assert_eq!(bound(&[&[0.0]]).bins, 1);
    }

    #[test]
    fn what_is_larger_than_half_never_shares_and_leaves_room_only_for_less() {
        assert_eq!(bound(&[&[0.6], &[0.6], &[0.6]]).bins, 3, "the sum says 2");
        // Three of 0.4 do not fit beside two of 0.7; the sum gives 3.
        assert_eq!(bound(&[&[0.7], &[0.7], &[0.4], &[0.4], &[0.4]]).bins, 4);
    }
}
