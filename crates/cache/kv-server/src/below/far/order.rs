//! What the keeper of far memory tells the shards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use farpool_kv_tier::far::{GrantNumber, Share};

/// Orders to a shard about far memory.
#[derive(Debug)]
pub enum FarOrder {
    /// Use this, too.
    Take { share: Box<Share>, held: Arc<Held> },
    /// Empty it: what is left after `until` is dropped. Items that are worth it move or go to
    /// flash.
    Empty { grant: GrantNumber, until: Instant },
    /// Its memory is gone, or has to be at once.
    Drop { grant: GrantNumber, is_lost: bool },
}

/// How many shards hold a way to a piece of far memory.
#[derive(Debug, Default)]
pub struct Held(AtomicUsize);

impl Held {
    pub(super) fn by(shards: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(shards)))
    }

    /// Whether no shard has anything to do with it any more.
    pub(super) fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    pub(super) fn give_up(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}
