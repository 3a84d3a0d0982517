//! One client: what came and is not a whole request yet, and what it waits for. No I/O here.

use farpool_kv_store::observe::journal::Kinds;

use super::replies::{AWAITED_MAX, READY_BYTES_MAX, Replies};
use crate::watch::dump::Dump;

/// Replies of one connection that may be awaited at a time, at least; at most [`AWAITED_MAX`]. Then
/// it is not read until some came.
const AWAITED_MIN: usize = 64;
/// Within these bounds, what is awaited takes no more than this when it has come. Nobody knows
/// before.
const AWAITED_BYTES_MAX: usize = 64 << 20;

/// What a client that watches wants, and what it missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    pub kinds: Kinds,
    pub skipped: u64,
}

/// Why a connection ended, in memcached's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    Error,
    Normal,
    IdleTimeout,
}

impl CloseReason {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Normal => "normal",
            Self::IdleTimeout => "idle_timeout",
        }
    }
}

/// What a connection is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Requests, one after the other.
    Requests,
    /// This many bytes of data to be skipped, then requests.
    Skipping { bytes: usize },
    /// Everything asked before is answered, then the connection ends.
    Closing,
}

/// Where a long `get` continues after the reply so far was sent: this many bytes behind its first
/// key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    pub done_bytes: usize,
}

/// The state of one client.
#[derive(Debug)]
pub struct Client {
    /// What came and was not processed: an incomplete request, or what back-pressure holds up.
    pub input: Vec<u8>,
    /// How long the incomplete request at the start of `input` will be at least.
    pub want_bytes: usize,
    /// `input` begins with a whole request whose turn is yet to come.
    pub has_turn_left: bool,
    pub phase: Phase,
    pub resume: Option<Resume>,
    /// A long list that is not whole yet; its request stays at the start of `input`.
    pub dump: Option<Dump>,
    pub replies: Replies,
    /// Answers over KeyVault that other shards or lower tiers owe it; they come in any order.
    pub awaited: usize,
    /// Answers to it wait for room in its ring; nothing more is taken on before they have it.
    pub is_ring_full: bool,
    /// It is a watcher: events are sent to it, and its input is ignored.
    pub watch: Option<Watch>,
    /// What could not be sent yet, and how much of it was.
    pub unsent: Vec<u8>,
    pub sent_bytes: usize,
    /// False until a client that must says who it is.
    pub is_authenticated: bool,
    /// It is sent away for what it sent.
    pub is_refused: bool,
    pub last_active_s: u32,
    pub requests: u64,
    awaited_max: usize,
}

impl Client {
    /// A client that has just come; no reply to it has a value beyond `item_bytes_max`.
    #[must_use]
    pub fn new(is_authenticated: bool, now_s: u32, item_bytes_max: usize) -> Self {
        Self {
            awaited_max: (AWAITED_BYTES_MAX / item_bytes_max.max(1))
                .clamp(AWAITED_MIN, AWAITED_MAX),
            input: Vec::new(),
            want_bytes: 0,
            has_turn_left: false,
            phase: Phase::Requests,
            resume: None,
            dump: None,
            replies: Replies::default(),
            awaited: 0,
            is_ring_full: false,
            watch: None,
            unsent: Vec::new(),
            sent_bytes: 0,
            is_authenticated,
            is_refused: false,
            last_active_s: now_s,
            requests: 0,
        }
    }

    /// True if so many replies are awaited from other shards, or so many bytes are not taken by the
    /// client, that no further request is accepted.
    #[must_use]
    pub fn is_held_up(&self) -> bool {
        self.is_held_up_by(0)
    }

    /// The same, with this many more replies to be awaited.
    #[must_use]
    pub fn is_held_up_by(&self, more: usize) -> bool {
        self.is_ring_full
            || self.replies.awaited().max(self.awaited) + more >= self.awaited_max
            || self.replies.ready_bytes() >= READY_BYTES_MAX
    }

    /// Whether kept input can be served as soon as replies can be sent. The next piece of a list
    /// comes when nothing is awaited any more.
    #[must_use]
    pub fn is_served_next(&self) -> bool {
        let waits = self.dump.is_some() && !self.replies.is_empty();
        self.has_turn_left && !waits && !self.is_held_up() && self.phase != Phase::Closing
    }

    /// Whether more is read from the client: not while it does not read, or waits for its turn.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.unsent.is_empty()
            && self.phase != Phase::Closing
            && !self.is_held_up()
            && !self.has_turn_left
    }

    /// Whether everything that was asked is answered and sent.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.unsent.is_empty() && self.replies.is_empty() && self.awaited == 0 && !self.is_ring_full
    }
}
