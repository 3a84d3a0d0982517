//! Receiving answers straight into the pages they belong to.
//!
//! The receiver guesses that answers arrive in the order of the requests and hands the kernel one
//! list: head, pages, head, pages ... of the oldest requests in flight. While the guess is right a
//! page is written once, by the kernel, and a lone read costs one system call. Where a head turns
//! out not to be the one guessed (another order, an error), the bytes received from there on are
//! gathered into the *spill* and copied from it until it ends with a frame; then guessing begins
//! again.
//!
//! Nothing is trusted before its checksum: a head before its fields are used, pages before their
//! request succeeds. Impossible bytes (damage, an answer to nothing, a second answer) are a
//! [`Break::Damaged`], after which nothing of this connection is used.

use farpool_record::RecordError;
use farpool_units::PAGE_BYTES;
use farpool_wire::{
    HEAD_LIMIT_BYTES, HEADER_BYTES, Head, Header, Kind, PagesChecksum, RequestId, Response,
    WireError, split_head,
};
use rustix::io::Errno;

use crate::channel::{Channel, Trouble};
use crate::flight::{Flight, REQUEST_LIMIT_PAGES, Slot};
use crate::link::PageFault;
use crate::sys::{Patience, Vector};

/// Most answers guessed for one system call; more are received by the next one.
const AHEAD_LIMIT_ANSWERS: usize = 32;
/// Most pages guessed for one system call, which bounds the list handed to the kernel.
const AHEAD_LIMIT_PAGES: usize = REQUEST_LIMIT_PAGES;

/// Why a connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Break {
    /// The blade closed it.
    #[error("the blade closed the connection")]
    Closed,
    /// The system reports that it broke.
    #[error("the connection broke ({0})")]
    Broken(Errno),
    /// It carried bytes that are not a frame.
    #[error("{0}")]
    Damaged(WireError),
    /// It carried an answer to no request, or to one already answered.
    #[error("the blade answered a request that is not in flight (number {})", .0.0)]
    Unasked(RequestId),
    /// It carried a refusal of a request that had not been sent completely. The blade may do that;
    /// a new connection is the simple way to leave the rest unsent.
    #[error("the blade refused a request while it was being sent")]
    RefusedEarly,
    /// Its records do not fit, or its key is used up.
    #[error("{0}")]
    Record(RecordError),
    /// The certificate that the blade showed has ended.
    #[error("the blade's certificate has ended since the connection was made")]
    Ended,
    /// Its certificate was revoked, or its authority is not trusted any more.
    #[error("the blade is not trusted any more")]
    Distrusted,
}

impl Break {
    /// True if the peer or the network misbehaves, rather than being gone.
    pub(crate) fn is_damage(self) -> bool {
        matches!(self, Break::Damaged(_) | Break::Unasked(_))
    }
}

impl From<Trouble> for Break {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::System(errno) => Break::Broken(errno),
            Trouble::Record(RecordError::Closed) => Break::Closed,
            Trouble::Record(error) => Break::Record(error),
        }
    }
}

impl From<WireError> for Break {
    fn from(error: WireError) -> Self {
        Break::Damaged(error)
    }
}

type HeadBytes = [u8; HEADER_BYTES];

/// The receiving side of one connection.
#[derive(Debug)]
pub(crate) struct Receiver {
    heads: Box<[HeadBytes; AHEAD_LIMIT_ANSWERS]>,
    vector: Vector,
    /// Bytes of the first guessed answer that have arrived already.
    partial_bytes: usize,
    spill: Vec<u8>,
    received_bytes: u64,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Receiver {
            heads: Box::new([[0; HEADER_BYTES]; AHEAD_LIMIT_ANSWERS]),
            vector: Vector::with_capacity(AHEAD_LIMIT_PAGES + 2 * AHEAD_LIMIT_ANSWERS),
            partial_bytes: 0,
            spill: Vec::with_capacity(HEAD_LIMIT_BYTES + REQUEST_LIMIT_PAGES * PAGE_BYTES),
            received_bytes: 0,
        }
    }

    /// Prepares for a new connection.
    pub(crate) fn reset(&mut self) {
        self.partial_bytes = 0;
        self.spill.clear();
        self.received_bytes = 0;
    }

    /// Bytes received on this connection.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Receives what is there and ends the requests it answers. True if more may be there already.
    ///
    /// `sent_bytes`: how much of the stream has been sent; nothing beyond can have an answer.
    pub(crate) fn receive(
        &mut self,
        channel: &mut Channel,
        flight: &mut Flight,
        sent_bytes: u64,
        patience: Patience,
    ) -> Result<bool, Break> {
        let spilling = !self.spill.is_empty();
        let kept_bytes = self.spill.len();
        let expected =
            if spilling { self.expect_spill()? } else { self.expect(flight, sent_bytes) };
        // SAFETY: heads and spill are ours; the pages are lent to the link until their completion.
        let got = unsafe { channel.receive(&mut self.vector, patience) };
        self.spill.truncate(kept_bytes + got.unwrap_or(0));
        self.received_bytes += got.unwrap_or(0) as u64;
        match got {
            Ok(0) => return Err(Break::Closed),
            Ok(got) if !spilling => self.take_guessed(flight, sent_bytes, got)?,
            Ok(_) => {}
            Err(Trouble::System(Errno::AGAIN | Errno::INTR)) => return Ok(false),
            Err(trouble) => return Err(trouble.into()),
        }
        self.take_spilled(flight, sent_bytes)?;
        Ok(got == Ok(expected) && flight.is_busy())
    }

    /// Lists the places of the answers expected next. Returns their bytes still missing.
    fn expect(&mut self, flight: &Flight, sent_bytes: u64) -> usize {
        self.vector.clear();
        let mut pages = 0;
        for (head, slot) in self.heads.iter_mut().zip(&flight.flying) {
            pages += slot.answer_pages();
            let unsent = slot.end_bytes > sent_bytes;
            if self.vector.bytes() > 0 && (unsent || pages > AHEAD_LIMIT_PAGES) {
                break;
            }
            self.vector.push(head.as_mut_ptr(), HEADER_BYTES);
            if slot.answer_pages() > 0 {
                slot.pages.iter().for_each(|page| self.vector.push(page.memory, PAGE_BYTES));
            }
        }
        if self.vector.bytes() == 0 {
            self.vector.push(self.heads[0].as_mut_ptr(), HEADER_BYTES);
        }
        self.vector.advance(self.partial_bytes);
        self.vector.bytes()
    }

    /// Ends the requests whose answers arrived as guessed, and moves everything from the first
    /// other head on into the spill.
    fn take_guessed(
        &mut self,
        flight: &mut Flight,
        sent_bytes: u64,
        got: usize,
    ) -> Result<(), Break> {
        let mut left = self.partial_bytes + got;
        let mut answers = 0;
        let mut whole = 0;
        while left >= HEADER_BYTES {
            let header = Header::decode(&self.heads[answers])?;
            let slot = flight.flying.get(whole);
            let Some(slot) = slot.filter(|slot| is_plain_answer(&header, slot, sent_bytes)) else {
                break;
            };
            let frame_bytes = HEADER_BYTES + header.pages_bytes();
            if left < frame_bytes {
                break;
            }
            if slot.answer_checksum() != header.pages_checksum {
                return Err(WireError::PagesChecksum.into());
            }
            flight.credits = header.credits;
            left -= frame_bytes;
            answers += 1;
            whole += 1;
        }
        self.keep_rest(flight, answers, left, sent_bytes);
        (0..whole).for_each(|_| flight.land(0, Ok(())));
        Ok(())
    }

    /// Keeps the `left` bytes that follow the first `answers` answers: in place if they begin the
    /// next guessed answer, else in the spill.
    fn keep_rest(&mut self, flight: &Flight, answers: usize, left: usize, sent_bytes: u64) {
        self.partial_bytes = 0;
        if left == 0 {
            return;
        }
        let slot = flight.flying.get(answers);
        let guessed = left < HEADER_BYTES
            || Header::decode(&self.heads[answers])
                .is_ok_and(|h| slot.is_some_and(|slot| is_plain_answer(&h, slot, sent_bytes)));
        if guessed && answers < self.heads.len() {
            self.heads[0] = self.heads[answers];
            self.partial_bytes = left;
            return;
        }
        let mut left = left;
        for (head, slot) in self.heads[answers..].iter().zip(flight.flying.iter().skip(answers)) {
            left -= gather(&mut self.spill, head, left);
            for page in slot.pages.iter().take(slot.answer_pages()) {
                // SAFETY: the page's memory is lent to the link until its completion, and was just
                // listed for the kernel to fill.
                let bytes = unsafe { std::slice::from_raw_parts(page.memory, PAGE_BYTES) };
                left -= gather(&mut self.spill, bytes, left);
            }
        }
        if left > 0 {
            // Only a head was expected although nothing was in flight.
            self.spill.extend_from_slice(&self.heads[0][..left.min(HEADER_BYTES)]);
        }
    }

    /// Makes room at the end of the spill for the rest of its last frame.
    fn expect_spill(&mut self) -> Result<usize, Break> {
        let have = self.spill.len();
        let want = match self.spill.split_first_chunk::<HEADER_BYTES>() {
            None => HEADER_BYTES,
            Some((header, _)) => {
                let header = Header::decode(header)?;
                header.head_bytes() + header.pages_bytes()
            }
        };
        let missing = want.saturating_sub(have).max(1);
        self.spill.resize(have + missing, 0);
        self.vector.clear();
        self.vector.push(self.spill[have..].as_mut_ptr(), missing);
        Ok(missing)
    }

    /// Ends the requests whose complete answers are in the spill.
    fn take_spilled(&mut self, flight: &mut Flight, sent_bytes: u64) -> Result<(), Break> {
        let mut at = 0;
        while let Some(head) = split_head(&self.spill[at..])? {
            let begin = at + head.header.head_bytes();
            let end = begin + head.header.pages_bytes();
            let Some(pages) = self.spill.get(begin..end) else {
                break;
            };
            take_copied(flight, &head, pages, sent_bytes)?;
            at = end;
        }
        self.spill.drain(..at);
        Ok(())
    }
}

/// True if this is the answer that the slot's request gets when all is well.
fn is_plain_answer(header: &Header, slot: &Slot, sent_bytes: u64) -> bool {
    header.request_id == slot.id
        && header.opcode == slot.opcode
        && header.kind == Kind::Response
        && header.meta_bytes == 0
        && usize::from(header.page_count) == slot.answer_pages()
        && slot.end_bytes <= sent_bytes
}

/// Ends the request that a frame in the spill answers.
fn take_copied(
    flight: &mut Flight,
    head: &Head<'_>,
    pages: &[u8],
    sent_bytes: u64,
) -> Result<(), Break> {
    let header = &head.header;
    let response = Response::decode(head)?;
    let id = header.request_id;
    let fits = |slot: &Slot| slot.id == id && slot.opcode == header.opcode;
    let at = flight.flying.iter().position(fits).ok_or(Break::Unasked(id))?;
    let slot = &flight.flying[at];
    let is_sent = slot.end_bytes <= sent_bytes;
    let result = match response {
        Response::Error { code, .. } => Err(PageFault::Refused(code)),
        _ if !is_sent => return Err(Break::Unasked(id)),
        _ if usize::from(header.page_count) != slot.answer_pages() => {
            return Err(WireError::Length.into());
        }
        _ if PagesChecksum::of(pages) != header.pages_checksum => {
            return Err(WireError::PagesChecksum.into());
        }
        _ => {
            slot.fill(pages);
            Ok(())
        }
    };
    flight.credits = header.credits;
    flight.land(at, result);
    if is_sent { Ok(()) } else { Err(Break::RefusedEarly) }
}

/// Appends at most `limit` of the bytes. Returns their number.
fn gather(spill: &mut Vec<u8>, bytes: &[u8], limit: usize) -> usize {
    let take = bytes.len().min(limit);
    spill.extend_from_slice(&bytes[..take]);
    take
}
