//! `watch`: clients that are told what happens, as it happens.
//!
//! Each thread keeps a journal while somebody watches, and hands its lines once a round to the threads that have watchers.
//! Watchers never hold anything up: who does not read fast enough misses lines and is told how many.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::net::{SocketAddrV4, SocketAddrV6};

use super::connection::Client;
use super::mailbox::Message;
use super::sockets::{Connection, ConnectionId};
use super::worker::Worker;
use farpool_kv_protocol::reply::push_line;
use farpool_kv_protocol::token::Words;
use farpool_kv_store::observe::journal::{Journal, Kinds, Lines, Peer};

/// As many as memcached takes.
const WATCHERS_MAX: usize = 20;
/// A watcher with so much unsent misses what comes then.
const UNSENT_BYTES_MAX: usize = 256 << 10;

#[derive(Debug)]
struct Watcher {
    thread: usize,
    id: ConnectionId,
    kinds: Kinds,
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
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut list);
        let kinds = list.iter().fold(Kinds::default(), |kinds, it| kinds.with(it.kinds));
        self.kinds.store(kinds.0, Ordering::Relaxed);
        result
    }

    /// False when there are as many as there may be.
    fn add(&self, watcher: Watcher) -> bool {
        self.change(|list| {
            let has_room = list.len() < WATCHERS_MAX;
            if has_room {
                list.push(watcher);
            }
            has_room
        })
    }

    fn remove(&self, thread: usize, id: ConnectionId) {
        self.change(|list| list.retain(|it| (it.thread, it.id) != (thread, id)));
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Threads that have any.
    fn threads(&self) -> Vec<usize> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let mut threads: Vec<usize> = list.iter().map(|it| it.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }
}

/// Lines of one thread's journal.
#[derive(Debug)]
pub struct Told {
    lines: Lines,
    dropped: u64,
}

/// What a client that watches wants, and what it missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    kinds: Kinds,
    skipped: u64,
}

/// Why a connection ended, in memcached's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    Error,
    Normal,
    IdleTimeout,
}

impl CloseReason {
    const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Normal => "normal",
            Self::IdleTimeout => "idle_timeout",
        }
    }
}

/// Who is at the other end.
fn peer(socket: &impl AsFd, is_local: bool) -> Peer {
    let number = socket.as_fd().as_raw_fd();
    let told = |address: String, port| Peer { address, port, is_local, number };
    if is_local {
        return told("unix".into(), 0);
    }
    let Ok(Some(address)) = rustix::net::getpeername(socket) else {
        return told("unknown".into(), 0);
    };
    if let Ok(v4) = SocketAddrV4::try_from(address.clone()) {
        told(v4.ip().to_string(), v4.port())
    } else if let Ok(v6) = SocketAddrV6::try_from(address) {
        told(v6.ip().to_string(), v6.port())
    } else {
        told("unknown".into(), 0)
    }
}

/// Answers `watch`: from now on the client is told, and what it sends is not looked at any more.
pub(super) fn begin(worker: &mut Worker, client: &mut Client, id: ConnectionId, words: &Words<'_>) {
    if !worker.shared.settings.allows_watch {
        return push_line(&mut worker.out, "CLIENT_ERROR watch commands not allowed");
    }
    let mut kinds = if words.len() > 1 { Kinds::default() } else { Kinds::FETCHERS };
    for name in words.from(1) {
        let Some(kind) = Kinds::named(name) else { return push_line(&mut worker.out, "ERROR") };
        kinds = kinds.with(kind);
    }
    if !worker.shared.watchers.add(Watcher { thread: worker.number, id, kinds }) {
        return push_line(&mut worker.out, "WATCHER_TOO_MANY log watcher limit reached");
    }
    client.watch = Some(Watch { kinds, skipped: 0 });
    push_line(&mut worker.out, "OK");
    worker.keep_journal();
}

impl Worker {
    /// Keeps a journal if somebody watches, and tells it the time. To be called every round.
    pub(super) fn keep_journal(&mut self) {
        let kinds = Kinds(self.shared.watchers.kinds.load(Ordering::Relaxed));
        let store = &mut self.shard.store;
        if kinds == Kinds::default() {
            if store.journal_mut().is_some() {
                store.set_journal(None);
            }
            return;
        }
        if store.journal_mut().is_none() {
            let numbers = Arc::clone(&self.shared.watchers.numbers);
            store.set_journal(Some(Box::new(Journal::new(kinds, numbers))));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Some(journal) = store.journal_mut() {
            journal.set_kinds(kinds);
            journal.set_now(now.as_secs(), now.subsec_micros());
        }
    }

    /// Whose requests the journal sees now.
    #[inline]
    pub(super) fn note_client(&mut self, connection: Option<&Connection>) {
        if let Some(journal) = self.shard.store.journal_mut() {
            journal.set_client(connection.map_or(0, |it| it.socket.as_raw_fd()));
        }
    }

    pub(super) fn note_opened(&mut self, connection: &Connection) {
        if let Some(journal) = self.shard.store.journal_mut() {
            journal.opened(&peer(&connection.socket, connection.is_local));
        }
    }

    /// A connection ends: whoever watches is told, and it watches no more itself.
    pub(super) fn note_closed(
        &mut self,
        number: u32,
        connection: &Connection,
        reason: CloseReason,
    ) {
        if let Some(journal) = self.shard.store.journal_mut() {
            journal.closed(&peer(&connection.socket, connection.is_local), reason.name());
        }
        if connection.client.watch.is_some() {
            let id = ConnectionId { number, generation: connection.generation };
            self.shared.watchers.remove(self.number, id);
        }
    }

    /// Hands what was written down to the threads that have watchers.
    pub(super) fn send_journal(&mut self) {
        let Some(journal) = self.shard.store.journal_mut() else { return };
        let Some((lines, dropped)) = journal.take() else { return };
        self.counts.journal_written += lines.iter().count() as u64;
        self.counts.journal_dropped += dropped;
        let told = Arc::new(Told { lines, dropped });
        for thread in self.shared.watchers.threads() {
            self.shared.mailboxes[thread].put(Message::Told(Arc::clone(&told)));
        }
    }

    /// Tells this thread's watchers.
    pub(super) fn tell_watchers(&mut self, told: &Told) {
        for number in 0..self.connections.len() {
            let watches = |it: &mut Connection| it.client.watch.is_some();
            let Some(mut connection) = self.connections[number].take_if(watches) else { continue };
            self.tell_watcher(&mut connection.client, told);
            let is_open = self.finish(&mut connection);
            self.put_back(number, connection, is_open);
        }
    }

    fn tell_watcher(&mut self, client: &mut Client, told: &Told) {
        let Some(mut watch) = client.watch else { return };
        watch.skipped += told.dropped;
        let waits = client.unsent.len() - client.sent_bytes + client.replies.ready_bytes();
        let has_room = waits < UNSENT_BYTES_MAX;
        if has_room && watch.skipped > 0 {
            let line = format!("skipped={}\n", std::mem::take(&mut watch.skipped));
            self.out.extend_from_slice(line.as_bytes());
        }
        for (_, line) in told.lines.iter().filter(|(kind, _)| watch.kinds.has(*kind)) {
            if has_room {
                self.out.extend_from_slice(line.as_bytes());
                self.counts.watcher_sent += 1;
            } else {
                watch.skipped += 1;
                self.counts.watcher_skipped += 1;
            }
        }
        client.watch = Some(watch);
        self.settle(client);
    }
}
