//! Page caches of a fixed size under twelve policies and the optimum, exact, for simulation.
//!
//! Pages are dense numbers `0..page_count`, all state is in plain arrays, and every policy is a
//! type of its own: [`CacheKind::visit`] passes a cache of the named policy to a [`CacheVisitor`],
//! so that its loop is compiled for each. Nothing is allocated after construction, except that
//! [`Lfu`] makes room for a new count of references.
//!
//! LRU, FIFO, Clock, SIEVE and Random are the victim policies of [`crate::victim`] in a
//! [`Resident`]; the others decide what enters as well as what leaves, and are caches of their own.
//! [`Belady`], which has to know the future, is not a [`CacheKind`].
//!
//! The share of requests that miss, on traces of `farpool_sim::synthetic` with local memory for 50
//! % and 10 % of the pages that occur (`cargo bench -p farpool-sim --bench miss_ratios`):
//!
//! | local 50 / 10 % | Zipf 1 | hot tenth | loop | scan, hot set | phases | walk | one-time visitors |
//! |---|---|---|---|---|---|---|---|
//! | lru | .110 / .285 | .070 / .326 | 1.000 / 1.000 | .458 / .770 | .034 / .332 | .292 / .498 | .369 / .430 |
//! | fifo | .132 / .322 | .085 / .391 | 1.000 / 1.000 | .548 / .787 | .034 / .360 | .293 / .498 | .386 / .460 |
//! | clock | .108 / .276 | .070 / .302 | 1.000 / 1.000 | .448 / .756 | .036 / .325 | .291 / .500 | .367 / .422 |
//! | sieve | .103 / .237 | .070 / .198 | 1.000 / 1.000 | .444 / .564 | .047 / .410 | .291 / .509 | .367 / .397 |
//! | lfu | .103 / .237 | .070 / .197 | 1.000 / 1.000 | .444 / .558 | .486 / .906 | .480 / .870 | .367 / .397 |
//! | s3-fifo | .103 / .234 | .070 / .245 | .573 / .914 | .298 / .591 | .040 / .317 | .290 / .507 | .368 / .395 |
//! | arc | .105 / .239 | .070 / .219 | 1.000 / 1.000 | .444 / .564 | .035 / .344 | .291 / .501 | .367 / .394 |
//! | slru | .104 / .239 | .070 / .256 | .644 / .929 | .331 / .627 | .034 / .330 | .289 / .503 | .368 / .407 |
//! | 2q | .116 / .248 | .075 / .297 | 1.000 / 1.000 | .451 / .637 | .034 / .338 | .287 / .503 | .385 / .414 |
//! | lirs | .103 / .239 | .070 / .208 | .530 / .906 | .277 / .565 | .049 / .315 | .296 / .591 | .367 / .393 |
//! | w-tinylfu | .103 / .229 | .070 / .225 | .534 / .910 | .280 / .562 | .097 / .367 | .301 / .678 | .368 / .401 |
//! | random | .129 / .322 | .083 / .390 | .805 / 1.000 | .471 / .791 | .041 / .371 | .289 / .506 | .381 / .459 |
//! | belady | .068 / .167 | .048 / .121 | .525 / .905 | .275 / .476 | .034 / .125 | .134 / .347 | .365 / .365 |
//!
//! Counts are those of libCacheSim 0.3.5 to the last request for all but two (`farpool-sim`'s test
//! `oracle`): [`TinyLfu`], whose sketch ages as its paper says ([`Ageing::MainHits`] is
//! libCacheSim's way, and has its counts), and Random, whose victims are drawn independently here.
//! Where a queue of libCacheSim would have no room, because its percentage of a small capacity
//! rounds to zero, it has room for a page here; and where all pages fit, none leaves.

mod arc;
mod belady;
mod kind;
mod lfu;
mod lirs;
mod lists;
mod named_tiny_lfu;
mod resident;
mod s3_fifo;
mod sketch;
mod slru;
mod tiny_lfu;
mod two_q;

pub use arc::Arc;
pub use belady::{Belady, Future};
pub use kind::{CacheKind, CacheVisitor};
pub use lfu::Lfu;
pub use lirs::{LIRS_FAR_PERCENT, LIRS_STACK_TIMES, Lirs};
pub use named_tiny_lfu::NamedTinyLfu;
pub use resident::Resident;
pub use s3_fifo::{
    S3_FIFO_GHOST_PERCENT, S3_FIFO_PROMOTION_REFERENCES, S3_FIFO_SMALL_PERCENT, S3Fifo,
};
pub use slru::{SLRU_SEGMENTS, Slru};
pub use tiny_lfu::{
    Ageing, TINY_LFU_PROBATION_PERCENT, TINY_LFU_SAMPLE_PER_PAGE, TINY_LFU_WINDOW_PERCENT, TinyLfu,
};
pub use two_q::{TWO_Q_FIRST_PERCENT, TWO_Q_GHOST_PERCENT, TwoQ};

use std::fmt::Debug;

use farpool_units::exactly;

/// A cache that holds a fixed number of the pages `0..page_count`.
///
/// Page numbers at or above the `page_count` of construction are a programming error and panic.
pub trait PageCache: Debug {
    /// References `page`. True if it was resident; otherwise it becomes resident, and each evicted
    /// page is passed to `left`. With some policies ([`Slru`], [`TinyLfu`], [`Lirs`]) a hit can
    /// evict pages, too.
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool;

    /// True if `page` is resident.
    fn contains(&self, page: u32) -> bool;

    /// Removes `page`, which disappeared without being evicted (unmapped, discarded). False if it
    /// was not resident.
    fn remove(&mut self, page: u32) -> bool;

    /// Returns the number of resident pages.
    fn len(&self) -> usize;

    /// True if no page is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn checked_capacity(capacity: u32) -> u32 {
    assert!(capacity > 0, "a cache holds 1 page or more");
    capacity
}

/// Returns `percent` hundredths of `whole`, rounded down; `percent` is at most 100.
fn part(whole: u32, percent: u32) -> u32 {
    let part = u64::from(whole) * u64::from(percent) / 100;
    exactly(part)
}

/// Returns `percent` hundredths of a capacity, but at least one page.
fn percent(capacity: u32, percent: u32) -> u32 {
    part(capacity, percent).max(1)
}
