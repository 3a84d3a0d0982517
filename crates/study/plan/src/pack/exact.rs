//! The fewest bins, proven: branch and bound for some tens of items.

use farpool_units::exactly;

use super::bound;
use super::greedy::{Order, best_fit, first_fit};
use super::problem::{BIN, Bin, Packing, Problem};

/// The most items that are tried.
pub const ITEMS_MAX: usize = 30;
/// Nodes of the tree before the search gives up.
const NODES_MAX: usize = 1_000_000;
/// Sizes compared before the search gives up: a second or two.
const WORK_MAX: usize = 2_000_000_000;

/// Returns a packing with the fewest bins. None for more than [`ITEMS_MAX`] items, and if the proof
/// would take too long.
pub fn pack(problem: &Problem) -> Option<Packing> {
    if problem.items() > ITEMS_MAX {
        return None;
    }
    let order = Order::Weight.sorted(problem);
    let starts = Order::ALL.iter().flat_map(|order| {
        let order = order.sorted(problem);
        [first_fit(problem, &order), best_fit(problem, &order)]
    });
    let best = starts.min_by_key(Packing::bins)?;
    let lower = bound::lower(problem).bins;
    let sizes_per_node = (problem.items() * problem.dimensions()).max(1);
    let nodes_left = NODES_MAX.min(WORK_MAX / sizes_per_node);
    let mut search = Search { problem, order, best, lower, nodes_left };
    search.descend(0, &mut Vec::new()).then_some(search.best)
}

struct Search<'a> {
    problem: &'a Problem,
    order: Vec<usize>,
    best: Packing,
    lower: usize,
    nodes_left: usize,
}

impl Search<'_> {
    /// Places the item at `depth` in every bin that has room, and in one new one. False when the
    /// nodes are used up.
    fn descend(&mut self, depth: usize, bins: &mut Vec<Bin>) -> bool {
        if self.nodes_left == 0 {
            return false;
        }
        self.nodes_left -= 1;
        let Some(item) = self.order.get(depth).copied() else {
            if bins.len() < self.best.bins() {
                self.best = Packing { bins: bins.clone() };
            }
            return true;
        };
        if bins.len() + self.new_bins(depth, bins) >= self.best.bins() {
            return true;
        }
        for at in 0..bins.len() {
            if self.best.bins() <= self.lower {
                return true;
            }
            // Bins with equal loads are interchangeable from here on.
            let twin = bins[..at].iter().any(|other| other.same_loads(&bins[at]));
            if twin || !bins[at].fits(self.problem, item) {
                continue;
            }
            bins[at].add(self.problem, item);
            let whole = self.descend(depth + 1, bins);
            bins[at].remove(self.problem, item);
            if !whole {
                return false;
            }
        }
        if bins.len() + 1 < self.best.bins() {
            let mut bin = Bin::new(self.problem);
            bin.add(self.problem, item);
            bins.push(bin);
            let whole = self.descend(depth + 1, bins);
            bins.pop();
            return whole;
        }
        true
    }

    /// Returns a lower bound of the new bins that the remaining items need; free space in bins that
    /// none of them fits into does not count.
    fn new_bins(&self, depth: usize, bins: &[Bin]) -> usize {
        let left = &self.order[depth..];
        let mut needed = vec![0_i64; self.problem.dimensions()];
        for item in left {
            for (sum, size) in needed.iter_mut().zip(self.problem.sizes(*item)) {
                *sum += i64::from(*size);
            }
        }
        let open = bins.iter().filter(|bin| left.iter().any(|item| bin.fits(self.problem, *item)));
        for bin in open {
            for (sum, load) in needed.iter_mut().zip(bin.loads()) {
                *sum -= i64::from(BIN - load);
            }
        }
        let most = needed.into_iter().max().unwrap_or(0).max(0).cast_unsigned();
        exactly(most.div_ceil(u64::from(BIN)))
    }
}
