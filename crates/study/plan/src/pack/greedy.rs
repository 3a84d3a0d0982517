//! Greedy packings: first fit and best fit, item by item in several orders, and bin by bin by
//! alignment.

use super::problem::{Bin, Packing, Problem};

/// The key that orders items; the largest is always first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The largest size in any dimension.
    Peak,
    /// The sum over all dimensions, weighted by scarcity.
    Weight,
    /// The sum over all dimensions.
    Sum,
}

impl Order {
    pub const ALL: [Order; 3] = [Order::Peak, Order::Weight, Order::Sum];

    /// Returns the items in this order; equal ones keep theirs.
    pub fn sorted(self, problem: &Problem) -> Vec<usize> {
        let key = |item: &usize| -> u64 {
            let sizes = problem.sizes(*item).iter().copied();
            match self {
                Order::Peak => u64::from(sizes.max().unwrap_or(0)),
                Order::Weight => problem.weight(*item),
                Order::Sum => sizes.map(u64::from).sum(),
            }
        };
        let mut items: Vec<usize> = (0..problem.items()).collect();
        items.sort_by_cached_key(|item| std::cmp::Reverse(key(item)));
        items
    }
}

/// Puts each item into the first bin that has room.
pub fn first_fit(problem: &Problem, order: &[usize]) -> Packing {
    let choose = |bins: &[Bin], item: usize| bins.iter().position(|bin| bin.fits(problem, item));
    place(problem, order, choose)
}

/// Puts each item into the bin with room that is fullest by weight.
pub fn best_fit(problem: &Problem, order: &[usize]) -> Packing {
    let mut weights: Vec<u64> = Vec::new();
    place(problem, order, |bins, item| {
        weights.resize(bins.len(), 0);
        // The last bin may be new; its weight is computed from its items.
        if let (Some(weight), Some(bin)) = (weights.last_mut(), bins.last()) {
            *weight = bin.weight(problem);
        }
        let open = (0..bins.len()).filter(|at| bins[*at].fits(problem, item));
        let chosen = open.max_by_key(|at| (weights[*at], std::cmp::Reverse(*at)))?;
        weights[chosen] += problem.weight(item);
        Some(chosen)
    })
}

fn place(
    problem: &Problem,
    order: &[usize],
    mut choose: impl FnMut(&[Bin], usize) -> Option<usize>,
) -> Packing {
    let mut bins: Vec<Bin> = Vec::new();
    for item in order {
        let at = choose(&bins, *item).unwrap_or_else(|| {
            bins.push(Bin::new(problem));
            bins.len() - 1
        });
        bins[at].add(problem, *item);
    }
    Packing { bins }
}

/// Fills one bin after the other with the item that aligns best with the space left (Panigrahy and
/// others, Heuristics for Vector Bin Packing, 2011).
pub fn by_alignment(problem: &Problem) -> Packing {
    let mut left = Order::Weight.sorted(problem);
    let mut bins = Vec::new();
    while !left.is_empty() {
        let mut bin = Bin::new(problem);
        // The largest first: it aligns best with an empty bin anyway.
        bin.add(problem, left.remove(0));
        loop {
            let fitting = (0..left.len()).filter(|at| bin.fits(problem, left[*at]));
            let best = fitting
                .max_by_key(|at| (bin.alignment(problem, left[*at]), std::cmp::Reverse(*at)));
            let Some(at) = best else { break };
            bin.add(problem, left.remove(at));
        }
        bins.push(bin);
    }
    Packing { bins }
}
