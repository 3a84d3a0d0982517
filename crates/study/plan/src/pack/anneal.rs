//! Threshold accepting (Dueck and Scheuer 1990): items are moved and exchanged so that full bins
//! become fuller and light ones lighter, until some are empty. Moves for the worse are accepted
//! less and less. Whole numbers only, so every machine takes the same path.

use super::problem::{Bin, Packing, Problem};
use crate::Random;

/// Improves `packing` without adding bins. Stops after `moves` attempted moves, or at the lower
/// bound of `lower` bins.
pub fn anneal(
    problem: &Problem,
    packing: Packing,
    lower: usize,
    moves: usize,
    seed: u64,
) -> Packing {
    let mut state = State::new(problem, packing);
    let mut random = Random::new(seed);
    let start = state.start_threshold();
    for moved in 0..moves {
        if state.bins.len() <= lower.max(1) {
            break;
        }
        // The threshold falls to zero over the first nine tenths; after that no move may lose.
        let left = (moves - moves / 10).saturating_sub(moved) as i128;
        let threshold = start * left / (moves as i128) * left / (moves as i128);
        state.step(threshold, &mut random);
    }
    Packing { bins: state.bins }
}

struct State<'a> {
    problem: &'a Problem,
    bins: Vec<Bin>,
    weights: Vec<i128>,
}

impl<'a> State<'a> {
    fn new(problem: &'a Problem, packing: Packing) -> State<'a> {
        let weights = packing.bins.iter().map(|bin| i128::from(bin.weight(problem))).collect();
        State { problem, bins: packing.bins, weights }
    }

    /// Returns a part of the change that moving an average item between average bins makes.
    fn start_threshold(&self) -> i128 {
        let total: i128 = self.weights.iter().sum();
        let (bins, items) = (self.bins.len().max(1) as i128, self.problem.items().max(1) as i128);
        (total / items) * (total / bins) / 8
    }

    fn step(&mut self, threshold: i128, random: &mut Random) {
        let (from, to) = (random.below(self.bins.len()), random.below(self.bins.len()));
        if from == to {
            return;
        }
        let item = self.bins[from].items[random.below(self.bins[from].items.len())];
        // A random place in the other bin, to exchange with; the one after the last means a plain
        // move.
        let place = random.below(self.bins[to].items.len() + 1);
        let back = self.bins[to].items.get(place).copied();
        let weight = |item: usize| i128::from(self.problem.weight(item));
        let change = weight(item) - back.map_or(0, weight);
        // Change of the sum of squares: (to + change)^2 + (from - change)^2 - to^2 - from^2.
        let gain = 2 * change * (self.weights[to] - self.weights[from] + change);
        if gain < -threshold || change == 0 {
            return;
        }
        let problem = self.problem;
        let fits = match back {
            None => self.bins[to].fits(problem, item),
            Some(back) => {
                self.bins[to].fits_instead(problem, item, back)
                    && self.bins[from].fits_instead(problem, back, item)
            }
        };
        if !fits {
            return;
        }
        self.bins[from].remove(problem, item);
        if let Some(back) = back {
            self.bins[to].remove(problem, back);
            self.bins[from].add(problem, back);
        }
        self.bins[to].add(problem, item);
        self.weights[to] += change;
        self.weights[from] -= change;
        if self.bins[from].items.is_empty() {
            self.bins.swap_remove(from);
            self.weights.swap_remove(from);
        }
    }
}
