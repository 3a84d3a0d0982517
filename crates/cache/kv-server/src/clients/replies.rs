//! The replies to one client, in order.
//!
//! Replies to one client are sent in the order of its requests, but some are made elsewhere and
//! arrive later. The queue of [`Piece`]s keeps that order: ready bytes are in one buffer, and a
//! reply that is still awaited holds back those behind it. Those in front wait as well while
//! another thread is about to answer, so that requests that arrived together are answered in one
//! write. No I/O here.

use std::collections::VecDeque;

use crate::mail::mailbox::Ticket;
use crate::mail::merge::{Merge, PartNumber};
use crate::watch::report::Gather;

/// The most replies of one connection that may be awaited at a time.
pub const AWAITED_MAX: usize = 4096;
/// The most bytes of replies made behind one that is awaited; beyond it no further request is
/// taken.
pub const READY_BYTES_MAX: usize = 256 << 10;
/// The most bytes of one connection's requests that other threads have and have not answered;
/// beyond it no further request is taken. They are copies, outside the memory limit, and a thread
/// may be slower than the client: one that sends large values must not fill memory with them.
pub const ASKED_BYTES_MAX: usize = 1 << 20;
/// The most bytes held back to be sent together with what other threads are about to answer. A
/// write of that size costs little for each reply.
const HELD_BYTES_MAX: usize = 64 << 10;

/// Buffers that a thread keeps for its connections: mostly no more than this many await a reply at
/// a time.
const SPARE_MAX: usize = 64;

#[derive(Debug)]
enum Piece {
    /// The next `bytes` bytes of the buffer.
    Ready { bytes: usize },
    /// Another shard makes it, from a request of this many bytes.
    Awaited { asked_bytes: usize },
    /// It has arrived, but something before it has not.
    Arrived(Vec<u8>),
    /// All shards contribute.
    Gathered(Box<Gather>),
    /// Some shards contribute, among them this one: its own bytes are in the buffer.
    Merged(Box<Merge>),
}

/// Memory for the replies of a connection that awaits some. Idle connections have none.
#[derive(Debug, Default)]
struct Buffers {
    pieces: VecDeque<Piece>,
    /// The bytes of all `Ready` pieces, and this shard's bytes of all `Merged`, one after the
    /// other.
    ready: Vec<u8>,
    /// Bytes in front of the first piece that are held back.
    held: Vec<u8>,
}

/// Spare buffers of a thread.
#[derive(Debug, Default)]
pub struct SpareBuffers(Vec<Buffers>);

impl SpareBuffers {
    fn keep(&mut self, buffers: &mut Buffers) {
        let used = std::mem::take(buffers);
        let is_small = used.ready.capacity().max(used.held.capacity()) <= READY_BYTES_MAX
            && used.pieces.capacity() <= AWAITED_MAX;
        if is_small && used.pieces.capacity() > 0 && self.0.len() < SPARE_MAX {
            self.0.push(used);
        }
    }
}

/// The replies of one connection, in order.
#[derive(Debug, Default)]
pub struct Replies {
    buffers: Buffers,
    /// The number of the first piece.
    first: u64,
    /// Number of replies that have not arrived.
    awaited: usize,
    /// Bytes of the requests to which these are.
    asked_bytes: usize,
    /// Bytes of replies, and of parts of replies, that have arrived but wait for others.
    kept_bytes: usize,
    /// How long replies that were awaited have been lately: the longest, halved with each that
    /// arrived since.
    recent_bytes: usize,
    ready_from: usize,
    /// Nothing is sent before the pieces in front of this one have arrived: other threads are about
    /// to make them.
    held_before: u64,
    /// Requests of the present turn are still being passed on.
    is_opening: bool,
    /// An awaited reply may take long (a lower tier), so nothing is held back for it.
    is_slow: bool,
}

impl Replies {
    /// Whether nothing is awaited and nothing kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.pieces.is_empty()
    }

    /// The number of awaited replies.
    #[must_use]
    pub const fn awaited(&self) -> usize {
        self.awaited
    }

    /// Bytes of requests that other threads have and have not answered.
    #[must_use]
    pub const fn asked_bytes(&self) -> usize {
        self.asked_bytes
    }

    /// Takes a buffer for replies that are to be awaited.
    pub fn prepare(&mut self, spare: &mut SpareBuffers) {
        if self.buffers.pieces.capacity() == 0
            && let Some(buffers) = spare.0.pop()
        {
            self.buffers = buffers;
        }
    }

    /// Appends ready bytes. Needed only while something is awaited.
    pub fn push_ready(&mut self, bytes: &[u8]) {
        self.buffers.ready.extend_from_slice(bytes);
        self.note_ready(bytes.len());
    }

    /// The buffer to append ready bytes to; call [`Self::note_ready`] or [`Self::push_merged`]
    /// afterwards.
    pub const fn ready_mut(&mut self) -> &mut Vec<u8> {
        &mut self.buffers.ready
    }

    /// Notes that `bytes` more bytes are ready.
    pub fn note_ready(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        if let Some(Piece::Ready { bytes: last }) = self.buffers.pieces.back_mut() {
            *last += bytes;
        } else {
            self.buffers.pieces.push_back(Piece::Ready { bytes });
        }
    }

    /// The number of ready bytes behind something awaited.
    #[must_use]
    pub const fn ready_bytes(&self) -> usize {
        self.buffers.ready.len() - self.ready_from
    }

    /// How many bytes of replies are kept, and are expected with what is awaited and `more`.
    #[must_use]
    pub const fn expected_bytes(&self, more: usize) -> usize {
        let expected = (self.awaited + more).saturating_mul(self.recent_bytes);
        expected.saturating_add(self.kept_bytes + self.ready_bytes())
    }

    /// Memory for bytes of replies.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.buffers.ready.capacity() + self.buffers.held.capacity() + self.kept_bytes
    }

    fn push(&mut self, piece: Piece) -> Ticket {
        self.awaited += 1;
        self.buffers.pieces.push_back(piece);
        Ticket(self.first + self.buffers.pieces.len() as u64 - 1)
    }

    /// Reserves a place for a reply that may take long.
    pub fn push_slow(&mut self) -> Ticket {
        self.is_slow = true;
        self.push(Piece::Awaited { asked_bytes: 0 })
    }

    /// Reserves a place for a reply that another thread makes as soon as it is asked, with this
    /// many bytes.
    pub fn push_awaited(&mut self, asked_bytes: usize) -> Ticket {
        self.asked_bytes += asked_bytes;
        self.push_held(Piece::Awaited { asked_bytes })
    }

    /// Reserves a place for a reply that other threads complete as soon as they are asked. Its
    /// bytes so far were appended to the ready ones.
    pub fn push_merged(&mut self, merge: Merge) -> Ticket {
        self.awaited += merge.keys() - 1;
        self.push_held(Piece::Merged(Box::new(merge)))
    }

    fn push_held(&mut self, piece: Piece) -> Ticket {
        let is_free = self.first >= self.held_before;
        let ticket = self.push(piece);
        if is_free || self.is_opening {
            self.is_opening = true;
            self.held_before = ticket.0 + 1;
        }
        ticket
    }

    /// Notes that a reply expected at once from another thread may take long.
    pub const fn note_slow(&mut self) {
        self.is_slow = true;
    }

    /// Moves held bytes to `out`, before answers are taken.
    pub fn resume(&mut self, out: &mut Vec<u8>) {
        debug_assert!(out.is_empty(), "replies to another connection are sent");
        out.append(&mut self.buffers.held);
    }

    /// Ends a turn: moves to `out` what can be sent, behind what belongs in front of it there.
    /// False if it had better wait for what other threads are about to answer.
    pub fn settle(&mut self, out: &mut Vec<u8>, spare: &mut SpareBuffers) -> bool {
        self.drain(out);
        self.is_opening = false;
        let waits = !self.is_slow && self.first < self.held_before;
        let held = &mut self.buffers.held;
        if waits && held.len() + out.len() <= HELD_BYTES_MAX {
            held.append(out);
            return false;
        }
        if !held.is_empty() {
            out.splice(..0, held.drain(..));
        }
        if self.is_empty() && self.buffers.pieces.capacity() > 0 {
            spare.keep(&mut self.buffers);
        }
        true
    }

    /// Reserves a place for a reply to which all shards contribute.
    pub fn push_gathered(&mut self, gather: Gather) -> Ticket {
        self.push(Piece::Gathered(Box::new(gather)))
    }

    /// Takes a reply that has arrived: it goes to `out` if it is next, else it waits its turn.
    pub fn arrive(&mut self, ticket: Ticket, reply: &[u8], out: &mut Vec<u8>) {
        self.recent_bytes = reply.len().max(self.recent_bytes / 2);
        let arrived = if ticket.0 == self.first {
            let arrived = self.buffers.pieces.pop_front();
            self.first += 1;
            out.extend_from_slice(reply);
            self.drain(out);
            arrived
        } else {
            let arrived = Piece::Arrived(reply.to_vec());
            let piece = self.piece_mut(ticket).map(|piece| std::mem::replace(piece, arrived));
            self.kept_bytes += if piece.is_some() { reply.len() } else { 0 };
            piece
        };
        self.awaited -= usize::from(arrived.is_some());
        if let Some(Piece::Awaited { asked_bytes }) = arrived {
            assert!(self.asked_bytes >= asked_bytes, "what is answered was asked");
            self.asked_bytes -= asked_bytes;
        }
    }

    /// Takes one shard's part of a reply to which several contribute.
    pub fn arrive_part(
        &mut self,
        ticket: Ticket,
        part: PartNumber,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) {
        let is_first = ticket.0 == self.first;
        self.recent_bytes = bytes.len().max(self.recent_bytes / 2);
        let Some(Piece::Merged(merge)) = self.piece_mut(ticket) else { return };
        if !merge.lacks_only(part) {
            let kept_before = merge.kept_bytes();
            merge.keep(part, bytes);
            self.kept_bytes += merge.kept_bytes() - kept_before;
            return;
        }
        let keys = merge.keys();
        if !is_first {
            merge.keep(part, bytes);
            self.kept_bytes += bytes.len();
            self.awaited -= keys;
            return;
        }
        self.awaited -= keys;
        if let Some(Piece::Merged(merge)) = self.buffers.pieces.pop_front() {
            self.first += 1;
            self.kept_bytes -= merge.kept_bytes();
            let own = self.ready_from..self.ready_from + merge.own_bytes();
            self.ready_from = own.end;
            merge.write(&self.buffers.ready[own], Some((part, bytes)), out);
        }
        self.drain(out);
    }

    /// The reply with this ticket, if all shards contribute to it.
    pub fn gathered_mut(&mut self, ticket: Ticket) -> Option<&mut Gather> {
        match self.piece_mut(ticket)? {
            Piece::Gathered(gather) => Some(gather),
            _ => None,
        }
    }

    fn piece_mut(&mut self, ticket: Ticket) -> Option<&mut Piece> {
        let at = usize::try_from(ticket.0.checked_sub(self.first)?).ok()?;
        self.buffers.pieces.get_mut(at)
    }

    /// Moves everything in front of the first awaited reply to `out`.
    fn drain(&mut self, out: &mut Vec<u8>) {
        while let Some(piece) = self.buffers.pieces.front() {
            match piece {
                Piece::Ready { bytes } => {
                    out.extend_from_slice(
                        &self.buffers.ready[self.ready_from..self.ready_from + bytes],
                    );
                    self.ready_from += bytes;
                }
                Piece::Arrived(reply) => {
                    self.kept_bytes -= reply.len();
                    out.extend_from_slice(reply);
                }
                Piece::Merged(merge) if merge.is_whole() => {
                    self.kept_bytes -= merge.kept_bytes();
                    let own = self.ready_from..self.ready_from + merge.own_bytes();
                    self.ready_from = own.end;
                    merge.write(&self.buffers.ready[own], None, out);
                }
                Piece::Awaited { .. } | Piece::Gathered(_) | Piece::Merged(_) => break,
            }
            self.buffers.pieces.pop_front();
            self.first += 1;
        }
        if self.ready_from == self.buffers.ready.len() {
            self.buffers.ready.clear();
            self.ready_from = 0;
        }
        if self.ready_from >= READY_BYTES_MAX {
            self.buffers.ready.drain(..self.ready_from);
            self.ready_from = 0;
        }
        self.is_slow &= !self.buffers.pieces.is_empty();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_go_out_in_order() {
        let mut replies = Replies::default();
        let mut out = Vec::new();
        let first = replies.push_awaited(0);
        replies.push_ready(b"b");
        replies.push_ready(b"c");
        let second = replies.push_awaited(0);
        let third = replies.push_awaited(0);
        replies.push_ready(b"f");
        replies.arrive(third, b"e", &mut out);
        assert_eq!((&out[..], replies.kept_bytes), (&b""[..], 1));
        replies.arrive(first, b"a", &mut out);
        assert_eq!(out, b"abc");
        let fourth = replies.push_awaited(0);
        replies.arrive(second, b"d", &mut out);
        assert_eq!(out, b"abcdef");
        replies.arrive(fourth, b"g", &mut out);
        assert_eq!(out, b"abcdefg");
        assert!(replies.is_empty() && replies.kept_bytes == 0);
    }

    #[test]
    fn what_is_ready_waits_for_what_was_asked_with_it_but_not_for_more() {
        let (mut replies, mut spare) = (Replies::default(), SpareBuffers::default());
        let mut out = Vec::new();
        replies.push_ready(b"a");
        let first = replies.push_awaited(0);
        let second = replies.push_awaited(0);
        assert!(
            !replies.settle(&mut out, &mut spare) && out.is_empty(),
            "others are about to answer"
        );
        replies.arrive(first, b"b", &mut out);
        assert!(!replies.settle(&mut out, &mut spare) && out.is_empty());
        // Asked for later, so it is not waited for.
        let third = replies.push_awaited(0);
        assert!(!replies.settle(&mut out, &mut spare));
        replies.arrive(second, b"c", &mut out);
        assert!(replies.settle(&mut out, &mut spare));
        assert_eq!(out, b"abc");
        out.clear();
        replies.arrive(third, b"d", &mut out);
        assert!(replies.settle(&mut out, &mut spare));
        assert_eq!(out, b"d");
        assert!(replies.is_empty() && replies.buffers.held.capacity() == 0);
    }

    #[test]
    fn nothing_waits_for_a_lower_tier() {
        let (mut replies, mut spare) = (Replies::default(), SpareBuffers::default());
        let mut out = Vec::new();
        replies.push_ready(b"a");
        let slow = replies.push_slow();
        let quick = replies.push_awaited(0);
        assert!(replies.settle(&mut out, &mut spare));
        assert_eq!(out, b"a");
        out.clear();
        replies.arrive(quick, b"c", &mut out);
        replies.arrive(slow, b"b", &mut out);
        assert!(replies.settle(&mut out, &mut spare));
        assert_eq!(out, b"bc");
        // The other thread finds that it has to wait.
        out.clear();
        replies.push_ready(b"d");
        let parked = replies.push_awaited(0);
        assert!(!replies.settle(&mut out, &mut spare));
        replies.note_slow();
        assert!(replies.settle(&mut out, &mut spare));
        assert_eq!(out, b"d");
        out.clear();
        replies.arrive(parked, b"e", &mut out);
        assert!(replies.settle(&mut out, &mut spare) && replies.is_empty());
    }

    #[test]
    fn what_others_were_asked_with_is_counted_until_they_answer() {
        let (mut replies, mut out) = (Replies::default(), Vec::new());
        let [first, second, third] = [5, 70, 900].map(|bytes| replies.push_awaited(bytes));
        replies.push_slow();
        assert_eq!(replies.asked_bytes(), 975);
        replies.arrive(second, b"b", &mut out);
        assert_eq!(replies.asked_bytes(), 905);
        replies.arrive(first, b"a", &mut out);
        replies.arrive(third, b"c", &mut out);
        assert_eq!((replies.asked_bytes(), replies.awaited(), &out[..]), (0, 1, &b"abc"[..]));
    }

    #[test]
    fn a_long_wait_holds_little() {
        let (mut replies, mut spare) = (Replies::default(), SpareBuffers::default());
        let mut out = vec![b'a'; HELD_BYTES_MAX + 1];
        replies.push_awaited(0);
        assert!(replies.settle(&mut out, &mut spare), "so much goes out at once");
        assert_eq!(out.len(), HELD_BYTES_MAX + 1);
    }
}
