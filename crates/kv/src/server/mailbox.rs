//! How threads talk: each has one mailbox, into which every other thread puts whole batches.
//!
//! A batch is one message per round of the sender's loop, whatever number of requests it carries, so
//! the lock (held for one push) and the wake-up are paid per batch and not per request.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::connection::Ticket;
use super::dump::{List, Listed};
use super::far::shard::FarOrder;
use super::report::ShardReport;
use super::watch::Told;

/// Where a reply goes.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    pub connection: u32,
    /// Tells a connection from an earlier one of the same number.
    pub generation: u32,
    pub ticket: Ticket,
}

/// What a thread asks another's shard.
#[derive(Debug, Clone, Copy)]
pub enum Ask {
    /// One key of a `get`: its bytes are the key.
    GetKey { with_cas: bool, touch: Option<i32> },
    /// Any other request on one key: its bytes are the request, data included.
    Request,
    /// A KeyVault frame: its bytes are the frame.
    Light { checked: bool },
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

/// What another shard answers.
#[derive(Debug)]
pub enum Answer {
    Bytes,
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
}

/// What a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Text,
    KeyVault,
}

/// What threads send each other.
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
    /// What this thread's watchers are to be told.
    Told(Arc<Told>),
    /// Finish what clients were promised, then end.
    /// Far memory comes, or has to be given back.
    Far(FarOrder),
    Stop,
}

/// A thread's mailbox.
#[derive(Debug)]
pub struct Mailbox {
    messages: Mutex<Vec<Message>>,
    /// Readable when something may have come.
    pub wake: OwnedFd,
}

impl Mailbox {
    pub fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { messages: Mutex::new(Vec::new()), wake })
    }

    /// Puts a message in and wakes the owner if it may be asleep.
    pub fn put(&self, message: Message) {
        let was_empty = {
            let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
            messages.push(message);
            messages.len() == 1
        };
        if was_empty {
            // Fails only when the counter is full, and then the owner is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Takes everything out.
    pub fn take(&self) -> Vec<Message> {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter);
        std::mem::take(&mut *self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
