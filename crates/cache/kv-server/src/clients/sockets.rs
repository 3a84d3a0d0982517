//! A client at its socket: what is written to it, and which events it is registered for.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;

use super::Clients;
use super::connection::{Client, Phase};
use super::held::Counted;
use crate::keyvault::state::KeyVaultState;
use crate::tls::session::Session;
use crate::watch::report::ThreadCounts;

/// The most that one read takes. It also bounds what one connection can request before others have
/// their turn.
pub(crate) const READ_BYTES: usize = 64 << 10;
/// The reply buffer keeps no more than this between rounds.
const OUT_BYTES_KEPT: usize = 1 << 20;
/// Replies beyond this are sent before more are made.
pub(crate) const OUT_BYTES_MAX: usize = 256 << 10;

/// A client and its socket.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) client: Client,
    /// Distinguishes it from an earlier connection with the same number.
    pub(crate) generation: u32,
    pub(crate) interest: epoll::EventFlags,
    pub(crate) is_local: bool,
    /// Its TLS session, if it is to speak TLS.
    pub(crate) tls: Option<Box<Session>>,
    /// State of a connection that speaks KeyVault.
    pub(crate) keyvault: Option<KeyVaultState>,
    /// The thread that is to serve it from now on.
    pub(crate) moves_to: Option<usize>,
    /// How much of what its thread's clients hold is counted as this client's.
    pub(crate) counted: Counted,
}

impl Connection {
    /// Ends a client that has ended its TLS session, once its requests are served: like one that
    /// has shut down its sending side it still gets its replies.
    pub(crate) fn end_if_told(&mut self) {
        let has_ended = self.tls.as_ref().is_some_and(|session| session.has_ended());
        if has_ended && self.client.wants_input() {
            self.client.phase = Phase::Closing;
        }
    }

    /// Registers with epoll for what the connection needs next. False when that fails.
    pub(crate) fn watch(&mut self, number: usize, epoll: &OwnedFd) -> bool {
        let mut interest = epoll::EventFlags::empty();
        if self.client.wants_input() {
            interest |= epoll::EventFlags::IN;
        }
        // Input waits for its turn and no other event would wake the thread: a socket is writable
        // at once.
        if !self.client.unsent.is_empty() || self.client.is_served_next() {
            interest |= epoll::EventFlags::OUT;
        }
        if interest == self.interest {
            return true;
        }
        self.interest = interest;
        let data = epoll::EventData::new_u64(number as u64);
        epoll::modify(epoll, &self.socket, data, interest).is_ok()
    }
}

impl Clients {
    /// Puts the answers made so far into the connection's ring, if it has one. Answers too long for
    /// the ring remain, for the socket.
    pub(crate) fn push_answers(
        &mut self,
        client: &mut Client,
        keyvault: Option<&mut KeyVaultState>,
    ) {
        if let Some(ring_client) = keyvault.and_then(|keyvault| keyvault.ring_client.as_mut()) {
            let long = ring_client.push_all(&self.out);
            self.out.clear();
            self.out.extend_from_slice(&long);
            client.is_ring_full = ring_client.holds_answers();
        }
    }

    /// Ends a TLS session in order, as far as the socket takes it now.
    pub(crate) fn end_session(connection: &mut Connection) {
        if let Some(session) = &mut connection.tls
            && connection.client.unsent.is_empty()
        {
            // The client may be gone already.
            let _ = send_bytes(&connection.socket, &session.end());
        }
    }

    /// Sends what is ready at the end of a turn. False if the connection is over.
    pub(crate) fn finish(
        &mut self,
        connection: &mut Connection,
        counts: &mut ThreadCounts,
    ) -> bool {
        self.push_answers(&mut connection.client, connection.keyvault.as_mut());
        let is_due = connection.client.replies.settle(&mut self.out, &mut self.spare);
        !is_due || self.send(connection, counts)
    }

    /// Sends the replies made so far, after those still unsent. False if the connection is over.
    pub(crate) fn send(&mut self, connection: &mut Connection, counts: &mut ThreadCounts) -> bool {
        // Bytes of the protocol are counted, as they are when they are read.
        counts.bytes_written += self.out.len() as u64;
        if let Some(session) = &mut connection.tls {
            session.seal(&mut self.out);
        }
        let client = &mut connection.client;
        if !client.unsent.is_empty() {
            client.unsent.extend_from_slice(&self.out);
            self.out.clear();
            while client.sent_bytes < client.unsent.len() {
                match send_bytes(&connection.socket, &client.unsent[client.sent_bytes..]) {
                    Ok(bytes) => client.sent_bytes += bytes,
                    Err(Errno::AGAIN) => return true,
                    Err(Errno::INTR) => {}
                    Err(_) => return false,
                }
            }
            client.note_sent();
            return true;
        }
        let mut sent = 0;
        let mut is_open = true;
        while sent < self.out.len() {
            match send_bytes(&connection.socket, &self.out[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    is_open = false;
                    break;
                }
            }
        }
        if is_open && sent < self.out.len() {
            client.unsent.extend_from_slice(&self.out[sent..]);
        }
        self.out.clear();
        self.out.shrink_to(OUT_BYTES_KEPT);
        is_open
    }
}

fn send_bytes(socket: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(
        socket,
        bytes,
        rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
    )
}
