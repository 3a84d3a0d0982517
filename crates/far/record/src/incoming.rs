//! What one end receives: sealed bytes are received into a buffer, opened there record by record,
//! and taken from it.

use crate::key::{Numbered, TrafficKey};
use crate::{
    BODY_LIMIT_BYTES, CLOSE_NOTIFY, CONTENT_LIMIT_BYTES, HEADER_BYTES, RECORDS_WORN, RecordError,
    TAG_BYTES, TYPE_ALERT, TYPE_DATA, VERSION,
};

/// Room for some records in one system call, and for the longest one behind them.
const BUFFER_BYTES: usize = 5 * (HEADER_BYTES + BODY_LIMIT_BYTES);
/// Records without content in a row that are borne: each costs its sender as little as nothing.
const EMPTY_LIMIT: u32 = 32;

/// The receiving half of a connection.
#[derive(Debug)]
pub struct Incoming {
    key: Numbered,
    buffer: Box<[u8]>,
    /// Content that was opened and not taken.
    content: std::ops::Range<usize>,
    /// Sealed bytes that were received and not opened.
    start: usize,
    end: usize,
    empty_records: u32,
    failed: Option<RecordError>,
}

impl Incoming {
    /// A half that receives with this key, which nothing else uses.
    #[must_use]
    pub fn new(key: TrafficKey) -> Self {
        Incoming {
            key: Numbered::new(&key),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            content: 0..0,
            start: 0,
            end: 0,
            empty_records: 0,
            failed: None,
        }
    }

    /// Room to receive into; empty only while a whole record waits to be opened.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end && self.content.is_empty() {
            (self.start, self.end) = (0, 0);
        } else if self.content.is_empty()
            && self.buffer.len() - self.start < HEADER_BYTES + BODY_LIMIT_BYTES
        {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// The first `count` bytes of [`Self::room`] were received.
    pub fn received(&mut self, count: usize) {
        assert!(count <= self.buffer.len() - self.end, "cannot receive beyond the room");
        self.end += count;
    }

    /// Content of records whose tags were verified, opening the next record if there is none left
    /// of the last. Empty if no further record is complete.
    ///
    /// # Errors
    /// The connection cannot go on; every further call fails alike.
    pub fn content(&mut self) -> Result<&[u8], RecordError> {
        while self.content.is_empty() {
            if let Some(error) = self.failed {
                return Err(error);
            }
            let opened = self.open_next().inspect_err(|error| self.failed = Some(*error))?;
            if !opened {
                break;
            }
        }
        Ok(&self.buffer[self.content.clone()])
    }

    /// The first `count` bytes of [`Self::content`] were taken.
    pub fn take(&mut self, count: usize) {
        assert!(count <= self.content.len(), "cannot take more than was opened");
        self.content.start += count;
    }

    /// True if the connection should be replaced: see [`RECORDS_WORN`].
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.key.records() >= RECORDS_WORN
    }

    /// Opens the next record. False if it is not complete.
    fn open_next(&mut self) -> Result<bool, RecordError> {
        let waiting = &mut self.buffer[self.start..self.end];
        let Some((header, rest)) = waiting.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Ok(false);
        };
        let body_bytes = body_bytes(*header)?;
        let Some(body) = rest.get_mut(..body_bytes) else {
            return Ok(false);
        };
        let inner = self.key.open(*header, body)?;
        let Some(last) = inner.iter().rposition(|byte| *byte != 0) else {
            return Err(RecordError::Malformed);
        };
        let (kind, content) = (inner[last], &inner[..last]);
        if last > CONTENT_LIMIT_BYTES {
            return Err(RecordError::Malformed);
        }
        match (kind, content) {
            (TYPE_DATA, _) => {}
            (TYPE_ALERT, [_, CLOSE_NOTIFY]) => return Err(RecordError::Closed),
            (TYPE_ALERT, [_, alert]) => return Err(RecordError::Alert(*alert)),
            (kind, _) => return Err(RecordError::Unexpected(kind)),
        }
        self.empty_records = if content.is_empty() { self.empty_records + 1 } else { 0 };
        if self.empty_records > EMPTY_LIMIT {
            return Err(RecordError::Malformed);
        }
        let begin = self.start + HEADER_BYTES;
        self.content = begin..begin + last;
        self.start = begin + body_bytes;
        Ok(true)
    }
}

/// The length of a record's body by its header, if it is a sealed record's.
fn body_bytes(header: [u8; HEADER_BYTES]) -> Result<usize, RecordError> {
    let [kind, major, minor, high, low] = header;
    let body_bytes = usize::from(u16::from_be_bytes([high, low]));
    let is_possible = (TAG_BYTES + 1..=BODY_LIMIT_BYTES).contains(&body_bytes);
    if kind != TYPE_DATA || [major, minor] != VERSION || !is_possible {
        return Err(RecordError::Malformed);
    }
    Ok(body_bytes)
}
