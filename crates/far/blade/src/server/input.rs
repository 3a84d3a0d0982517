//! What has been received on one connection and not yet parsed.
//!
//! A connection that reads pages sends only heads: they are received in large pieces, many requests
//! at once. A connection that writes pages sends large payloads: those are received straight into
//! the segment, and the receive behind them is kept small, so that only a few hundred bytes of the
//! next payload land here and must be copied.

use super::way;
use crate::sys::{self, Iovecs, Slice};
use farpool_record::Incoming;
use farpool_wire::{HEAD_LIMIT_BYTES, HEADER_BYTES, META_CHECKSUM_BYTES};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io;
use std::os::fd::BorrowedFd;

/// Room for received bytes: the longest head, and a large receive.
const BUFFER_BYTES: usize = HEAD_LIMIT_BYTES + LARGE_BITE_BYTES;
const LARGE_BITE_BYTES: usize = 64 << 10;
/// The head of a write of 100 scattered pieces. A longer one takes several receives.
const SMALL_BITE_BYTES: usize = HEADER_BYTES + 8 + 8 * 100 + META_CHECKSUM_BYTES;

#[derive(Debug)]
pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    expects_pages: bool,
}

/// The result of receiving.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Received {
    /// Bytes received straight into the given slices.
    pub(super) direct_bytes: usize,
    /// True if the socket may hold more.
    pub(super) was_full: bool,
}

impl Input {
    pub(super) fn new() -> Self {
        Input {
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            expects_pages: false,
        }
    }

    /// Bytes received and not yet taken.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(super) fn take(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "cannot take more than was received");
        self.start += count;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Tells whether the connection's last request brings pages.
    pub(super) fn expect_pages(&mut self, expects: bool) {
        self.expects_pages = expects;
    }

    /// Receives first into `slices`, then into the buffer. `None` if nothing has arrived yet.
    ///
    /// # Errors
    /// The connection is broken; `UnexpectedEof` at its regular end.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        slices: &[Slice],
        iovecs: &mut Iovecs,
    ) -> io::Result<Option<Received>> {
        self.make_room();
        iovecs.clear();
        let mut direct_room = 0;
        for slice in slices.iter().take(sys::IOVECS_LIMIT - 1) {
            iovecs.push_slice(*slice);
            direct_room += slice.bytes();
        }
        let bite = if self.expects_pages { SMALL_BITE_BYTES } else { LARGE_BITE_BYTES };
        let room = bite.min(self.buffer.len() - self.end);
        iovecs.push_buffer(&mut self.buffer[self.end..self.end + room]);
        // SAFETY: the slices' memory is kept alive by the write that receives it, and the buffer is
        // borrowed exclusively.
        let count = match unsafe { sys::receive(socket, iovecs) } {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if is_transient(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let direct_bytes = count.min(direct_room);
        self.end += count - direct_bytes;
        Ok(Some(Received { direct_bytes, was_full: count == direct_room + room }))
    }

    /// As [`Self::receive`], from records. The socket is read only if `may_read_socket`: what was
    /// read from it before has no event that would report it again, so all of it is taken.
    ///
    /// # Errors
    /// As before, or a record does not fit.
    pub(super) fn receive_sealed(
        &mut self,
        socket: BorrowedFd<'_>,
        slices: &[Slice],
        incoming: &mut Incoming,
        may_read_socket: bool,
    ) -> io::Result<Option<Received>> {
        self.make_room();
        let (mut slices, mut direct_bytes, mut has_taken) = (slices.iter().copied(), 0, false);
        let (mut slice, mut was_full) = (slices.next(), false);
        let mut may_read = may_read_socket;
        loop {
            let content = match incoming.content() {
                // What came before it is good; the next call fails alike.
                Err(_) if has_taken => break,
                other => other.map_err(way::as_io)?,
            };
            if content.is_empty() {
                if has_taken || !may_read {
                    break;
                }
                let room = incoming.room();
                let room_bytes = room.len();
                match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok((_, count)) => {
                        incoming.received(count);
                        was_full = count == room_bytes;
                    }
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    Err(errno) => return Err(errno.into()),
                }
                may_read = false;
                continue;
            }
            let count = if let Some(target) = slice {
                let count = content.len().min(target.bytes());
                target.fill(&content[..count]);
                direct_bytes += count;
                slice = Some(target.skip(count)).filter(|left| left.bytes() > 0);
                slice = slice.or_else(|| slices.next());
                count
            } else {
                let count = content.len().min(self.buffer.len() - self.end);
                self.buffer[self.end..self.end + count].copy_from_slice(&content[..count]);
                self.end += count;
                count
            };
            incoming.take(count);
            has_taken |= count > 0;
            if count == 0 {
                was_full = true;
                break;
            }
        }
        Ok(has_taken.then_some(Received { direct_bytes, was_full }))
    }

    /// Makes room for a long head behind what is there.
    fn make_room(&mut self) {
        if self.buffer.len() - self.end < LARGE_BITE_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
