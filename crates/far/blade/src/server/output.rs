//! What waits to be sent on one connection: heads from a small arena, pages straight from the
//! segments' memory.
//!
//! Invariants:
//! - Chunks are sent in order; the first may be partly sent.
//! - Memory that a chunk points to is kept alive by `keeps` until the chunk has been sent.
//! - The arena is emptied whenever everything has been sent; [`Output::is_full`] ensures that this
//!   happens before it grows much.

use super::way;
use crate::memory::Keep;
use crate::sys::{self, Iovecs, Slice};
use farpool_record::{Outgoing, RecordError};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that may wait on one connection (plus one answer) before its requests are left unread:
/// what a client that does not read its answers can cost the blade. More in one system call gains
/// nothing, and the checksummed pages would be evicted from the processor's cache before the kernel
/// copies them.
const WAITING_LIMIT_BYTES: usize = 256 << 10;
/// Bytes of heads in the arena before requests are left unread until it has drained.
const HEADS_LIMIT_BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
pub(super) struct Output {
    heads: Vec<u8>,
    chunks: VecDeque<Chunk>,
    /// Bytes of the first chunk that have been sent.
    sent_of_first: usize,
    waiting_bytes: usize,
    keeps: VecDeque<Keep>,
    descriptors: VecDeque<OwnedFd>,
}

#[derive(Debug)]
struct Chunk {
    place: Place,
    /// Number of keeps to release when this chunk has been sent.
    releases: usize,
}

#[derive(Debug)]
enum Place {
    /// A range of the arena.
    Head { start: usize, bytes: usize },
    /// The same, with the next descriptor.
    HeadWithDescriptor { start: usize, bytes: usize },
    /// A slice of a segment's memory.
    Memory(Slice),
}

impl Chunk {
    fn bytes(&self) -> usize {
        match self.place {
            Place::Head { bytes, .. } | Place::HeadWithDescriptor { bytes, .. } => bytes,
            Place::Memory(slice) => slice.bytes(),
        }
    }
}

impl Output {
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// True if it is time to send, and nothing more may be added until some has been sent.
    pub(super) fn is_full(&self) -> bool {
        self.waiting_bytes >= WAITING_LIMIT_BYTES || self.heads.len() >= HEADS_LIMIT_BYTES
    }

    /// Adds a head, written by `encode` to the end of the arena.
    pub(super) fn push_head<E>(
        &mut self,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.heads.len();
        encode(&mut self.heads)?;
        let bytes = self.heads.len() - start;
        self.push(Place::Head { start, bytes });
        Ok(())
    }

    /// Sends `descriptor` with the first byte of the head that was pushed last.
    pub(super) fn attach_descriptor(&mut self, descriptor: OwnedFd) {
        if let Some(chunk) = self.chunks.back_mut()
            && let Place::Head { start, bytes } = chunk.place
        {
            chunk.place = Place::HeadWithDescriptor { start, bytes };
            self.descriptors.push_back(descriptor);
        }
    }

    /// Adds pages, and what must stay alive until they have been sent.
    pub(super) fn push_pages(&mut self, slices: &[Slice], keeps: &mut Vec<Keep>) {
        let releases = keeps.len();
        self.keeps.extend(keeps.drain(..));
        for slice in slices {
            self.push(Place::Memory(*slice));
        }
        if let Some(last) = self.chunks.back_mut() {
            last.releases = releases;
        }
    }

    fn push(&mut self, place: Place) {
        let chunk = Chunk { place, releases: 0 };
        self.waiting_bytes += chunk.bytes();
        self.chunks.push_back(chunk);
    }

    /// Sends as much as the socket takes.
    pub(super) fn flush(&mut self, socket: BorrowedFd<'_>, iovecs: &mut Iovecs) -> io::Result<()> {
        while !self.chunks.is_empty() {
            let with_descriptor = self.gather(iovecs);
            let descriptor = if with_descriptor { self.descriptors.front() } else { None };
            // SAFETY: the places are the arena and memory held by `keeps`; neither changes or goes
            // away before the call returns.
            let sent = unsafe { sys::send(socket, iovecs, descriptor.map(AsFd::as_fd)) };
            match sent {
                Ok(count) => self.sent(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// As [`Self::flush`], in records: what is sealed counts as sent, and its memory is let go.
    pub(super) fn flush_sealed(
        &mut self,
        socket: BorrowedFd<'_>,
        outgoing: &mut Outgoing,
    ) -> io::Result<()> {
        while way::flush(outgoing, socket)? && !self.chunks.is_empty() {
            let mut taken = 0;
            let mut skip = self.sent_of_first;
            for chunk in &self.chunks {
                let count = match chunk.place {
                    Place::Head { start, bytes } => {
                        outgoing.add(&self.heads[start + skip..start + bytes])
                    }
                    Place::Memory(slice) => slice.skip(skip).read(|bytes| outgoing.add(bytes)),
                    // Descriptors go through unix sockets, which are plain.
                    Place::HeadWithDescriptor { .. } => Err(RecordError::Malformed),
                };
                let count = count.map_err(way::as_io)?;
                taken += count;
                if count < chunk.bytes() - skip {
                    break;
                }
                skip = 0;
            }
            outgoing.seal().map_err(way::as_io)?;
            self.sent(taken);
        }
        Ok(())
    }

    /// Collects the next chunks. True if the first one goes with a descriptor.
    fn gather(&self, iovecs: &mut Iovecs) -> bool {
        iovecs.clear();
        let mut skip = self.sent_of_first;
        let mut with_descriptor = false;
        for chunk in &self.chunks {
            match chunk.place {
                Place::Head { start, bytes } => {
                    iovecs.push_bytes(&self.heads[start + skip..start + bytes]);
                }
                Place::Memory(slice) => iovecs.push_slice(slice.skip(skip)),
                // It is sent with the first byte, so that byte must begin a message.
                Place::HeadWithDescriptor { .. } if !iovecs.is_empty() => break,
                Place::HeadWithDescriptor { start, bytes } => {
                    iovecs.push_bytes(&self.heads[start + skip..start + bytes]);
                    with_descriptor = skip == 0;
                }
            }
            skip = 0;
            if iovecs.is_full() {
                break;
            }
        }
        with_descriptor
    }

    fn sent(&mut self, mut count: usize) {
        self.waiting_bytes -= count;
        while count > 0 {
            let Some(first) = self.chunks.front() else {
                break;
            };
            let is_start = self.sent_of_first == 0;
            if is_start && matches!(first.place, Place::HeadWithDescriptor { .. }) {
                self.descriptors.pop_front();
            }
            let left = first.bytes() - self.sent_of_first;
            if count < left {
                self.sent_of_first += count;
                return;
            }
            count -= left;
            self.sent_of_first = 0;
            self.keeps.drain(..first.releases);
            self.chunks.pop_front();
        }
        if self.chunks.is_empty() {
            self.heads.clear();
        }
    }
}
