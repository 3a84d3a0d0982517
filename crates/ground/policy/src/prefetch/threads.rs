//! A fixed table of state per thread: 32 sets of 4 ways; a new thread replaces the least recently
//! used way of its set. A dropped thread relearns in a few faults.

/// Sets of the table; a power of two. 128 threads are remembered: far more than fault at the same
/// time.
const SETS: usize = 32;
/// Threads per set, so that two busy threads of one set do not evict each other.
const WAYS: usize = 4;

#[derive(Debug, Clone, Default)]
struct Way {
    thread: u32,
    /// Value of the table's counter at the last use; 0 = empty.
    used_at: u64,
    /// Index of this way's state, once it has been used.
    state: usize,
}

/// State of type `T` per thread.
#[derive(Debug)]
pub(crate) struct ThreadTable<T> {
    ways: Vec<Way>,
    /// Capacity for all of them is reserved, so that nothing is allocated later; memory is used as
    /// threads appear.
    states: Vec<T>,
    uses: u64,
}

impl<T: Clone + Default> ThreadTable<T> {
    pub(crate) fn new() -> Self {
        let ways = vec![Way::default(); SETS * WAYS];
        Self { ways, states: Vec::with_capacity(SETS * WAYS), uses: 0 }
    }

    /// Returns the state of `thread`, which is new if the thread is new or was dropped.
    pub(crate) fn of(&mut self, thread: u32) -> &mut T {
        self.uses += 1;
        let set = thread as usize % SETS * WAYS;
        let ways = &mut self.ways[set..set + WAYS];
        let known = ways.iter().position(|way| way.used_at > 0 && way.thread == thread);
        let at = known.unwrap_or_else(|| oldest(ways));
        let way = &mut ways[at];
        if way.used_at == 0 {
            way.state = self.states.len();
            self.states.push(T::default());
        } else if known.is_none() {
            self.states[way.state] = T::default();
        }
        (way.thread, way.used_at) = (thread, self.uses);
        &mut self.states[way.state]
    }
}

fn oldest(ways: &[Way]) -> usize {
    let oldest = ways.iter().enumerate().min_by_key(|(_, way)| way.used_at);
    oldest.map_or(0, |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_state_until_others_of_its_set_push_it_out() {
        let mut table = ThreadTable::<u64>::new();
        *table.of(7) = 70;
        *table.of(8) = 80;
        assert_eq!((*table.of(7), *table.of(8)), (70, 80));
        for other in 1..=4u32 {
            *table.of(7 + 32 * other) = 1;
        }
        assert_eq!(*table.of(7), 0, "forgotten: five threads share four ways");
        assert_eq!(*table.of(8), 80, "another set");
    }
}
