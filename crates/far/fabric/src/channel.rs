//! A connection's socket, and over TCP with certificates the keys of its records: bytes go in and
//! come out as if the socket were plain.
//!
//! Without keys each call is the system call and nothing else. With keys, content is copied once:
//! from the lent memory into the records that are sealed in place, and from opened records into the
//! lent memory. What is received before a record's tag was verified never gets there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use farpool_record::{Incoming, Outgoing, RecordError, Secrets};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::asked::{self, Notice};
use crate::descriptor::Descriptor;
use crate::sys::{self, Patience, Vector};

/// How long a connection that should be replaced is left alone after a try that failed.
const RENEWAL_PAUSE: Duration = Duration::from_secs(1);
/// How often a connection in use looks whether its blade is still trusted: one system call.
const NOTICE_EVERY: Duration = Duration::from_millis(250);

/// Why a channel cannot move bytes now, or ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    System(Errno),
    Record(RecordError),
}

impl From<Errno> for Trouble {
    fn from(errno: Errno) -> Self {
        Trouble::System(errno)
    }
}

impl From<RecordError> for Trouble {
    fn from(error: RecordError) -> Self {
        Trouble::Record(error)
    }
}

/// The keys of a connection whose handshake is complete, and how long they are good for.
#[derive(Debug)]
pub struct Keys {
    /// The keys.
    pub secrets: Secrets,
    /// After this time another handshake should verify the blade again.
    pub renew_within: Duration,
    /// After this time the blade's certificate has ended.
    pub valid_for: Duration,
}

#[derive(Debug)]
struct Sealed {
    outgoing: Outgoing,
    incoming: Incoming,
    renew_at: Instant,
    /// When another connection was last tried in its place.
    tried_at: Option<Instant>,
    /// None if it is later than the clock can tell.
    ends_at: Option<Instant>,
    /// Where whoever made the handshake says that the blade is not to be trusted any more. None
    /// once nobody can: then it is found out by the next renewal.
    notices: Option<Descriptor>,
    looked_at: Instant,
}

#[derive(Debug)]
pub(crate) struct Channel {
    socket: Descriptor,
    sealed: Option<Box<Sealed>>,
}

impl Channel {
    pub(crate) fn plain(socket: Descriptor) -> Self {
        Channel { socket, sealed: None }
    }

    /// From now on all is sealed with these keys, which came on the socket `notices`.
    pub(crate) fn seal(&mut self, keys: Keys, notices: Descriptor, now: Instant) {
        let Keys { secrets: Secrets { sending, receiving }, renew_within, valid_for } = keys;
        self.sealed = Some(Box::new(Sealed {
            outgoing: Outgoing::new(sending),
            incoming: Incoming::new(receiving),
            renew_at: now.checked_add(renew_within).unwrap_or(now),
            tried_at: None,
            ends_at: now.checked_add(valid_for),
            notices: Some(notices),
            looked_at: now,
        }));
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    /// True if sealed bytes wait for the socket to take them.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| !sealed.outgoing.is_empty())
    }

    /// True if another connection should take its place: its key is worn, or its blade's
    /// certificate was last verified a while ago. Then not again for a moment.
    pub(crate) fn take_renewal(&mut self, now: Instant) -> bool {
        let Some(sealed) = &mut self.sealed else { return false };
        let is_worn = sealed.outgoing.is_worn() || sealed.incoming.is_worn();
        let is_due = now >= sealed.renew_at || is_worn;
        if !is_due || sealed.tried_at.is_some_and(|then| now < then + RENEWAL_PAUSE) {
            return false;
        }
        sealed.tried_at = Some(now);
        true
    }

    /// True if the blade's certificate has ended since the handshake.
    pub(crate) fn has_ended(&self, now: Instant) -> bool {
        let ends_at = self.sealed.as_ref().and_then(|sealed| sealed.ends_at);
        ends_at.is_some_and(|end| now >= end)
    }

    /// True if the blade is no longer trusted since the handshake, as far as was said. Looks now
    /// and then.
    pub(crate) fn is_distrusted(&mut self, now: Instant) -> bool {
        let Some(sealed) = &mut self.sealed else { return false };
        let Some(notices) = &sealed.notices else { return false };
        if now < sealed.looked_at + NOTICE_EVERY {
            return false;
        }
        sealed.looked_at = now;
        match asked::notice(notices.as_fd()) {
            Notice::None => false,
            Notice::Untrusted => true,
            Notice::Unwatched => {
                sealed.notices = None;
                false
            }
        }
    }

    /// The socket of a plain connection.
    pub(crate) fn into_socket(self) -> Descriptor {
        self.socket
    }

    /// Sends what the socket takes now. Returns how many of the vector's bytes were taken; of
    /// those, sealed ones may wait: see [`Self::has_unsent`].
    ///
    /// # Safety
    /// Every part of the vector must be readable during the call.
    pub(crate) unsafe fn send(&mut self, from: &Vector) -> Result<usize, Trouble> {
        let Some(sealed) = &mut self.sealed else {
            // SAFETY: as promised by the caller.
            return Ok(unsafe { sys::send(self.socket.as_fd(), from) }?);
        };
        sealed.flush(self.socket.as_fd())?;
        let outgoing = &mut sealed.outgoing;
        // SAFETY: as promised by the caller.
        let taken = unsafe { sys::gather(from, |bytes| outgoing.add(bytes)) }?;
        outgoing.seal()?;
        sealed.flush_some(self.socket.as_fd())?;
        Ok(taken)
    }

    /// As [`Self::send`].
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Trouble> {
        let Some(sealed) = &mut self.sealed else {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            return Ok(rustix::net::send(&self.socket, bytes, flags)?);
        };
        sealed.flush(self.socket.as_fd())?;
        let taken = sealed.outgoing.add(bytes)?;
        sealed.outgoing.seal()?;
        sealed.flush_some(self.socket.as_fd())?;
        Ok(taken)
    }

    /// Receives what is there, up to the vector's size. 0 means that the peer closed. What has been
    /// received from the socket is given out before it is waited for.
    ///
    /// # Safety
    /// Every part of the vector must be writable, and not used by others, during the call.
    pub(crate) unsafe fn receive(
        &mut self,
        into: &mut Vector,
        patience: Patience,
    ) -> Result<usize, Trouble> {
        let Some(sealed) = &mut self.sealed else {
            // SAFETY: as promised by the caller.
            return Ok(unsafe { sys::receive(self.socket.as_fd(), into, patience) }?);
        };
        let mut all = 0;
        let mut flags = patience.flags();
        loop {
            let content = sealed.incoming.content();
            match content {
                Ok([]) => {}
                Ok(content) => {
                    // SAFETY: as promised by the caller.
                    let count = unsafe { sys::scatter(into, content) };
                    sealed.incoming.take(count);
                    all += count;
                    if into.bytes() == 0 {
                        return Ok(all);
                    }
                    continue;
                }
                // What came before it is good; the next call fails alike.
                Err(_) if all > 0 => return Ok(all),
                Err(RecordError::Closed) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
            if all > 0 {
                return Ok(all);
            }
            if sealed.receive(self.socket.as_fd(), flags)? == 0 {
                return Ok(0);
            }
            // The rest of a record is on its way; the caller decides whether to wait for it.
            flags = RecvFlags::DONTWAIT;
        }
    }

    /// Receives bytes, and over a plain socket any descriptors that come with them. 0 means that
    /// the peer closed. Never waits.
    pub(crate) fn receive_bytes(
        &mut self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<usize, Trouble> {
        let Some(sealed) = &mut self.sealed else {
            let socket = self.socket.as_fd();
            return Ok(sys::receive_with_descriptors(socket, into, descriptors)?);
        };
        loop {
            let content = match sealed.incoming.content() {
                Err(RecordError::Closed) => return Ok(0),
                other => other?,
            };
            if !content.is_empty() {
                let count = content.len().min(into.len());
                into[..count].copy_from_slice(&content[..count]);
                sealed.incoming.take(count);
                return Ok(count);
            }
            if sealed.receive(self.socket.as_fd(), RecvFlags::DONTWAIT)? == 0 {
                return Ok(0);
            }
        }
    }

    /// Sends sealed bytes that wait. False if some still do.
    pub(crate) fn flush(&mut self) -> Result<bool, Trouble> {
        match &mut self.sealed {
            None => Ok(true),
            Some(sealed) => sealed.flush_some(self.socket.as_fd()),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Sealed {
    /// Sends all that waits, or fails with EAGAIN.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Trouble> {
        if self.flush_some(socket)? { Ok(()) } else { Err(Errno::AGAIN.into()) }
    }

    /// Sends what the socket takes of what waits. True if that was all.
    fn flush_some(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Trouble> {
        while !self.outgoing.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(socket, self.outgoing.sealed(), flags) {
                Ok(count) => self.outgoing.sent(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    fn receive(&mut self, socket: BorrowedFd<'_>, flags: RecvFlags) -> Result<usize, Errno> {
        let (_, count) = rustix::net::recv(socket, self.incoming.room(), flags)?;
        self.incoming.received(count);
        Ok(count)
    }
}
