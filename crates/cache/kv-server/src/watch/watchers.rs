//! Clients that `watch`: which threads have some, and what they want to be told.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use farpool_kernel::lock;
use farpool_kv_store::observe::journal::Kinds;

use crate::mail::mailbox::ConnectionId;

/// As many as memcached takes.
const WATCHERS_MAX: usize = 20;

#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) thread: usize,
    pub(super) id: ConnectionId,
    pub(super) kinds: Kinds,
}

/// All watchers of a server.
#[derive(Debug, Default)]
pub struct Watchers {
    list: Mutex<Vec<Watcher>>,
    /// What any of them watches.
    kinds: AtomicU16,
    /// The number of the last event.
    numbers: Arc<AtomicU64>,
}

impl Watchers {
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Watcher>) -> T) -> T {
        let mut list = lock(&self.list);
        let result = change(&mut list);
        let kinds = list.iter().fold(Kinds::default(), |kinds, it| kinds.with(it.kinds));
        self.kinds.store(kinds.0, Ordering::Relaxed);
        result
    }

    /// False when there are as many as there may be.
    pub(super) fn add(&self, watcher: Watcher) -> bool {
        self.change(|list| {
            let has_room = list.len() < WATCHERS_MAX;
            if has_room {
                list.push(watcher);
            }
            has_room
        })
    }

    pub(super) fn remove(&self, thread: usize, id: ConnectionId) {
        self.change(|list| list.retain(|it| (it.thread, it.id) != (thread, id)));
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        lock(&self.list).len()
    }

    /// Threads that have any.
    pub(super) fn threads(&self) -> Vec<usize> {
        let list = lock(&self.list);
        let mut threads: Vec<usize> = list.iter().map(|it| it.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// What any of them watches.
    pub(super) fn kinds(&self) -> Kinds {
        Kinds(self.kinds.load(Ordering::Relaxed))
    }

    /// Where events get their numbers.
    pub(super) fn numbers(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.numbers)
    }
}
