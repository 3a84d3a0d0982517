//! How bytes get to and from a connection's socket: as they are, or in the records of TLS.
//!
//! Over a blade's TCP with certificates every connection begins with a handshake; nothing of it is
//! read as a frame before that is complete and the peer admitted. Who is refused is told why as far
//! as it can be (an alert of TLS, or a frame in the clear to a peer that does not speak TLS), and
//! is then heard out without being listened to: a connection that is closed while bytes of the peer
//! are unread is reset, and the reset can destroy the reason before it was read.

use super::certified::{Admitted, Certified};
use crate::gate::Gate;
use crate::table::Origin;
use farpool_handshake::{Accept, AcceptError, Accepted};
use farpool_record::{Incoming, Outgoing, RecordError, Secrets};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Most that is heard of a refused peer in one go, in bytes.
const LAST_WORDS_BYTES: usize = 16 << 10;

/// See the module's description.
#[derive(Debug)]
pub(super) enum Way {
    Plain,
    Opening {
        accept: Box<Accept>,
        is_full: bool,
    },
    Sealed(Box<Sealed>),
    /// Refused; what it sends is not looked at.
    Refused,
}

/// The records of a connection whose peer is known.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
    admitted: Admitted,
}

/// What became of a handshake.
#[derive(Debug)]
pub(super) enum Opened {
    /// It goes on.
    Waits,
    /// Frames may be read.
    Ready,
    /// The peer speaks in the clear.
    Clear,
    /// The peer is refused.
    Refused(String),
}

impl Way {
    /// The way of a connection that has just arrived, over TCP or not.
    pub(super) fn new(certified: Option<&Arc<Certified>>, is_unix: bool) -> Way {
        match certified {
            Some(certified) if !is_unix => match certified.begin() {
                Ok(accept) => Way::Opening { accept: Box::new(accept), is_full: false },
                Err(_) => Way::Refused,
            },
            _ => Way::Plain,
        }
    }

    /// Goes on with a handshake.
    ///
    /// # Errors
    /// The connection is broken, or was closed.
    pub(super) fn open(
        &mut self,
        certified: Option<&Arc<Certified>>,
        gate: &Arc<Gate>,
    ) -> io::Result<Opened> {
        let (Way::Opening { accept, is_full }, Some(certified)) = (&mut *self, certified) else {
            return Ok(Opened::Ready);
        };
        let refused = match accept.advance(gate.socket.as_fd()) {
            Ok(Accepted::Waiting) => {
                *is_full = false;
                return Ok(Opened::Waits);
            }
            Ok(Accepted::Full) => {
                *is_full = true;
                return Ok(Opened::Waits);
            }
            Ok(Accepted::Done(secrets, peer)) => match certified.admit(*peer, gate) {
                Ok(admitted) => {
                    *self = Way::Sealed(Box::new(Sealed::new(secrets, admitted)));
                    return Ok(Opened::Ready);
                }
                Err(refusal) => Opened::Refused(refusal.to_string()),
            },
            Err(AcceptError::Clear) => Opened::Clear,
            Err(AcceptError::Broken(errno)) => return Err(errno.into()),
            Err(error @ AcceptError::Closed) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, error));
            }
            Err(AcceptError::Refused(why)) => Opened::Refused(why),
        };
        *self = Way::Refused;
        Ok(refused)
    }

    /// True if it waits for the socket to accept bytes again.
    pub(super) fn wants_to_send(&self) -> bool {
        match self {
            Way::Plain | Way::Refused => false,
            Way::Opening { is_full, .. } => *is_full,
            Way::Sealed(sealed) => !sealed.outgoing.is_empty(),
        }
    }

    /// The peer by its certificate, to the table; `origin` if it has shown none.
    pub(super) fn origin(&self, origin: Origin) -> Origin {
        match self {
            Way::Sealed(sealed) => sealed.admitted.origin(origin == Origin::Loopback),
            _ => origin,
        }
    }

    /// False if its certificate allows it only to look.
    pub(super) fn may_borrow(&self) -> bool {
        match self {
            Way::Sealed(sealed) => sealed.admitted.may_borrow(),
            _ => true,
        }
    }
}

impl Sealed {
    fn new(secrets: Secrets, admitted: Admitted) -> Self {
        let Secrets { sending, receiving } = secrets;
        let (incoming, outgoing) = (Incoming::new(receiving), Outgoing::new(sending));
        Sealed { incoming, outgoing, admitted }
    }
}

/// Sends sealed bytes that wait. False if the socket is full before all are sent.
pub(super) fn flush(outgoing: &mut Outgoing, socket: BorrowedFd<'_>) -> io::Result<bool> {
    while !outgoing.is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(socket, outgoing.sealed(), flags) {
            Ok(count) => outgoing.sent(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}

/// Says that nothing more will be sent to a refused peer.
pub(super) fn end_words(socket: BorrowedFd<'_>) {
    // It may be gone already.
    let _ = rustix::net::shutdown(socket, Shutdown::Write);
}

/// Takes what a refused peer still sends. False at its end.
pub(super) fn hear_out(socket: BorrowedFd<'_>) -> bool {
    let mut bytes = [0; LAST_WORDS_BYTES];
    match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((_, count)) => count > 0,
        Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
    }
}

/// An error of records, as one of a stream.
pub(super) fn as_io(error: RecordError) -> io::Error {
    match error {
        RecordError::Closed => io::ErrorKind::UnexpectedEof.into(),
        error => io::Error::new(io::ErrorKind::InvalidData, error),
    }
}
