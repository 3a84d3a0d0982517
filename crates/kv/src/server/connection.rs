//! One client: what came and is not a whole request yet, and the replies in their order.
//!
//! Replies to one client go out in the order of its requests, but some are made elsewhere and come
//! later. The queue of [`Piece`]s keeps that order: bytes that are ready lie in one buffer, and what is
//! still awaited holds back what comes behind it. No I/O here.

use std::collections::VecDeque;

use super::dump::Dump;
use super::report::Gather;
use super::watch::Watch;

/// Replies of one connection that may be awaited at a time; then it is not read until some came.
pub const AWAITED_MAX: usize = 4096;

/// A reply's number among those of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

#[derive(Debug)]
enum Piece {
    /// The next so many bytes of the buffer.
    Ready { bytes: usize },
    /// Another shard makes it.
    Awaited,
    /// It came, but something before it did not.
    Arrived(Vec<u8>),
    /// All shards contribute.
    Gathered(Box<Gather>),
}

/// The replies of one connection, in order.
#[derive(Debug, Default)]
pub struct Replies {
    pieces: VecDeque<Piece>,
    /// The number of the first piece.
    first: u64,
    /// The bytes of all `Ready` pieces, one after the other.
    ready: Vec<u8>,
    ready_from: usize,
}

impl Replies {
    /// Whether nothing is awaited and nothing kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Adds bytes that are ready. Only needed while something is awaited.
    pub fn push_ready(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.ready.extend_from_slice(bytes);
        if let Some(Piece::Ready { bytes: last }) = self.pieces.back_mut() {
            *last += bytes.len();
        } else {
            self.pieces.push_back(Piece::Ready { bytes: bytes.len() });
        }
    }

    /// Keeps a place for a reply that another shard makes.
    pub fn push_awaited(&mut self) -> Ticket {
        self.pieces.push_back(Piece::Awaited);
        Ticket(self.first + self.pieces.len() as u64 - 1)
    }

    /// Keeps a place for a reply to which all shards contribute.
    pub fn push_gathered(&mut self, gather: Gather) -> Ticket {
        self.pieces.push_back(Piece::Gathered(Box::new(gather)));
        Ticket(self.first + self.pieces.len() as u64 - 1)
    }

    /// A reply has come: it goes to `out` if it is next, else it waits its turn.
    pub fn arrive(&mut self, ticket: Ticket, reply: &[u8], out: &mut Vec<u8>) {
        if ticket.0 == self.first {
            self.pieces.pop_front();
            self.first += 1;
            out.extend_from_slice(reply);
            self.drain(out);
        } else if let Some(piece) = self.piece_mut(ticket) {
            *piece = Piece::Arrived(reply.to_vec());
        }
    }

    /// What all shards contribute to.
    pub fn gathered_mut(&mut self, ticket: Ticket) -> Option<&mut Gather> {
        match self.piece_mut(ticket)? {
            Piece::Gathered(gather) => Some(gather),
            _ => None,
        }
    }

    fn piece_mut(&mut self, ticket: Ticket) -> Option<&mut Piece> {
        let at = usize::try_from(ticket.0.checked_sub(self.first)?).ok()?;
        self.pieces.get_mut(at)
    }

    /// Moves everything that nothing awaited holds back to `out`.
    pub fn drain(&mut self, out: &mut Vec<u8>) {
        while let Some(piece) = self.pieces.front() {
            match piece {
                Piece::Ready { bytes } => {
                    out.extend_from_slice(&self.ready[self.ready_from..self.ready_from + bytes]);
                    self.ready_from += bytes;
                }
                Piece::Arrived(reply) => out.extend_from_slice(reply),
                Piece::Awaited | Piece::Gathered(_) => break,
            }
            self.pieces.pop_front();
            self.first += 1;
        }
        if self.ready_from == self.ready.len() {
            self.ready = Vec::new();
            self.ready_from = 0;
        }
    }
}

/// What a connection is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Requests, one after the other.
    Requests,
    /// So many bytes of data that nobody wants, then requests.
    Skipping { bytes: usize },
    /// Everything asked before is answered, then the connection ends.
    Closing,
}

/// Where a long `get` goes on after the reply so far was sent: so many bytes behind its first key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    pub done_bytes: usize,
}

/// What is known of one client.
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
    /// It is told what happens, and nothing that it sends is looked at.
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
}

impl Client {
    #[must_use]
    pub fn new(is_authenticated: bool, now_s: u32) -> Self {
        Self {
            input: Vec::new(),
            want_bytes: 0,
            has_turn_left: false,
            phase: Phase::Requests,
            resume: None,
            dump: None,
            replies: Replies::default(),
            awaited: 0,
            watch: None,
            unsent: Vec::new(),
            sent_bytes: 0,
            is_authenticated,
            is_refused: false,
            last_active_s: now_s,
            requests: 0,
        }
    }

    /// Whether so much is awaited from other shards that nothing more is taken on.
    #[must_use]
    pub fn is_held_up(&self) -> bool {
        self.replies.len() >= AWAITED_MAX
    }

    /// Whether kept input can be served as soon as replies can be sent. The next piece of a list comes when nothing is
    /// awaited any more.
    #[must_use]
    pub fn is_served_next(&self) -> bool {
        let waits = self.dump.is_some() && !self.replies.is_empty();
        self.has_turn_left && !waits && !self.is_held_up() && self.phase != Phase::Closing
    }

    /// Whether everything that was asked is answered and sent.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.unsent.is_empty() && self.replies.is_empty() && self.awaited == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_go_out_in_order() {
        let mut replies = Replies::default();
        let mut out = Vec::new();
        let first = replies.push_awaited();
        replies.push_ready(b"b");
        replies.push_ready(b"c");
        let second = replies.push_awaited();
        let third = replies.push_awaited();
        replies.push_ready(b"f");
        replies.arrive(third, b"e", &mut out);
        assert_eq!(out, b"");
        replies.arrive(first, b"a", &mut out);
        assert_eq!(out, b"abc");
        let fourth = replies.push_awaited();
        replies.arrive(second, b"d", &mut out);
        assert_eq!(out, b"abcdef");
        replies.arrive(fourth, b"g", &mut out);
        assert_eq!(out, b"abcdefg");
        assert!(replies.is_empty());
    }
}
