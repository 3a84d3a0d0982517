//! Orders of the keeper of far memory to the shards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use farpool_kv_tier::far::{GrantNumber, Share};

/// An order to a shard about its far memory.
#[derive(Debug)]
pub enum FarOrder {
    /// Use this piece as well.
    Take { share: Box<Share>, held: Arc<Held> },
    /// Empty it: items worth keeping move or go to flash; what is left after `until` is dropped.
    Empty { grant: GrantNumber, until: Instant },
    /// Its memory is gone, or has to be given back at once.
    Drop { grant: GrantNumber, is_lost: bool },
    /// The memory of some of its blades is gone: the rest stays in use.
    DropLost { grant: GrantNumber },
}

/// How many shards still hold a connection to a piece of far memory.
#[derive(Debug, Default)]
pub struct Held(AtomicUsize);

impl Held {
    pub(super) fn by(shards: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(shards)))
    }

    /// Whether no shard uses it any more.
    pub(super) fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    pub(super) fn give_up(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}
