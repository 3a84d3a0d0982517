//! Clients that `watch`: which threads have them, and which events they want.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use farpool_kernel::lock;
use farpool_kv_store::observe::journal::Kinds;

use crate::mail::mailbox::ConnectionId;

/// The most watchers; memcached has the same limit.
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
    /// The kinds of events that any of them watches.
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

    /// Adds a watcher. False if there are as many as allowed.
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

    /// The number of watchers.
    pub(crate) fn count(&self) -> usize {
        lock(&self.list).len()
    }

    /// Threads that have watchers.
    pub(super) fn threads(&self) -> Vec<usize> {
        let list = lock(&self.list);
        let mut threads: Vec<usize> = list.iter().map(|it| it.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// The kinds of events that any of them watches.
    pub(super) fn kinds(&self) -> Kinds {
        Kinds(self.kinds.load(Ordering::Relaxed))
    }

    /// The counter that numbers events.
    pub(super) fn numbers(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.numbers)
    }
}
