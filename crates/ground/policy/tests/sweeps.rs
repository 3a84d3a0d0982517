//! The chunk sweeps: they evict only resident pages, and leave no unused page for good.

use farpool_policy::{ChunkSweep, SweepPolicy, VictimKind, sweep::HOT_LAPS};
use proptest::prelude::*;

const CHUNKS: usize = 9;

#[derive(Debug, Clone)]
enum Step {
    Fetch(usize, u64),
    TakeBack(usize, u64),
    Forget(usize),
    Sweep,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chunk = 0..CHUNKS;
    let step = prop_oneof![
        4 => (chunk.clone(), any::<u64>()).prop_map(|(c, p)| Step::Fetch(c, p)),
        2 => (chunk.clone(), any::<u64>()).prop_map(|(c, p)| Step::TakeBack(c, p)),
        1 => chunk.prop_map(Step::Forget),
        4 => Just(Step::Sweep),
    ];
    proptest::collection::vec(step, 0..120)
}

/// The two bitmaps the pager keeps beside a sweep.
struct Pager {
    sweep: ChunkSweep,
    resident: [u64; CHUNKS],
    hot: [u64; CHUNKS],
}

impl Pager {
    fn new(kind: VictimKind) -> Self {
        let sweep = ChunkSweep::new(kind, CHUNKS, 3);
        Self { sweep, resident: [0; CHUNKS], hot: [0; CHUNKS] }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Fetch(chunk, pages) => {
                self.resident[chunk] |= pages;
                self.sweep.on_fetch(chunk);
            }
            Step::TakeBack(chunk, pages) => {
                self.resident[chunk] |= pages;
                self.hot[chunk] |= pages;
                self.sweep.on_take_back(chunk);
            }
            Step::Forget(chunk) => {
                (self.resident[chunk], self.hot[chunk]) = (0, 0);
                self.sweep.on_forget(chunk);
            }
            Step::Sweep => {
                self.sweep_one();
            }
        }
    }

    fn sweep_one(&mut self) -> u64 {
        let chunk = self.sweep.next_chunk().expect("there are chunks");
        assert!(chunk < CHUNKS);
        let (resident, hot) = (self.resident[chunk], self.hot[chunk]);
        if resident == 0 {
            let after = self.resident[chunk + 1..].iter();
            self.sweep.pass_over(after.take_while(|resident| **resident == 0).count());
        }
        let choice = self.sweep.choose(chunk, resident, hot);
        assert_eq!(choice.take & !resident, 0, "only resident pages can be taken");
        assert_eq!(choice.clear_hot & !hot, 0, "only hot marks can be spent");
        assert_eq!(hot & choice.take & !choice.clear_hot, 0, "a page that leaves leaves its mark");
        self.resident[chunk] &= !choice.take;
        self.hot[chunk] &= !choice.clear_hot;
        choice.take
    }
}

proptest! {
    #[test]
    fn every_sweep_takes_everything_once_it_is_quiet_for_long_enough(steps in steps()) {
        for kind in VictimKind::ALL {
            let mut pager = Pager::new(kind);
            steps.iter().for_each(|step| pager.apply(step));
            // Random draws guarantee nothing; a page left after 40 laps means a bug. SIEVE clears a
            // mark of the chunk as well, and its first lap may start midway.
            let laps = match kind {
                VictimKind::Random => 40,
                VictimKind::Sieve => 2 * HOT_LAPS + 2,
                _ => HOT_LAPS + 1,
            };
            for _ in 0..laps as usize * CHUNKS {
                pager.sweep_one();
            }
            prop_assert_eq!(pager.resident, [0; CHUNKS], "{}", kind);
        }
    }
}

#[test]
fn fifo_goes_round_in_address_order_and_takes_hot_pages_too() {
    let mut sweep = ChunkSweep::new(VictimKind::Fifo, 3, 0);
    let order: Vec<_> = (0..5).filter_map(|_| sweep.next_chunk()).collect();
    assert_eq!(order, [0, 1, 2, 0, 1]);
    assert_eq!(sweep.choose(0, 0b1110, 0b0110).take, 0b1110);
}

#[test]
fn clock_spares_hot_pages_a_lap_to_eight_laps_by_their_number() {
    let mut sweep = ChunkSweep::new(VictimKind::Clock, 1, 0);
    let (mut resident, mut hot, mut leaves) = (u64::MAX, u64::MAX, Vec::new());
    while resident != 0 {
        sweep.next_chunk();
        let choice = sweep.choose(0, resident, hot);
        resident &= !choice.take;
        hot &= !choice.clear_hot;
        leaves.push(choice.take.count_ones());
    }
    assert_eq!(leaves, [0, 8, 8, 8, 8, 8, 8, 8, 8]);
    assert_eq!(sweep.choose(0, 0b110, 0b010).take, 0b100, "a cold page goes at once");
}

#[test]
fn lru_takes_the_chunk_that_was_quiet_longest() {
    let mut sweep = ChunkSweep::new(VictimKind::Lru, 4, 0);
    [0, 1, 2, 0].iter().for_each(|chunk| sweep.on_fetch(*chunk));
    sweep.on_take_back(1);
    let order: Vec<_> = (0..3)
        .filter_map(|_| {
            let chunk = sweep.next_chunk()?;
            sweep.choose(chunk, 1, 0);
            Some(chunk)
        })
        .collect();
    assert_eq!(order, [2, 0, 1]);
}

#[test]
fn queues_find_chunks_they_were_never_told_of() {
    for kind in [VictimKind::Lru, VictimKind::Sieve] {
        let mut sweep = ChunkSweep::new(kind, 3, 0);
        let mut seen: Vec<_> = (0..3).filter_map(|_| sweep.next_chunk()).collect();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2], "{kind}");
    }
}

#[test]
fn no_chunks_no_choice_and_growth_keeps_going() {
    for kind in VictimKind::ALL {
        let mut sweep = ChunkSweep::new(kind, 0, 0);
        assert_eq!(sweep.next_chunk(), None, "{kind}");
        sweep.grow(2);
        assert!(sweep.next_chunk().is_some_and(|chunk| chunk < 2), "{kind}");
    }
}
