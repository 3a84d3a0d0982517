//! Which of its connections a worker serves next, when several have something to do: those that
//! demand pages before those that evict, and those before what runs in the background. Pure; time
//! is an argument.
//!
//! Invariants:
//! - Within a class, who became ready first is served first.
//! - A class with somebody waiting has a turn at least every [`PATIENCE_NS`], and the turn under
//!   way. So a flood of one class costs the others their speed, and not their progress. It is the
//!   class that has this right, not each of its connections: else many of a lower class would take
//!   all turns.

use farpool_wire::Priority;
use std::collections::VecDeque;

/// Longest that a class waits for others to be served, in nanoseconds: far below the deadlines of
/// clients (seconds), far above a turn (0.3 ms). The lowest class then has at least 100 turns a
/// second, which can carry 100 MiB.
pub(super) const PATIENCE_NS: u64 = 10_000_000;

/// Pages of a turn, 1 MiB: 0.2 to 0.4 ms, in which others wait, and far more than it takes to see
/// who else has become ready.
const TURN_PAGES: u32 = 256;
/// Requests of a turn: of small ones, 0.1 to 0.3 ms.
const TURN_REQUESTS: u32 = 128;
/// Most pages of a small request: with more, client and worker run better side by side than on one
/// CPU.
const QUICK_PAGES: u32 = 4;

/// The connections of a worker that wait for a turn.
#[derive(Debug, Default)]
pub(super) struct Turns {
    classes: [Class; Priority::ALL.len()],
}

#[derive(Debug, Default)]
struct Class {
    waiting: VecDeque<usize>,
    /// When the class had its last turn, or when the first of these came, whichever is later.
    since_ns: u64,
}

/// What a connection requested in one turn of work.
#[derive(Debug, Default)]
pub(super) struct Turn {
    pub(super) requests: u32,
    pub(super) pages: u32,
}

impl Turn {
    /// True if it is the turn of others.
    pub(super) fn is_over(&self) -> bool {
        self.requests >= TURN_REQUESTS || self.pages >= TURN_PAGES
    }

    /// True for one small request: its client waits for the answer, and does nothing else
    /// meanwhile.
    pub(super) fn is_quick(&self) -> bool {
        self.requests == 1 && self.pages <= QUICK_PAGES
    }
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.waiting.is_empty())
    }

    /// The connections that wait.
    pub(super) fn count(&self) -> usize {
        self.classes.iter().map(|class| class.waiting.len()).sum()
    }

    /// Adds a connection that is not there yet.
    pub(super) fn push(&mut self, index: usize, priority: Priority, now_ns: u64) {
        let class = &mut self.classes[priority as usize];
        if class.waiting.is_empty() {
            class.since_ns = now_ns;
        }
        class.waiting.push_back(index);
    }

    /// Takes out the connection that is served next, and the class that it waited in.
    pub(super) fn pop(&mut self, now_ns: u64) -> Option<(usize, Priority)> {
        let waits = |priority: &&Priority| !self.classes[**priority as usize].waiting.is_empty();
        let since_ns = |priority: &&Priority| self.classes[**priority as usize].since_ns;
        let is_late =
            |priority: &&Priority| now_ns.saturating_sub(since_ns(priority)) >= PATIENCE_NS;
        let all = || Priority::ALL.iter().filter(waits);
        let next = all().filter(is_late).min_by_key(since_ns).or_else(|| all().next())?;
        let class = &mut self.classes[*next as usize];
        class.since_ns = now_ns;
        Some((class.waiting.pop_front()?, *next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TURN_NS: u64 = 300_000;

    #[test]
    fn who_demands_goes_first_and_nobody_waits_for_ever() {
        let mut turns = Turns::default();
        let [demand, eviction, background] = Priority::ALL else { panic!("three classes") };
        turns.push(30, *background, 0);
        turns.push(31, *background, 0);
        turns.push(20, *eviction, 1);
        let mut served = Vec::new();
        for now_ns in (0..4 * PATIENCE_NS).step_by(1_000_000) {
            turns.push(10, *demand, now_ns);
            let (index, _) = turns.pop(now_ns).expect("somebody waits");
            if index != 10 {
                served.push((index, now_ns / 1_000_000));
            }
        }
        // Those of the background share what the class has.
        assert_eq!(served, [(30, 10), (20, 11), (31, 20)]);
    }

    proptest! {
        #[test]
        fn no_class_waits_longer_than_its_patience_and_none_overtakes_its_own(
            steps in prop::collection::vec((0..3usize, 0..4u8, 0..TURN_NS), 1..400),
        ) {
            let mut turns = Turns::default();
            // A plain list of who waits, in the order of their coming, and when a class last could
            // complain.
            let mut model: Vec<(usize, usize)> = Vec::new();
            let mut since_ns = [0; 3];
            let mut now_ns = 0;
            for (number, (class, count, pause_ns)) in steps.into_iter().enumerate() {
                now_ns += pause_ns;
                for at in 0..usize::from(count) {
                    let index = number * 10 + at;
                    if model.iter().all(|(_, of)| *of != class) {
                        since_ns[class] = now_ns;
                    }
                    turns.push(index, Priority::ALL[class], now_ns);
                    model.push((index, class));
                }
                let popped = turns.pop(now_ns);
                prop_assert_eq!(popped.is_none(), model.is_empty());
                let Some((index, priority)) = popped else { continue };
                let of = priority as usize;
                let first = model.iter().position(|(_, class)| *class == of).expect("it waits");
                prop_assert_eq!(model.remove(first).0, index, "in order within its class");
                let highest = model.iter().map(|(_, class)| *class).min().unwrap_or(of);
                prop_assert!(
                    of <= highest || now_ns - since_ns[of] >= PATIENCE_NS,
                    "class {} before {}", of, highest
                );
                since_ns[of] = now_ns;
                for class in (0..3).filter(|class| model.iter().any(|(_, of)| of == class)) {
                    // The other two may be late as well, and are served before.
                    let most_ns = PATIENCE_NS + 3 * TURN_NS;
                    prop_assert!(now_ns - since_ns[class] <= most_ns, "class {}", class);
                }
            }
        }
    }
}
