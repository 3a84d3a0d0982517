//! Page caches of a fixed size under thirteen policies, exact, for simulation.
//!
//! Pages are dense numbers `0..page_count`, all state lies in plain arrays, and every policy is a type
//! of its own: [`CacheKind::visit`] hands a [`CacheVisitor`] a cache of the policy asked for, so that its
//! loop is compiled for each. Nothing is allocated after construction, except that [`Lfu`] makes room
//! for a new count of references.
//!
//! LRU, FIFO, Clock, SIEVE and Random are the victim policies of [`crate::victim`] in a [`Resident`];
//! the others decide what enters as well as what leaves, and are caches of their own.

mod arc;
mod belady;
mod kind;
mod lfu;
mod lirs;
mod lists;
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
pub use resident::Resident;
pub use s3_fifo::{
    S3_FIFO_GHOST_PERCENT, S3_FIFO_PROMOTION_REFERENCES, S3_FIFO_SMALL_PERCENT, S3Fifo,
};
pub use slru::{SLRU_SEGMENTS, Slru};
pub use tiny_lfu::{
    TINY_LFU_PROBATION_PERCENT, TINY_LFU_SAMPLE_PER_PAGE, TINY_LFU_WINDOW_PERCENT, TinyLfu,
};
pub use two_q::{TWO_Q_FIRST_PERCENT, TWO_Q_GHOST_PERCENT, TwoQ};

use std::fmt::Debug;

/// A cache that holds a fixed number of the pages `0..page_count`.
///
/// Page numbers at or above the `page_count` of construction are a programmer's error and panic.
pub trait PageCache: Debug {
    /// References `page`; true when it was resident. If not it is afterwards, and each page that had to
    /// leave is given to `left`. With some policies ([`Slru`], [`TinyLfu`], [`Lirs`]) pages can leave at
    /// a hit, too.
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool;

    /// Whether `page` is resident.
    fn contains(&self, page: u32) -> bool;

    /// `page` disappeared without being evicted (unmapped, discarded); false if it was not resident.
    fn remove(&mut self, page: u32) -> bool;

    /// Resident pages.
    fn len(&self) -> usize;

    /// No page is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn checked_capacity(capacity: u32) -> u32 {
    assert!(capacity > 0, "a cache holds 1 page or more");
    capacity
}

/// That many hundredths of `whole`, rounded down.
fn part(whole: u32, percent: u32) -> u32 {
    let part = u64::from(whole) * u64::from(percent) / 100;
    u32::try_from(part).unwrap_or(whole)
}

/// That many hundredths of a capacity, but a page at least.
fn percent(capacity: u32, percent: u32) -> u32 {
    part(capacity, percent).max(1)
}
