//! The blade's side of a handshake, on a socket that never blocks.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use farpool_identity::{Peer, Refusal, Side, explain_tls};
use farpool_record::Secrets;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustls::{ServerConfig, ServerConnection};

use crate::keys::secrets_of;
use crate::record::{NoRecord, Record};

/// The type of the first record of a handshake (RFC 8446, 5.1).
const TYPE_HANDSHAKE: u8 = 22;
/// Most bytes of one read; a client's whole handshake is shorter.
const BITE_BYTES: usize = 4096;
/// Most bytes of a client's handshake. A certificate with some between it and its authority has a
/// few KiB.
const HANDSHAKE_LIMIT_BYTES: usize = 64 << 10;

/// What a step has come to.
#[derive(Debug)]
pub enum Accepted {
    /// The client has to send more.
    Waiting,
    /// The socket has to take more.
    Full,
    /// It is complete: the keys, and who the client is.
    Done(Secrets, Box<Peer>),
}

/// Why a handshake has failed. What the client is to know of it was sent, as far as the socket
/// took it.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The client speaks in the clear; nothing was sent.
    #[error("it does not speak TLS; give it --pki DIR")]
    Clear,
    /// The connection is broken.
    #[error("{0}")]
    Broken(#[from] Errno),
    /// The client closed it.
    #[error("it closed the connection within the handshake")]
    Closed,
    /// The client is refused, or refuses this blade.
    #[error("{0}")]
    Refused(String),
}

/// A handshake under way.
pub struct Accept {
    /// None once it has ended.
    connection: Option<ServerConnection>,
    record: Record,
    received_bytes: usize,
}

impl fmt::Debug for Accept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accept").field("received_bytes", &self.received_bytes).finish()
    }
}

impl Accept {
    /// What a blade needs for all its handshakes, of [`farpool_identity::Credentials::server`].
    #[must_use]
    pub fn config(mut server: ServerConfig) -> Arc<ServerConfig> {
        server.enable_secret_extraction = true;
        Arc::new(server)
    }

    /// A handshake of which nothing was received yet.
    ///
    /// # Errors
    /// None that is known.
    pub fn new(config: &Arc<ServerConfig>) -> Result<Self, Refusal> {
        let connection = ServerConnection::new(Arc::clone(config));
        let connection = connection.map_err(|error| Refusal::Other(error.to_string()))?;
        Ok(Accept { connection: Some(connection), record: Record::default(), received_bytes: 0 })
    }

    /// Goes as far as it can without waiting.
    ///
    /// # Errors
    /// See [`AcceptError`]; the handshake has ended then.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> Result<Accepted, AcceptError> {
        loop {
            let connection = self.connection.as_mut().ok_or(AcceptError::Closed)?;
            if connection.wants_write() && !flush(connection, socket)? {
                return Ok(Accepted::Full);
            }
            if !connection.is_handshaking() {
                return self.done();
            }
            let missing_bytes = self.missing_bytes()?;
            if missing_bytes > 0 {
                if !self.receive(socket, missing_bytes)? {
                    return Ok(Accepted::Waiting);
                }
            } else {
                self.take_record(socket)?;
            }
        }
    }

    fn missing_bytes(&mut self) -> Result<usize, AcceptError> {
        self.record.missing_bytes().map_err(|NoRecord| match self.received_bytes {
            bytes if bytes <= farpool_record::HEADER_BYTES => AcceptError::Clear,
            _ => AcceptError::Refused("it sent something other than TLS".into()),
        })
    }

    /// False if nothing has arrived.
    fn receive(&mut self, socket: BorrowedFd<'_>, missing: usize) -> Result<bool, AcceptError> {
        let mut bytes = [0; BITE_BYTES];
        let room = &mut bytes[..missing.min(BITE_BYTES)];
        match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(AcceptError::Closed),
            Ok((_, count)) => {
                // Of a record of another type, the first byte tells.
                if self.received_bytes == 0 && bytes[0] != TYPE_HANDSHAKE {
                    return Err(AcceptError::Clear);
                }
                self.received_bytes += count;
                self.record.add(&bytes[..count]);
                if self.received_bytes > HANDSHAKE_LIMIT_BYTES {
                    return Err(AcceptError::Refused("its handshake has no end".into()));
                }
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    fn take_record(&mut self, socket: BorrowedFd<'_>) -> Result<(), AcceptError> {
        let connection = self.connection.as_mut().ok_or(AcceptError::Closed)?;
        let record = self.record.take();
        let mut left = &record[..];
        while !left.is_empty() {
            let read = connection.read_tls(&mut left);
            let processed = read.map_err(|error| AcceptError::Refused(error.to_string()));
            if let Err(error) = processed.map(|_| connection.process_new_packets())? {
                // The alert, as far as the socket takes it: the handshake ends in any case.
                let _ = flush(connection, socket);
                self.connection = None;
                return Err(AcceptError::Refused(explain_tls(&error)));
            }
        }
        Ok(())
    }

    fn done(&mut self) -> Result<Accepted, AcceptError> {
        let connection = self.connection.take().ok_or(AcceptError::Closed)?;
        let refused = |refusal: Refusal| AcceptError::Refused(refusal.to_string());
        let peer = Peer::of(&connection, Side::Client).map_err(refused)?;
        let extracted = connection.dangerous_extract_secrets();
        let extracted = extracted.map_err(|error| AcceptError::Refused(error.to_string()))?;
        let secrets = secrets_of(extracted);
        let secrets = secrets.ok_or(AcceptError::Refused("a cipher that is not spoken".into()))?;
        Ok(Accepted::Done(secrets, Box::new(peer)))
    }
}

/// Sends what rustls has to say. False if the socket is full.
fn flush(connection: &mut ServerConnection, socket: BorrowedFd<'_>) -> Result<bool, AcceptError> {
    let mut writer = Writer(socket);
    while connection.wants_write() {
        match connection.write_tls(&mut writer) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                return Err(AcceptError::Broken(errno));
            }
        }
    }
    Ok(true)
}

struct Writer<'a>(BorrowedFd<'a>);

impl io::Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(rustix::net::send(self.0, bytes, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
