//! The packing problem: items with a size in each of many dimensions, bins of one size in all of
//! them.
//!
//! A dimension is one resource at one step of time. Sizes are multiples of 1/2^24 of a bin:
//! additions are exact and reversible, so that moving an item back and forth leaves no trace, and
//! the result is the same on every machine.

/// A bin's size in every dimension.
pub const BIN: u32 = 1 << 24;

/// Dimensions compared at once before the next check that the item still fits.
const BLOCK: usize = 64;

/// Items to be packed. Every item fits into an empty bin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    dimensions: usize,
    sizes: Vec<u32>,
    weights: Vec<u64>,
}

impl Problem {
    /// Creates items from fractions of a bin, one slice per item, all of one length. None if an
    /// item is larger than a bin.
    pub fn new(items: &[Vec<f64>]) -> Option<Problem> {
        let dimensions = items.first().map_or(0, Vec::len);
        let mut sizes = Vec::with_capacity(items.len() * dimensions);
        for item in items {
            assert_eq!(item.len(), dimensions, "every item has a size in every dimension");
            for part in item {
                sizes.push(in_bins(*part).filter(|size| *size <= BIN)?);
            }
        }
        let mut problem = Problem { dimensions, sizes, weights: Vec::new() };
        problem.weights = problem.weigh();
        Some(problem)
    }

    pub fn items(&self) -> usize {
        self.weights.len()
    }

    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    pub fn sizes(&self, item: usize) -> &[u32] {
        &self.sizes[item * self.dimensions..][..self.dimensions]
    }

    /// Returns an item's total size, weighted by scarcity; see [`Problem::weigh`].
    pub(super) fn weight(&self, item: usize) -> u64 {
        self.weights[item]
    }

    /// Returns the sum of all items in each dimension.
    pub(super) fn sums(&self) -> Vec<u64> {
        let mut sums = vec![0; self.dimensions];
        for item in self.sizes.chunks(self.dimensions.max(1)) {
            for (sum, size) in sums.iter_mut().zip(item) {
                *sum += u64::from(*size);
            }
        }
        sums
    }

    /// Sums sizes over the dimensions, each weighted by its scarcity: the eighth power of its sum
    /// relative to the scarcest one's.
    fn weigh(&self) -> Vec<u64> {
        let sums = self.sums();
        let most = sums.iter().copied().max().unwrap_or(0).max(1);
        // The sums are far below 2^53 and only order items.
        #[allow(clippy::cast_precision_loss)]
        let scarcity: Vec<f64> =
            sums.iter().map(|sum| (*sum as f64 / most as f64).powi(8)).collect();
        let total: f64 = scarcity.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let weight = |item: &[u32]| -> u64 {
            let sum: f64 = item.iter().zip(&scarcity).map(|(s, w)| f64::from(*s) * w).sum();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most 2^32
            let weight = (sum / total * 256.0) as u64;
            weight
        };
        match self.dimensions {
            0 => Vec::new(),
            dimensions => self.sizes.chunks(dimensions).map(weight).collect(),
        }
    }
}

/// Converts a fraction of a bin to units of 1 / [`BIN`]. None if it is out of range.
fn in_bins(part: f64) -> Option<u32> {
    let scaled = (part * f64::from(BIN)).round();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within the bounds
    (0.0..=f64::from(u32::MAX)).contains(&scaled).then_some(scaled as u32)
}

/// A bin and its items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bin {
    pub(super) items: Vec<usize>,
    loads: Vec<u32>,
}

impl Bin {
    pub(super) fn new(problem: &Problem) -> Bin {
        Bin { items: Vec::new(), loads: vec![0; problem.dimensions] }
    }

    pub(super) fn add(&mut self, problem: &Problem, item: usize) {
        self.items.push(item);
        for (load, size) in self.loads.iter_mut().zip(problem.sizes(item)) {
            *load += size;
        }
    }

    pub(super) fn remove(&mut self, problem: &Problem, item: usize) {
        self.items.retain(|other| *other != item);
        for (load, size) in self.loads.iter_mut().zip(problem.sizes(item)) {
            *load -= size;
        }
    }

    pub(super) fn fits(&self, problem: &Problem, item: usize) -> bool {
        let blocks = self.loads.chunks(BLOCK).zip(problem.sizes(item).chunks(BLOCK));
        blocks.into_iter().all(|(loads, sizes)| {
            let over = loads.iter().zip(sizes).fold(0, |over, (load, size)| over.max(load + size));
            over <= BIN
        })
    }

    /// True if `item` would fit without `out`.
    pub(super) fn fits_instead(&self, problem: &Problem, item: usize, out: usize) -> bool {
        let parts = self.loads.chunks(BLOCK).zip(problem.sizes(item).chunks(BLOCK));
        parts.zip(problem.sizes(out).chunks(BLOCK)).all(|((loads, sizes), outs)| {
            let three = loads.iter().zip(sizes).zip(outs);
            let over = three.fold(0, |over, ((load, size), out)| over.max(load - out + size));
            over <= BIN
        })
    }

    /// Returns the sum of its items' weights.
    pub(super) fn weight(&self, problem: &Problem) -> u64 {
        self.items.iter().map(|item| problem.weight(*item)).sum()
    }

    pub(super) fn loads(&self) -> &[u32] {
        &self.loads
    }

    pub(super) fn same_loads(&self, other: &Bin) -> bool {
        self.loads == other.loads
    }

    /// Returns the scalar product of an item with the space left.
    pub(super) fn alignment(&self, problem: &Problem, item: usize) -> u64 {
        let dimensions = self.loads.iter().zip(problem.sizes(item));
        dimensions.map(|(load, size)| u64::from((BIN - load) >> 8) * u64::from(size >> 8)).sum()
    }
}

/// The assignment of items to bins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    pub(super) bins: Vec<Bin>,
}

impl Packing {
    pub fn bins(&self) -> usize {
        self.bins.len()
    }

    /// The items of each bin, sorted.
    pub fn members(&self) -> Vec<Vec<usize>> {
        let sorted = |bin: &Bin| {
            let mut items = bin.items.clone();
            items.sort_unstable();
            items
        };
        self.bins.iter().map(sorted).collect()
    }

    /// True if every item is in exactly one bin and no bin is overfull; computed from the sizes.
    pub fn is_valid(&self, problem: &Problem) -> bool {
        let mut seen = vec![0_u32; problem.items()];
        let fits = self.bins.iter().all(|bin| {
            let mut loads = vec![0_u64; problem.dimensions];
            for item in &bin.items {
                seen[*item] += 1;
                for (load, size) in loads.iter_mut().zip(problem.sizes(*item)) {
                    *load += u64::from(*size);
                }
            }
            loads.iter().all(|load| *load <= u64::from(BIN))
        });
        fits && seen.iter().all(|count| *count == 1)
    }
}
