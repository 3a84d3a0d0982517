//! memcached's text protocol, classic and meta: bytes to requests ([`request`]), requests to
//! replies ([`classic`], [`meta`]); and its [`binary`] one. No I/O, no clock. Behaves as the
//! version of memcached that [`compat`] names, down to the bytes of its errors.

pub mod binary;
pub mod change;
pub mod classic;
pub mod command;
pub mod compat;
pub mod keyvault;
pub mod lease;
pub mod listing;
pub mod meta;
pub mod reply;
pub mod request;
pub mod token;

use farpool_kv_store::clock::Clock;
use farpool_kv_store::item::ItemView;
use farpool_kv_store::observe::Observer;
use farpool_kv_store::observe::journal::ReadStatus;
use farpool_kv_store::{Found, Store};

/// The state from which requests are answered.
#[derive(Debug)]
pub struct Shard {
    pub store: Store,
    pub clock: Clock,
    pub counts: CommandCounts,
    /// Observes the reads, if enabled.
    pub observer: Option<Box<Observer>>,
}

impl Shard {
    /// Reports a read to the observer.
    #[inline]
    pub fn observe_read(&mut self, key: &[u8], hash: u64, found: Option<Found>) {
        if let Some(observer) = &mut self.observer {
            let bytes = found.map(|found| self.store.view(found).header().footprint_bytes() as u64);
            observer.read(hash, key, bytes);
        }
    }

    /// Reports a read of an item that is not in memory to the observer and to watchers.
    pub fn observe_read_below(&mut self, hash: u64, item: &ItemView<'_>) {
        if let Some(observer) = &mut self.observer {
            observer.read(hash, item.key(), Some(item.header().footprint_bytes() as u64));
        }
        if let Some(journal) = self.store.journal_mut() {
            journal.read(item.key(), ReadStatus::Found, item.value().len());
        }
    }

    /// Reports a new item to the observer.
    #[inline]
    pub fn observe_stored(&mut self, key: &[u8], hash: u64, found: Found) {
        if let Some(observer) = &mut self.observer {
            let bytes = self.store.view(found).header().footprint_bytes();
            observer.stored(hash, key, bytes as u64);
        }
    }

    /// Counts a storage command and reports it to the observer.
    #[inline]
    pub fn count_set(&mut self, key: &[u8]) {
        self.counts.cmd_set += 1;
        if let Some(observer) = &mut self.observer {
            observer.set(key);
        }
    }

    /// Reports a delete command to the observer.
    #[inline]
    pub fn observe_delete(&mut self, key: &[u8]) {
        if let Some(observer) = &mut self.observer {
            observer.delete(key);
        }
    }
}

/// memcached's counts of commands, by their names in `stats`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct CommandCounts {
    pub cmd_get: u64,
    pub cmd_set: u64,
    pub cmd_touch: u64,
    pub cmd_meta: u64,
    pub get_hits: u64,
    pub get_misses: u64,
    pub delete_hits: u64,
    pub delete_misses: u64,
    pub incr_hits: u64,
    pub incr_misses: u64,
    pub decr_hits: u64,
    pub decr_misses: u64,
    pub cas_hits: u64,
    pub cas_misses: u64,
    pub cas_badval: u64,
    pub touch_hits: u64,
    pub touch_misses: u64,
    pub store_too_large: u64,
    pub store_no_memory: u64,
}
