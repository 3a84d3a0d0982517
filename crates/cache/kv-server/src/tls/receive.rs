//! Reading from a client that speaks TLS.

use rustix::io::Errno;

use crate::clients::connection::Phase;
use crate::clients::sockets::Connection;
use crate::mail::mailbox::ConnectionId;
use crate::worker::Worker;

impl Worker {
    /// Reads once and serves what the bytes carry. False if the connection is over.
    pub(crate) fn receive_sealed(&mut self, connection: &mut Connection, id: ConnectionId) -> bool {
        let mut buffer = self.clients.take_read_buffer();
        let read = rustix::io::read(&connection.socket, &mut buffer[..]);
        let is_open = match read {
            Ok(0) => {
                // Without the session's end: what was not complete is not carried out.
                connection.client.phase = Phase::Closing;
                true
            }
            Ok(bytes) => self.take_sealed(connection, id, &buffer[..bytes]),
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        };
        self.clients.return_read_buffer(buffer);
        is_open
    }

    fn take_sealed(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        sealed: &[u8],
    ) -> bool {
        let Some(session) = &mut connection.tls else { return false };
        let mut input = std::mem::take(&mut connection.client.input);
        let had_bytes = input.len();
        let missing = connection.client.want_bytes.saturating_sub(had_bytes);
        self.clients.grow_input(&mut input, missing.min(had_bytes));
        match session.open(sealed, &mut input) {
            Ok(()) => {
                self.me.counts.bytes_read += (input.len() - had_bytes) as u64;
                let client = &mut connection.client;
                let is_short = had_bytes > 0 && input.len() < client.want_bytes;
                if is_short && client.phase == Phase::Requests {
                    client.input = input;
                } else if !self.process(connection, id, input) {
                    return false;
                }
                // The session may have something to say although the protocol has not.
                self.clients.send(connection, &mut self.me.counts)
            }
            Err(broken) => {
                self.me.counts.tls_handshake_errors += u64::from(broken.was_handshake);
                tracing::debug!(%broken, "a TLS session ends");
                connection.client.is_refused = true;
                // Tells the client why, if it is still there.
                let _ = self.clients.send(connection, &mut self.me.counts);
                false
            }
        }
    }
}
