//! How threads talk: each has one mailbox, into which every other thread puts whole batches.
//!
//! A batch is one message per round of the sender's loop, however many requests it carries, so the
//! lock (held for one push) is paid per batch and not per request. A thread that is awake checks
//! its mailbox every round; only a sleeping one has to be woken.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use farpool_kernel::lock;
use rustix::event::{EventfdFlags, eventfd};

use crate::below::far::order::FarOrder;
use crate::mail::merge::PartNumber;
use crate::watch::dump::{List, Listed};
use crate::watch::report::ShardReport;
use farpool_kv_protocol::command::{ReadFlags, StoreMode};
use farpool_kv_store::observe::journal::Lines;

/// The most that a batch keeps for its next use: entries, and bytes of requests or replies.
const KEPT_ENTRIES: usize = 4096;
const KEPT_BYTES: usize = 256 << 10;

/// A reply's number among those of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A reply's number among those of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionId {
    pub number: u32,
    /// Distinguishes a connection from an earlier one with the same number.
    pub generation: u32,
}

impl ConnectionId {
    /// The address of the reply with this number.
    #[must_use]
    pub const fn address(self, ticket: Ticket) -> Address {
        Address { connection: self, ticket }
    }
}

/// Where a reply goes.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    pub connection: ConnectionId,
    pub ticket: Ticket,
}

/// The sender of an ask: the thread that has the client, and where the answer goes there.
#[derive(Debug, Clone, Copy)]
pub struct Origin {
    pub thread: usize,
    pub address: Address,
}

/// How one key of a `get` is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GetKey {
    pub flags: ReadFlags,
    /// Whether it is the last key of its line.
    pub is_last: bool,
}

/// A classic storage command, without key and data.
#[derive(Debug, Clone, Copy)]
pub struct StoreHead {
    pub mode: StoreMode,
    pub key_bytes: u8,
    pub quiet: bool,
    pub client_flags: u32,
    pub exptime: i32,
    pub cas: u64,
}

/// A request of one thread to another's shard.
#[derive(Debug, Clone, Copy)]
pub enum Ask {
    /// One key of a `get`: its bytes are the key. The last key's answer also ends the reply.
    GetKey { hash: u64, read: GetKey },
    /// Some keys of a `get`: its bytes are the keys ([`crate::mail::merge::read_keys`]).
    GetKeys { part: PartNumber, flags: ReadFlags },
    /// A classic storage command: its bytes are the key and the data.
    Store { hash: u64, store: StoreHead },
    /// Any other request on one key: its bytes are the request, data included.
    Request,
    /// A request on one key in the binary protocol: its bytes are the request, value included.
    Binary { hash: u64 },
    /// A KeyVault frame: its bytes are the frame.
    KeyVault { checked: bool },
    /// Remove the key's item: its bytes are the key. There is no reply.
    Drop,
    /// `flush_all` as of this second of the clock.
    Flush { at_s: Option<u32> },
    /// Change the shard's memory limit.
    SetLimit { bytes: usize },
    /// Start counting commands by prefix, or stop.
    CountPrefixes { on: bool },
    /// Publish what the observer has seen among the shared figures.
    LeaveObserved,
    /// One piece of a list.
    List { list: List, from: usize, lines_max: usize, bytes_max: usize },
    /// Report the shard's figures.
    Report,
    /// Reset the counts.
    ResetCounts,
}

/// One request or reply of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Entry<T> {
    pub address: Address,
    pub what: T,
    /// The end of its bytes in the batch's; they begin where the previous entry's end.
    pub end: usize,
}

const _: () = assert!(size_of::<Entry<Ask>>() <= 64, "an ask fits a cache line");

/// An answer of another shard.
#[derive(Debug)]
pub enum Answer {
    Bytes,
    /// For some keys of a `get`: its bytes are the part of the reply
    /// ([`crate::mail::merge::write_part`]).
    Part(PartNumber),
    /// The reply waits for a lower tier and arrives later: ready replies need not wait for it.
    Parked,
    /// A piece of a list; its bytes are the lines.
    Listed(Listed),
    Report(Box<ShardReport>),
}

/// Requests or replies, with their bytes.
#[derive(Debug)]
pub struct Batch<T> {
    pub entries: Vec<Entry<T>>,
    pub bytes: Vec<u8>,
}

impl<T> Default for Batch<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), bytes: Vec::new() }
    }
}

impl<T> Batch<T> {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds an entry whose bytes `write` appends.
    pub fn push(&mut self, address: Address, what: T, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.entries.push(Entry { address, what, end: self.bytes.len() });
    }

    /// The bytes of an entry.
    #[must_use]
    pub fn bytes_of(&self, entry: usize) -> &[u8] {
        let start = if entry == 0 { 0 } else { self.entries[entry - 1].end };
        &self.bytes[start..self.entries[entry].end]
    }

    /// Empties it for its next use. Memory beyond the usual is freed.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.entries.shrink_to(KEPT_ENTRIES);
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES);
    }
}

/// The protocol that a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// memcached's protocols.
    Text,
    /// The same, over TLS.
    TextOverTls,
    KeyVault,
}

/// Lines of one thread's journal.
#[derive(Debug)]
pub struct Told {
    pub lines: Lines,
    pub dropped: u64,
}

/// A message between threads.
#[derive(Debug)]
pub enum Message {
    /// A client to serve; `input` is what it has already sent.
    Client {
        socket: OwnedFd,
        is_local: bool,
        protocol: Protocol,
        input: Vec<u8>,
    },
    Asks {
        from: usize,
        batch: Batch<Ask>,
    },
    Answers(Batch<Answer>),
    /// Journal lines for this thread's watchers.
    Told(Arc<Told>),
    /// Far memory was granted, or has to be given back.
    Far(FarOrder),
    /// Finish the outstanding replies, then end.
    Stop,
}

/// A thread's mailbox.
#[derive(Debug)]
pub struct Mailbox {
    messages: Mutex<Vec<Message>>,
    /// Whether the owner waits for `wake` only. Set before the owner checks the mailbox for the
    /// last time, so that a sender that adds a message later sees it.
    is_asleep: AtomicBool,
    /// Written when a message was put in for a sleeping owner. Never read: it counts to 2^64.
    pub wake: OwnedFd,
}

impl Mailbox {
    pub fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { messages: Mutex::new(Vec::new()), is_asleep: AtomicBool::new(false), wake })
    }

    fn messages(&self) -> MutexGuard<'_, Vec<Message>> {
        lock(&self.messages)
    }

    /// Adds a message and wakes the owner if it sleeps.
    pub fn put(&self, message: Message) {
        self.messages().push(message);
        // The lock orders this load after the owner's last check, or after the mark that precedes
        // it.
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            // Fails only if the counter is full: not in a thousand years of wake-ups.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Marks the owner as asleep; the owner calls this before it waits. False if a message is
    /// there: then the owner must not wait.
    pub fn fall_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::Relaxed);
        let is_empty = self.messages().is_empty();
        if !is_empty {
            self.wake_up();
        }
        is_empty
    }

    /// Clears the mark; the owner calls this after waiting.
    pub fn wake_up(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    /// Takes all messages, in exchange for an empty list.
    pub fn take_into(&self, list: &mut Vec<Message>) {
        debug_assert!(list.is_empty(), "messages are taken in exchange for nothing");
        std::mem::swap(list, &mut *self.messages());
    }
}
