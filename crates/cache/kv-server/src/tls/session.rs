//! One client's TLS session: bytes of the socket to bytes of the protocol, and back. No I/O here.

use std::io::{Read, Write};

use rustls::ServerConnection;

/// A session, from its handshake on.
#[derive(Debug)]
pub(crate) struct Session {
    tls: ServerConnection,
    has_ended: bool,
}

/// The session cannot go on; what [`Session::seal`] returns next tells the client why.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct Broken {
    reason: rustls::Error,
    pub(crate) was_handshake: bool,
}

impl Session {
    pub(crate) fn new(mut tls: ServerConnection) -> Self {
        // The server has its own limits on what clients may leave unread.
        tls.set_buffer_limit(None);
        Self { tls, has_ended: false }
    }

    /// Takes bytes of the socket; appends what they carry to `plain`.
    pub(crate) fn open(&mut self, mut sealed: &[u8], plain: &mut Vec<u8>) -> Result<(), Broken> {
        while !sealed.is_empty() && !self.has_ended {
            let was_handshake = self.tls.is_handshaking();
            let broken = |reason| Broken { reason, was_handshake };
            // Reading from memory fails only if what came before is unread: it is read below.
            let taken = self.tls.read_tls(&mut sealed);
            let taken = taken.map_err(|error| broken(rustls::Error::General(error.to_string())))?;
            let state = self.tls.process_new_packets().map_err(broken)?;
            let start = plain.len();
            plain.resize(start + state.plaintext_bytes_to_read(), 0);
            let read = self.tls.reader().read_exact(&mut plain[start..]);
            read.map_err(|error| broken(rustls::Error::General(error.to_string())))?;
            // What follows the end of a session belongs to nobody.
            self.has_ended = state.peer_has_closed() || taken == 0;
        }
        Ok(())
    }

    /// Whether the client has said that it sends no more.
    pub(crate) const fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Replaces bytes of the protocol by bytes for the socket, and adds those of the session
    /// itself: its handshake, its alerts.
    pub(crate) fn seal(&mut self, out: &mut Vec<u8>) {
        if !out.is_empty() {
            // A writer without a limit takes everything.
            let written = self.tls.writer().write_all(out);
            debug_assert!(written.is_ok(), "replies fit");
            out.clear();
        }
        while self.tls.wants_write() {
            // Writing to memory does not fail.
            if self.tls.write_tls(out).is_err() {
                break;
            }
        }
    }

    /// The bytes that end the session in order.
    pub(crate) fn end(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        self.tls.send_close_notify();
        self.seal(&mut out);
        out
    }
}
