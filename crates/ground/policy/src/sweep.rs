//! What the pager's evictor runs: victims in aligned chunks of 64 pages.
//!
//! Moving pages out costs 0.85 us one by one and 0.15 us each in chunks (one UFFDIO_MOVE, holes
//! allowed), so the unit of eviction is the chunk, and the policy answers two questions: which
//! chunk next, and which of its resident pages. The pager keeps two bits per page: `resident`, and
//! `hot` = it was taken back from the victim buffer. The kernel reports no more: uses of a resident
//! page are invisible, so the victim buffer is the only source on what is in use.
//!
//! The default is `clock` with hot pages spared for up to 8 laps. Hit ratios of the model pager in
//! `tests/hit_ratios.rs` (16384 pages, 400000 accesses, victim buffer 1/16 of local memory), beside
//! the exact clock, which sees every reference:
//!
//! | trace, local memory | fifo | clock, 1 lap | clock, 8 laps | lru | random | sieve | exact clock |
//! |---|---|---|---|---|---|---|---|
//! | Zipf 0.99, 50 % | .865 | .869 | .872 | .863 | .856 | .872 | .893 |
//! | Zipf 0.99, 25 % | .767 | .773 | .783 | .760 | .753 | .780 | .804 |
//! | hot/cold 90:10, 25 % | .877 | .886 | .896 | .813 | .852 | .883 | .912 |
//! | the same, scattered, 25 % | .879 | .890 | .900 | .866 | .857 | .898 | .912 |
//! | scan and hot set, 50 % | .496 | .503 | .517 | .490 | .515 | .518 | .544 |
//! | uniform, 25 % | .230 | .231 | .231 | .232 | .231 | .231 | .249 |
//! | cost over all traces, us | 28.10 | 27.86 | 27.54 | 29.06 | 28.15 | 27.79 | |
//!
//! `clock` has the fewest misses or nearly so in every row, the lowest cost, and no queue: fault
//! threads need not report to it. `lru` by chunk is the worst: one hot page keeps 63 cold ones.
//! Marking pages that were refetched soon after eviction (Linux's refault distance) was tried and
//! dropped: at chunk granularity it marks half of all pages and loses to plain `fifo`.
//!
//! Memory: nothing for the hand and random sweeps; 8.1 bytes a chunk (0.13 a page) for the queues
//! of `lru` and `sieve`. No call but `grow` allocates.

use crate::{Rng, VictimKind, bits::BitSet, list::IndexList};
use std::fmt::Debug;

use farpool_units::exactly;

/// Pages per chunk: one bit each in a `u64`. 256 KiB, enough to spread the cost of one MOVE.
pub const CHUNK_PAGES: u32 = 64;

/// A page that was taken back is spared for at most this many laps, half as many on average: its
/// mark is cleared in the lap whose number equals its own modulo 8. After one lap the information
/// would be lost: the next sign comes only after the page was evicted again.
pub const HOT_LAPS: u32 = 8;
const EVERY_EIGHTH_PAGE: u64 = 0x0101_0101_0101_0101;

/// The decision on one chunk, one bit per page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Choice {
    /// Resident pages to evict.
    pub take: u64,
    /// Pages whose `hot` bit is cleared; evicted pages are among them if they were hot.
    pub clear_hot: u64,
}

/// The order in which chunks are visited, and the pages evicted from each.
///
/// Chunks are numbered `0..chunk_count` as of the last `grow`. The chunk that a sweep names may
/// hold no resident pages: the evictor skips empty ones, and gives up after `HOT_LAPS + 1` laps (of
/// `chunk_count` calls) without evicting a page, as then there is none to evict.
pub trait SweepPolicy: Debug + Send {
    /// Grows the chunks to `0..chunk_count`; never shrinks. The only call that allocates.
    fn grow(&mut self, chunk_count: usize);

    /// Returns the next chunk to check; None while there are no chunks.
    fn next_chunk(&mut self) -> Option<usize>;

    /// Skips the `count` chunks after the last one returned, which are empty, in a sweep in address
    /// order.
    fn pass_over(&mut self, _count: usize) {}

    /// Chooses the pages to evict from `chunk`, whose pages are as the two bitmaps say.
    fn choose(&mut self, chunk: usize, resident: u64, hot: u64) -> Choice;

    /// Reports that pages of `chunk` became resident by a fetch or a first touch. Nothing depends
    /// on it: chunks never announced are found once the announced ones are empty.
    fn on_fetch(&mut self, _chunk: usize) {}

    /// Reports that pages of `chunk` were taken back from the victim buffer.
    fn on_take_back(&mut self, _chunk: usize) {}

    /// Reports that `chunk` holds no memory any more (unmapped, discarded).
    fn on_forget(&mut self, _chunk: usize) {}
}

/// A sweep chosen by name, dispatched without a pointer.
#[derive(Debug)]
pub enum ChunkSweep {
    /// `fifo` and `clock`.
    Hand(HandSweep),
    /// `random`.
    Random(RandomSweep),
    /// `lru`.
    Lru(LruSweep),
    /// `sieve`.
    Sieve(SieveSweep),
}

impl ChunkSweep {
    /// Creates a sweep over chunks `0..chunk_count`; only `random` uses `seed`.
    #[must_use]
    pub fn new(kind: VictimKind, chunk_count: usize, seed: u64) -> Self {
        let mut sweep = match kind {
            VictimKind::Fifo => Self::Hand(HandSweep::new(false)),
            VictimKind::Clock => Self::Hand(HandSweep::new(true)),
            VictimKind::Random => Self::Random(RandomSweep::new(seed)),
            VictimKind::Lru => Self::Lru(LruSweep::new()),
            VictimKind::Sieve => Self::Sieve(SieveSweep::new()),
        };
        sweep.grow(chunk_count);
        sweep
    }

    /// True if `on_fetch` and `on_take_back` have an effect: otherwise fault threads need not take
    /// the lock for calling them.
    #[must_use]
    pub fn needs_events(&self) -> bool {
        matches!(self, Self::Lru(_) | Self::Sieve(_))
    }

    fn inner(&mut self) -> &mut dyn SweepPolicy {
        match self {
            Self::Hand(sweep) => sweep,
            Self::Random(sweep) => sweep,
            Self::Lru(sweep) => sweep,
            Self::Sieve(sweep) => sweep,
        }
    }
}

impl SweepPolicy for ChunkSweep {
    fn grow(&mut self, chunk_count: usize) {
        self.inner().grow(chunk_count);
    }

    fn next_chunk(&mut self) -> Option<usize> {
        self.inner().next_chunk()
    }

    fn pass_over(&mut self, count: usize) {
        self.inner().pass_over(count);
    }

    fn choose(&mut self, chunk: usize, resident: u64, hot: u64) -> Choice {
        self.inner().choose(chunk, resident, hot)
    }

    fn on_fetch(&mut self, chunk: usize) {
        self.inner().on_fetch(chunk);
    }

    fn on_take_back(&mut self, chunk: usize) {
        self.inner().on_take_back(chunk);
    }

    fn on_forget(&mut self, chunk: usize) {
        self.inner().on_forget(chunk);
    }
}

/// Evicts everything resident, hot or not.
fn take_all(resident: u64, hot: u64) -> Choice {
    Choice { take: resident, clear_hot: hot }
}

/// Evicts the cold pages; the hot ones are spared, and those whose turn it is in this lap lose the
/// mark.
fn spare_hot(resident: u64, hot: u64, lap: u32) -> Choice {
    let turn = EVERY_EIGHTH_PAGE << (lap % HOT_LAPS);
    Choice { take: resident & !hot, clear_hot: hot & turn }
}

/// A hand that cycles over the chunks in address order.
#[derive(Debug)]
pub struct HandSweep {
    chunk_count: usize,
    hand: usize,
    lap: u32,
    spare_hot: bool,
}

impl HandSweep {
    fn new(spare_hot: bool) -> Self {
        Self { chunk_count: 0, hand: 0, lap: 0, spare_hot }
    }
}

impl SweepPolicy for HandSweep {
    fn grow(&mut self, chunk_count: usize) {
        self.chunk_count = self.chunk_count.max(chunk_count);
    }

    fn next_chunk(&mut self) -> Option<usize> {
        if self.hand >= self.chunk_count {
            self.hand = 0;
            self.lap = self.lap.wrapping_add(1);
        }
        let chunk = self.hand;
        self.hand += 1;
        (self.chunk_count > 0).then_some(chunk)
    }

    fn pass_over(&mut self, count: usize) {
        self.hand = self.hand.saturating_add(count).min(self.chunk_count);
    }

    fn choose(&mut self, _chunk: usize, resident: u64, hot: u64) -> Choice {
        if self.spare_hot { spare_hot(resident, hot, self.lap) } else { take_all(resident, hot) }
    }
}

/// Random chunks.
///
/// The evictor's rule for giving up fits: 9n draws miss a chunk with a probability of 1 in 8000.
#[derive(Debug)]
pub struct RandomSweep {
    chunk_count: u32,
    rng: Rng,
}

impl RandomSweep {
    fn new(seed: u64) -> Self {
        Self { chunk_count: 0, rng: Rng::new(seed) }
    }
}

impl SweepPolicy for RandomSweep {
    fn grow(&mut self, chunk_count: usize) {
        self.chunk_count = self.chunk_count.max(exactly(chunk_count));
    }

    fn next_chunk(&mut self) -> Option<usize> {
        (self.chunk_count > 0).then(|| self.rng.below(self.chunk_count) as usize)
    }

    fn choose(&mut self, _chunk: usize, resident: u64, hot: u64) -> Choice {
        take_all(resident, hot)
    }
}

/// Returns the number of `chunk` in a queue, if the queue has grown to hold it.
fn queued(queue: &IndexList, chunk: usize) -> Option<u32> {
    (chunk < queue.capacity()).then(|| exactly(chunk))
}

/// Chunks in order of their last fetch or take-back; the least recent is evicted first.
#[derive(Debug)]
pub struct LruSweep {
    queue: IndexList,
    /// Finds chunks that were never announced, once the queue is empty.
    strays: HandSweep,
}

impl LruSweep {
    fn new() -> Self {
        Self { queue: IndexList::new(0), strays: HandSweep::new(false) }
    }

    fn refresh(&mut self, chunk: usize) {
        if let Some(chunk) = queued(&self.queue, chunk) {
            self.queue.remove(chunk);
            self.queue.push_front(chunk);
        }
    }
}

impl SweepPolicy for LruSweep {
    fn grow(&mut self, chunk_count: usize) {
        self.queue.grow(chunk_count);
        self.strays.grow(chunk_count);
    }

    fn next_chunk(&mut self) -> Option<usize> {
        let Some(chunk) = self.queue.back() else {
            return self.strays.next_chunk();
        };
        self.queue.move_to_front(chunk);
        Some(chunk as usize)
    }

    fn choose(&mut self, chunk: usize, resident: u64, hot: u64) -> Choice {
        self.on_forget(chunk);
        take_all(resident, hot)
    }

    fn on_fetch(&mut self, chunk: usize) {
        self.refresh(chunk);
    }

    fn on_take_back(&mut self, chunk: usize) {
        self.refresh(chunk);
    }

    fn on_forget(&mut self, chunk: usize) {
        if let Some(chunk) = queued(&self.queue, chunk) {
            self.queue.remove(chunk);
        }
    }
}

/// SIEVE by chunk: in order of arrival; a chunk used since the hand passed is spared once in place.
#[derive(Debug)]
pub struct SieveSweep {
    queue: IndexList,
    visited: BitSet,
    hand: Option<u32>,
    lap: u32,
    /// Finds chunks that were never announced, once the queue is empty.
    strays: HandSweep,
}

impl SieveSweep {
    fn new() -> Self {
        Self {
            queue: IndexList::new(0),
            visited: BitSet::new(0),
            hand: None,
            lap: 0,
            strays: HandSweep::new(false),
        }
    }

    fn visit(&mut self, chunk: usize) {
        let Some(chunk) = queued(&self.queue, chunk) else {
            return;
        };
        if self.queue.contains(chunk) {
            self.visited.set(chunk);
        } else {
            self.queue.push_front(chunk);
        }
    }

    /// Terminates: every chunk passed loses its mark.
    fn next_unvisited(&mut self) -> Option<u32> {
        loop {
            let chunk = self.hand.or_else(|| self.queue.back())?;
            self.hand = self.queue.newer(chunk);
            if self.hand.is_none() {
                self.lap = self.lap.wrapping_add(1);
            }
            if !self.visited.take(chunk) {
                return Some(chunk);
            }
        }
    }
}

impl SweepPolicy for SieveSweep {
    fn grow(&mut self, chunk_count: usize) {
        self.queue.grow(chunk_count);
        self.visited.grow(chunk_count);
        self.strays.grow(chunk_count);
    }

    fn next_chunk(&mut self) -> Option<usize> {
        self.next_unvisited().map(|chunk| chunk as usize).or_else(|| self.strays.next_chunk())
    }

    fn choose(&mut self, chunk: usize, resident: u64, hot: u64) -> Choice {
        let choice = spare_hot(resident, hot, self.lap);
        if resident & !choice.take == 0 {
            self.on_forget(chunk);
        }
        choice
    }

    fn on_fetch(&mut self, chunk: usize) {
        self.visit(chunk);
    }

    fn on_take_back(&mut self, chunk: usize) {
        self.visit(chunk);
    }

    fn on_forget(&mut self, chunk: usize) {
        let Some(chunk) = queued(&self.queue, chunk) else {
            return;
        };
        if self.hand == Some(chunk) {
            self.hand = self.queue.newer(chunk);
        }
        self.visited.clear(chunk);
        self.queue.remove(chunk);
    }
}
