//! What one end sends: content is copied in, sealed in place, and waits here until the socket has
//! taken it.

use crate::key::{Numbered, TrafficKey};
use crate::{
    CONTENT_LIMIT_BYTES, HEADER_BYTES, RECORDS_WORN, RecordError, TAG_BYTES, TYPE_DATA, VERSION,
};

/// Records that may wait: enough to fill a system call, few enough to stay in the processor's
/// cache between sealing and sending.
const RECORDS: usize = 4;
/// What a record has besides its content, in bytes.
const OVERHEAD_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;
const BUFFER_BYTES: usize = RECORDS * (CONTENT_LIMIT_BYTES + OVERHEAD_BYTES);

/// The sending half of a connection.
#[derive(Debug)]
pub struct Outgoing {
    key: Numbered,
    buffer: Box<[u8]>,
    /// Sealed bytes that were not sent yet.
    start: usize,
    end: usize,
    /// The record that content is being added to begins here.
    open: Option<usize>,
    failed: Option<RecordError>,
}

impl Outgoing {
    /// A half that sends with this key, which nothing else uses.
    #[must_use]
    pub fn new(key: TrafficKey) -> Self {
        Outgoing {
            key: Numbered::new(&key),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            open: None,
            failed: None,
        }
    }

    /// Adds content, as much as there is room for. Returns how many bytes were taken.
    ///
    /// # Errors
    /// The key is used up.
    pub fn add(&mut self, content: &[u8]) -> Result<usize, RecordError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let mut left = content;
        while !left.is_empty() {
            let open = match self.open {
                Some(open) => open,
                None if self.buffer.len() - self.end > OVERHEAD_BYTES => {
                    let open = self.end;
                    self.end += HEADER_BYTES;
                    *self.open.insert(open)
                }
                None => break,
            };
            let has = self.end - open - HEADER_BYTES;
            let room = self.buffer.len() - self.end - 1 - TAG_BYTES;
            let count = left.len().min(CONTENT_LIMIT_BYTES - has).min(room);
            if count == 0 {
                self.seal()?;
                continue;
            }
            let (now, later) = left.split_at(count);
            self.buffer[self.end..self.end + count].copy_from_slice(now);
            self.end += count;
            left = later;
        }
        Ok(content.len() - left.len())
    }

    /// Seals what was added: it may be sent then.
    ///
    /// # Errors
    /// The key is used up: what was added last is not sent.
    pub fn seal(&mut self) -> Result<(), RecordError> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        let content = open + HEADER_BYTES;
        self.buffer[self.end] = TYPE_DATA;
        let tag_at = self.end + 1;
        let body_bytes = u16::try_from(tag_at + TAG_BYTES - content);
        let [high, low] = body_bytes.map_err(|_| RecordError::Malformed)?.to_be_bytes();
        let header = [TYPE_DATA, VERSION[0], VERSION[1], high, low];
        let sealed = self.key.seal(header, &mut self.buffer[content..tag_at]);
        let tag = sealed.inspect_err(|error| {
            // In the clear it must never leave.
            self.buffer[open..tag_at].fill(0);
            self.end = open;
            self.failed = Some(*error);
        })?;
        self.buffer[open..content].copy_from_slice(&header);
        self.buffer[tag_at..tag_at + TAG_BYTES].copy_from_slice(&tag);
        self.end = tag_at + TAG_BYTES;
        Ok(())
    }

    /// Sealed bytes to send. Nothing may be open.
    #[must_use]
    pub fn sealed(&self) -> &[u8] {
        &self.buffer[self.start..self.open.unwrap_or(self.end)]
    }

    /// True if nothing waits to be sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The first `count` of [`Self::sealed`] were sent.
    pub fn sent(&mut self, count: usize) {
        assert!(count <= self.sealed().len(), "cannot send more than was sealed");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// True if the connection should be replaced: see [`RECORDS_WORN`].
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.key.records() >= RECORDS_WORN
    }
}
