//! One connection in shared memory: its rings, and the bells that wake either side.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_keyvault::frame::frame_length;
use farpool_keyvault::ring::{Popped, Reader, Writer, frame_bytes_max};
use farpool_keyvault::share::{self, Ring, RingSizes};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// The server's ends of the rings.
#[derive(Debug)]
pub struct RingClient {
    requests: Reader<Ring>,
    answers: Writer<Ring>,
    answer_bytes_max: usize,
    wake_server: OwnedFd,
    wake_client: OwnedFd,
    /// Answers that found the ring full: the client was granted more credits than it makes room
    /// for.
    held: Vec<u8>,
    /// How many of these bytes have been pushed since.
    held_done: usize,
}

impl RingClient {
    /// Creates rings in memory of their own, and the file that the client maps.
    pub(crate) fn new(sizes: RingSizes) -> Result<(Self, OwnedFd), Errno> {
        let file = share::create(sizes)?;
        let (requests, answers) = share::map(&file, sizes)?;
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let ring_client = Self {
            requests: Reader::new(requests),
            answers: Writer::new(answers),
            answer_bytes_max: frame_bytes_max(sizes.answer_bytes),
            wake_server: bell()?,
            wake_client: bell()?,
            held: Vec::new(),
            held_done: 0,
        };
        Ok((ring_client, file))
    }

    /// The descriptors that the client gets with the file: the server's bell, and its own.
    pub(crate) fn bells(&self) -> [BorrowedFd<'_>; 2] {
        [self.wake_server.as_fd(), self.wake_client.as_fd()]
    }

    /// Whether a request is waiting.
    #[inline]
    pub(crate) fn has_frame(&self) -> bool {
        self.requests.has_frame()
    }

    /// Takes up to `most` requests. True if the client broke the ring's protocol.
    pub(crate) fn take_frames(&mut self, most: usize, frames: &mut Vec<u8>) -> bool {
        let mut count = 0;
        while count < most {
            match self.requests.pop(frames) {
                Popped::Frame => count += 1,
                Popped::Nothing => break,
                Popped::Broken => return true,
            }
        }
        false
    }

    /// Asks the client to ring the bell for its next request. False if one has arrived meanwhile.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        self.requests.fall_asleep()
    }

    pub(crate) fn wake_up(&mut self) {
        self.requests.wake_up();
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake_server, &mut counter);
    }

    /// Whether answers wait for room in the ring.
    pub(crate) const fn holds_answers(&self) -> bool {
        !self.held.is_empty()
    }

    /// The bell that the thread waits for while it sleeps.
    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.wake_server
    }

    /// Puts answers into the ring and keeps those that it has no room for. Returns those that are
    /// too long for it.
    pub(crate) fn push_all(&mut self, answers: &[u8]) -> Vec<u8> {
        let (mut long, mut at, mut any) = (Vec::new(), 0, false);
        while let Some(Ok(length)) = frame_length(&answers[at..]) {
            let frame = &answers[at..at + length];
            at += length;
            if length > self.answer_bytes_max {
                long.extend_from_slice(frame);
            } else if self.held.is_empty() && self.answers.push(frame) {
                any = true;
            } else {
                self.held.extend_from_slice(frame);
            }
        }
        self.wake_client(any);
        long
    }

    /// Continues with answers that found the ring full. True if there was room for one.
    pub(crate) fn push_held(&mut self) -> bool {
        let before = self.held_done;
        while let Some(Ok(length)) = frame_length(&self.held[self.held_done..])
            && self.answers.push(&self.held[self.held_done..self.held_done + length])
        {
            self.held_done += length;
        }
        let any = self.held_done > before;
        if self.held_done == self.held.len() {
            (self.held, self.held_done) = (Vec::new(), 0);
        }
        self.wake_client(any);
        any
    }

    fn wake_client(&self, has_answers: bool) {
        if has_answers && self.answers.reader_sleeps() {
            // Fails only if the counter is full, and then the client is awake.
            let _ = rustix::io::write(&self.wake_client, &1u64.to_ne_bytes());
        }
    }
}
