//! How threads talk: each has one mailbox, into which every other thread puts whole batches.
//!
//! A batch is one message per round of the sender's loop, whatever number of requests it carries,
//! so the lock (held for one push) is paid per batch and not per request. A thread that is awake
//! looks into its mailbox every round; only one that sleeps is woken.

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

/// What a batch keeps for its next use, at most: entries, and bytes of requests or replies.
const KEPT_ENTRIES: usize = 4096;
const KEPT_BYTES: usize = 1 << 20;

/// A reply's number among those of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Which connection of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionId {
    pub number: u32,
    /// Tells a connection from an earlier one of the same number.
    pub generation: u32,
}

impl ConnectionId {
    /// Where the reply with this number goes.
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

/// The sender: the thread that has the client, and where the answer goes there.
#[derive(Debug, Clone, Copy)]
pub struct Origin {
    pub thread: usize,
    pub address: Address,
}

/// How one key of a `get` is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GetKey {
    pub flags: ReadFlags,
    /// It is the last key of its line.
    pub is_last: bool,
}

/// A classic command that stores, but for key and data.
#[derive(Debug, Clone, Copy)]
pub struct StoreHead {
    pub mode: StoreMode,
    pub key_bytes: u8,
    pub quiet: bool,
    pub client_flags: u32,
    pub exptime: i32,
    pub cas: u64,
}

/// What a thread asks another's shard.
#[derive(Debug, Clone, Copy)]
pub enum Ask {
    /// One key of a `get`: its bytes are the key. With the last key the reply ends, too.
    GetKey { hash: u64, read: GetKey },
    /// Some keys of a `get`: its bytes are the keys ([`crate::mail::merge::read_keys`]).
    GetKeys { part: PartNumber, flags: ReadFlags },
    /// A classic command that stores: its bytes are the key and the data.
    Store { hash: u64, store: StoreHead },
    /// Any other request on one key: its bytes are the request, data included.
    Request,
    /// A KeyVault frame: its bytes are the frame.
    KeyVault { checked: bool },
    /// Take out what the key has: its bytes are the key. There is no reply.
    Drop,
    /// `flush_all` from this second of the clock on.
    Flush { at_s: u32 },
    /// Change the shard's memory limit.
    SetLimit { bytes: usize },
    /// Count commands by prefix, or no more.
    CountPrefixes { on: bool },
    /// Leave what the observer has seen among the shared things.
    LeaveObserved,
    /// One piece of a list.
    List { list: List, from: usize, lines_max: usize, bytes_max: usize },
    /// Say what the shard did and has.
    Report,
    /// Count anew.
    ResetCounts,
}

/// One request or reply of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Entry<T> {
    pub address: Address,
    pub what: T,
    /// Its bytes end here in the batch's; they begin where the ones before end.
    pub end: usize,
}

const _: () = assert!(size_of::<Entry<Ask>>() <= 64, "an ask fits a cache line");

/// What another shard answers.
#[derive(Debug)]
pub enum Answer {
    Bytes,
    /// To some keys of a `get`: its bytes are the part of the reply
    /// ([`crate::mail::merge::write_part`]).
    Part(PartNumber),
    /// The reply waits for a lower tier and comes later: what is ready need not wait for it.
    Parked,
    /// A piece of a list; its lines are the bytes.
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

    /// Empties it for its next use. What one large batch took is given back.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.entries.shrink_to(KEPT_ENTRIES);
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES);
    }
}

/// What a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Text,
    KeyVault,
}

/// Lines of one thread's journal.
#[derive(Debug)]
pub struct Told {
    pub lines: Lines,
    pub dropped: u64,
}

/// Messages between threads.
#[derive(Debug)]
pub enum Message {
    /// A client to serve; `input` is what it sent already.
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
    /// Lines for this thread's watchers.
    Told(Arc<Told>),
    /// Far memory comes, or has to be given back.
    Far(FarOrder),
    /// Finish what clients were promised, then end.
    Stop,
}

/// A thread's mailbox.
#[derive(Debug)]
pub struct Mailbox {
    messages: Mutex<Vec<Message>>,
    /// The owner waits for `wake` and polls nothing else. Set before the owner checks the mailbox
    /// for the last time, so that a later sender sees it.
    is_asleep: AtomicBool,
    /// Written when something has come for an owner who sleeps. Never read: it counts to 2^64.
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

    /// Puts a message in and wakes the owner if he sleeps.
    pub fn put(&self, message: Message) {
        self.messages().push(message);
        // The lock orders this look after the owner's last one, or his mark before it.
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            // Fails only when the counter is full: not in a thousand years of wake-ups.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// To be called by the owner before he waits. False if something has come, and then he must
    /// not.
    pub fn fall_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::Relaxed);
        let is_empty = self.messages().is_empty();
        if !is_empty {
            self.wake_up();
        }
        is_empty
    }

    /// To be called by the owner when he has waited.
    pub fn wake_up(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    /// Takes everything out, in exchange for an empty list.
    pub fn take_into(&self, list: &mut Vec<Message>) {
        debug_assert!(list.is_empty(), "messages are taken in exchange for nothing");
        std::mem::swap(list, &mut *self.messages());
    }
}
