//! One client: its unprocessed input, and what it waits for. No I/O here.

use farpool_kv_protocol::binary;
use farpool_kv_store::observe::journal::Kinds;

use super::replies::{ASKED_BYTES_MAX, AWAITED_MAX, READY_BYTES_MAX, Replies};
use crate::settings::Dialect;
use crate::watch::dump::Dump;

/// The lowest limit on awaited replies of one connection; the highest is [`AWAITED_MAX`]. At the
/// limit it is not read until some have arrived.
const AWAITED_MIN: usize = 64;
/// Within these bounds, awaited replies take no more memory than this once they arrive: their size
/// is unknown before.
const AWAITED_BYTES_MAX: usize = 64 << 20;
/// No further request is taken while so many bytes of replies are kept or, going by those that
/// arrived lately, expected.
const EXPECTED_BYTES_MAX: usize = 1 << 20;

/// A client that reads its replies more slowly than this, in bytes a second, does not read them as
/// far as memory is concerned: when replies take too much, it is among those that are closed. What
/// serves a cache is a network on which others read many times as fast, even all together.
pub(crate) const READ_BYTES_PER_S_MIN: usize = 1 << 20;

/// What a watching client wants to be told, and how many events it missed.
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
    /// This many bytes of data that are discarded, then requests.
    Skipping { bytes: usize },
    /// Earlier requests are still answered, then the connection ends.
    Closing,
}

/// Where a long `get` resumes after the reply so far was sent: this many bytes behind its first
/// key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    pub done_bytes: usize,
}

/// The state of one client.
#[derive(Debug)]
pub struct Client {
    /// Unprocessed input: an incomplete request, or what backpressure holds up.
    pub input: Vec<u8>,
    /// Minimum length of the incomplete request at the start of `input`.
    pub want_bytes: usize,
    /// `input` begins with a complete request that waits for the next turn.
    pub has_turn_left: bool,
    pub phase: Phase,
    /// Which protocol it speaks, once it has sent something.
    pub dialect: Dialect,
    pub resume: Option<Resume>,
    /// A long list that is not complete yet; its request stays at the start of `input`.
    pub dump: Option<Dump>,
    pub replies: Replies,
    /// KeyVault answers that other shards or lower tiers still owe it; they arrive in any order.
    pub awaited: usize,
    /// Answers to it wait for room in its ring; no further request is taken before they have it.
    pub is_ring_full: bool,
    /// Set if it watches events; its input is then ignored.
    pub watch: Option<Watch>,
    /// Output that could not be sent yet, and how much of it has been.
    pub unsent: Vec<u8>,
    pub sent_bytes: usize,
    /// Since when there has been some, without a moment in which there was none.
    pub unsent_since_s: Option<u32>,
    /// False until a client that has to authenticate has done so.
    pub is_authenticated: bool,
    /// It has begun to authenticate, and is to send its name and password next (binary protocol).
    pub sasl_has_begun: bool,
    /// The connection is closed because of what the client sent.
    pub is_refused: bool,
    pub last_active_s: u32,
    pub requests: u64,
    awaited_max: usize,
}

impl Client {
    /// A new client. No reply to it has a value longer than `item_bytes_max`.
    #[must_use]
    pub fn new(is_authenticated: bool, now_s: u32, item_bytes_max: usize) -> Self {
        Self {
            awaited_max: (AWAITED_BYTES_MAX / item_bytes_max.max(1))
                .clamp(AWAITED_MIN, AWAITED_MAX),
            input: Vec::new(),
            want_bytes: 0,
            has_turn_left: false,
            phase: Phase::Requests,
            dialect: Dialect::Auto,
            resume: None,
            dump: None,
            replies: Replies::default(),
            awaited: 0,
            is_ring_full: false,
            watch: None,
            unsent: Vec::new(),
            sent_bytes: 0,
            unsent_since_s: None,
            is_authenticated,
            sasl_has_begun: false,
            is_refused: false,
            last_active_s: now_s,
            requests: 0,
        }
    }

    /// The protocol that it speaks: if both are allowed, the first byte that it sends decides.
    pub fn decide_dialect(&mut self, input: &[u8]) -> Dialect {
        if let (Dialect::Auto, Some(&first)) = (self.dialect, input.first()) {
            self.dialect = if first == binary::MAGIC { Dialect::Binary } else { Dialect::Text };
        }
        self.dialect
    }

    /// Discards up to `available` bytes of the data that is to be skipped. Returns how many.
    pub fn skip(&mut self, available: usize) -> usize {
        let Phase::Skipping { bytes } = self.phase else { return 0 };
        let skipped = bytes.min(available);
        let left = bytes - skipped;
        self.phase = if left == 0 { Phase::Requests } else { Phase::Skipping { bytes: left } };
        skipped
    }

    /// Whether so much is awaited from other shards, or not read by the client, that no further
    /// request is taken.
    #[must_use]
    pub fn is_held_up(&self) -> bool {
        self.is_held_up_by(0)
    }

    /// As [`Self::is_held_up`], with `more` additional awaited replies.
    #[must_use]
    pub fn is_held_up_by(&self, more: usize) -> bool {
        self.is_ring_full
            || self.replies.awaited().max(self.awaited) + more >= self.awaited_max
            || self.replies.ready_bytes() >= READY_BYTES_MAX
            || self.replies.asked_bytes() >= ASKED_BYTES_MAX
            || self.replies.awaited() > 0 && self.replies.expected_bytes(more) >= EXPECTED_BYTES_MAX
    }

    /// Whether kept input can be served as soon as replies can be sent. The next piece of a list is
    /// made only when nothing is awaited any more.
    #[must_use]
    pub fn is_served_next(&self) -> bool {
        let waits = self.dump.is_some() && !self.replies.is_empty();
        self.has_turn_left && !waits && !self.is_held_up() && self.phase != Phase::Closing
    }

    /// Whether more input is read: not while the client does not read, or waits for its turn.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.unsent.is_empty()
            && self.phase != Phase::Closing
            && !self.is_held_up()
            && !self.has_turn_left
    }

    /// Memory that its bytes take: requests that are not complete, and replies not sent yet.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.withheld_bytes() + self.replies.held_bytes()
    }

    /// The part of [`Self::held_bytes`] that only the client can end: it does not send the rest of
    /// a request, or does not read.
    #[must_use]
    pub const fn withheld_bytes(&self) -> usize {
        self.input.capacity() + self.unsent.capacity()
    }

    /// How much input the client has not made complete, times how long: the present second counts.
    #[must_use]
    pub fn input_byte_seconds(&self, now_s: u32) -> u64 {
        (self.input.capacity() as u64).saturating_mul(self.idle_s(now_s) + 1)
    }

    /// Notes that output could not be sent, if there is some.
    pub fn note_unsent(&mut self, now_s: u32) {
        if !self.unsent.is_empty() {
            self.unsent_since_s.get_or_insert(now_s);
        }
    }

    /// Notes that everything was sent.
    pub fn note_sent(&mut self) {
        self.unsent = Vec::new();
        self.sent_bytes = 0;
        self.unsent_since_s = None;
    }

    /// How much the client has not read, times the seconds for which it has not read; the first one
    /// does not count, nor do those in which it could have read what it did, at
    /// [`READ_BYTES_PER_S_MIN`].
    #[must_use]
    pub fn unread_byte_seconds(&self, now_s: u32) -> u64 {
        let waits_s = self.unsent_since_s.map_or(0, |since_s| now_s.saturating_sub(since_s));
        let read_s = (self.sent_bytes / READ_BYTES_PER_S_MIN) as u64;
        let unread_s = u64::from(waits_s).saturating_sub(1 + read_s);
        (self.unsent.capacity() as u64).saturating_mul(unread_s)
    }

    fn idle_s(&self, now_s: u32) -> u64 {
        u64::from(now_s.saturating_sub(self.last_active_s))
    }

    /// Whether every request is answered and the answers sent.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.unsent.is_empty() && self.replies.is_empty() && self.awaited == 0 && !self.is_ring_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_reads_too_slowly_withholds_replies() {
        let mut client = Client::new(true, 0, 1 << 20);
        client.note_unsent(5);
        assert_eq!(client.unread_byte_seconds(100), 0, "nothing is unsent");
        client.unsent = vec![0; 100 << 20];
        client.note_unsent(10);
        client.note_unsent(12);
        let bytes = client.unsent.capacity() as u64;
        assert_eq!(client.unread_byte_seconds(11), 0, "it has had no time");
        assert_eq!(client.unread_byte_seconds(14), 3 * bytes);
        client.sent_bytes = 3;
        assert_eq!(client.unread_byte_seconds(14), 3 * bytes, "a byte a second is nothing");
        client.sent_bytes = 2 * READ_BYTES_PER_S_MIN;
        assert_eq!(client.unread_byte_seconds(14), bytes);
        client.sent_bytes = 80 * READ_BYTES_PER_S_MIN;
        assert_eq!(client.unread_byte_seconds(14), 0, "it reads");
        client.note_sent();
        client.unsent.push(0);
        client.note_unsent(14);
        assert_eq!(client.unread_byte_seconds(15), 0, "it has read all in between");
    }
}
