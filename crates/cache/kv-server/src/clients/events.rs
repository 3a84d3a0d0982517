//! The life of a thread's clients: they are accepted, read, served, answered and closed.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::event::epoll;
use rustix::io::Errno;

use super::Clients;
use super::connection::{Client, CloseReason, Phase};
use super::held::Counted;
use super::sockets::Connection;
use crate::keyvault::state::{KeyVaultState, Source};
use crate::mail::mailbox::{Answer, Batch, ConnectionId, Message, Protocol, Told};
use crate::settings::Dialect;
use crate::tls::session::Session;
use crate::watch::journal;
use crate::worker::Worker;

/// An incomplete request of at least this length, of which as much is missing, is read into its own
/// buffer; others go through the thread's.
const DIRECT_BYTES_MIN: usize = 16 << 10;

/// A connection's number as other threads refer to it.
pub(super) fn number_of(number: usize) -> u32 {
    u32::try_from(number).expect("numbers of connections are u32")
}

impl Worker {
    /// Adds a client; `input` is what it has already sent.
    pub(crate) fn add(
        &mut self,
        (socket, is_local): (OwnedFd, bool),
        protocol: Protocol,
        input: Vec<u8>,
    ) {
        if !is_local {
            // A reply is one write; waiting to coalesce would only delay it.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            let _ = rustix::net::sockopt::set_socket_keepalive(&socket, true);
        }
        let number = self.clients.take_number();
        let interest = epoll::EventFlags::IN;
        let data = epoll::EventData::new_u64(u64::from(number));
        if let Err(errno) = epoll::add(&self.me.epoll, &socket, data, interest) {
            tracing::warn!(%errno, "a client cannot be watched and is sent away");
            self.clients.return_number(number);
            self.me.shared.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let generation = self.clients.next_generation();
        self.me.counts.connections += 1;
        let is_known = self.me.shared.settings.credentials.is_none();
        let (now_s, item_bytes_max) = (self.shard.clock.now_s(), self.me.limits.item_bytes_max);
        let mut client = Client::new(is_known, now_s, item_bytes_max);
        client.dialect = self.me.shared.settings.dialect;
        let keyvault = (protocol == Protocol::KeyVault).then(KeyVaultState::default);
        let tls = match self.session_for(protocol) {
            Ok(tls) => tls,
            Err(error) => {
                tracing::warn!(%error, "a client cannot begin TLS and is sent away");
                client.phase = Phase::Closing;
                None
            }
        };
        let mut connection = Connection {
            socket,
            client,
            generation,
            interest,
            is_local,
            tls,
            keyvault,
            moves_to: None,
            counted: Counted::default(),
        };
        journal::note_opened(&mut self.shard.store, &connection);
        let mut is_open = true;
        if !input.is_empty() {
            is_open = self.process(&mut connection, ConnectionId { number, generation }, input);
        }
        self.put_back(number as usize, connection, is_open);
    }

    /// The TLS session of a new client, if it is to speak TLS.
    fn session_for(&self, protocol: Protocol) -> Result<Option<Box<Session>>, rustls::Error> {
        match &self.me.shared.settings.tls {
            Some(tls) if protocol == Protocol::TextOverTls => tls.begin().map(Box::new).map(Some),
            _ => Ok(None),
        }
    }

    /// Hands a connection to another thread, with the input that this thread has not answered.
    fn hand_over(&mut self, number: usize, mut connection: Connection, to: usize) {
        let _ = epoll::delete(&self.me.epoll, &connection.socket);
        self.clients.forget_held(&connection);
        self.clients.return_number(number_of(number));
        self.me.counts.connections -= 1;
        let input = std::mem::take(&mut connection.client.input);
        let Connection { socket, is_local, .. } = connection;
        let protocol = Protocol::KeyVault;
        let message = Message::Client { socket, is_local, protocol, input };
        self.me.shared.mailboxes[to].put(message);
    }

    /// Closes a connection; replies still owed to it are lost.
    pub(crate) fn close(&mut self, number: usize, reason: CloseReason) {
        let Some(mut connection) = self.clients.take(number) else { return };
        let input = std::mem::take(&mut connection.client.input);
        self.clients.free_input(input);
        self.clients.forget_held(&connection);
        Clients::end_session(&mut connection);
        if let Some(keyvault) = &mut connection.keyvault {
            keyvault.end_leases(&mut self.shard);
        }
        let id = ConnectionId { number: number_of(number), generation: connection.generation };
        journal::note_closed(&mut self.shard.store, &self.me, id, &connection, reason);
        self.ring_clients.leave(&self.me, id.number, &connection);
        self.clients.return_number(id.number);
        self.me.counts.connections -= 1;
        self.me.shared.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn on_event(&mut self, number: usize, flags: epoll::EventFlags) {
        let Some(mut connection) = self.clients.take(number) else { return };
        let id = ConnectionId { number: number_of(number), generation: connection.generation };
        connection.client.last_active_s = self.shard.clock.now_s();
        let mut is_open = true;
        if flags.contains(epoll::EventFlags::OUT) {
            is_open = self.clients.send(&mut connection, &mut self.me.counts);
            if is_open && connection.client.unsent.is_empty() {
                // Input that backpressure held up comes before new input.
                let input = std::mem::take(&mut connection.client.input);
                is_open = self.process(&mut connection, id, input);
            }
        }
        let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if is_open && connection.client.wants_input() {
            if flags.intersects(gone | epoll::EventFlags::IN) {
                is_open = self.receive(&mut connection, id);
            }
        } else if flags.intersects(gone) {
            // No one is left to read the output still to be sent.
            is_open = false;
        }
        self.put_back(number, connection, is_open);
    }

    /// Registers for what the connection needs next, or closes it.
    pub(crate) fn put_back(&mut self, number: usize, connection: Connection, is_open: bool) {
        self.put_back_alone(number, connection, is_open);
        self.make_room_for_held();
    }

    /// As [`Self::put_back`], without regard to what all clients together hold.
    pub(super) fn put_back_alone(
        &mut self,
        number: usize,
        mut connection: Connection,
        is_open: bool,
    ) {
        if let Some(to) = connection.moves_to {
            return self.hand_over(number, connection, to);
        }
        self.ring_clients.join(&self.me, number_of(number), &connection);
        connection.end_if_told();
        connection.client.note_unsent(self.shard.clock.now_s());
        self.clients.count_held(&mut connection);
        let is_done = connection.client.phase == Phase::Closing && connection.client.is_quiet();
        let is_refused = connection.client.is_refused;
        let is_open = is_open && !is_done && connection.watch(number, &self.me.epoll);
        self.clients.put(number, connection);
        if !is_open {
            let is_normal = is_done && !is_refused;
            self.close(number, if is_normal { CloseReason::Normal } else { CloseReason::Error });
        }
    }

    /// Serves input in the client's protocol. Returns the bytes consumed.
    fn serve_any(&mut self, connection: &mut Connection, id: ConnectionId, input: &[u8]) -> usize {
        journal::note_client(&mut self.shard.store, Some(connection));
        if connection.keyvault.is_some() {
            return self.serve_keyvault(connection, id, (input, Source::Socket));
        }
        match connection.client.decide_dialect(input) {
            Dialect::Binary => self.serve_binary(connection, id, input),
            Dialect::Text | Dialect::Auto => self.serve(connection, id, input),
        }
    }

    /// Refuses the request at the start of the input if only its value is not complete. Returns the
    /// bytes consumed; the rest of the value is skipped.
    pub(super) fn refuse_any(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        journal::note_client(&mut self.shard.store, Some(connection));
        match connection.client.dialect {
            Dialect::Binary => self.refuse_binary(&mut connection.client, id, input),
            Dialect::Text | Dialect::Auto => self.refuse(&mut connection.client, id, input),
        }
    }

    /// Reads once and serves the input. False if the connection is over.
    fn receive(&mut self, connection: &mut Connection, id: ConnectionId) -> bool {
        if connection.tls.is_some() {
            return self.receive_sealed(connection, id);
        }
        // The buffer of a long request grows with the bytes received, so that a client gets no
        // memory for bytes it only announces, and is read into directly. Of a line without an end
        // nobody knows how much is missing.
        let client = &mut connection.client;
        let missing = client.want_bytes.saturating_sub(client.input.len());
        if missing.min(client.input.len()) < DIRECT_BYTES_MIN {
            return self.receive_by_buffer(connection, id);
        }
        let more = missing.min(client.input.len());
        self.clients.grow_input(&mut client.input, more);
        let room = rustix::buffer::spare_capacity(&mut client.input);
        let read = rustix::io::read(&connection.socket, room);
        self.on_read(connection, id, read, |_| ())
    }

    /// Reads into the thread's buffer: a request that arrived whole is served from there.
    fn receive_by_buffer(&mut self, connection: &mut Connection, id: ConnectionId) -> bool {
        let mut buffer = self.clients.take_read_buffer();
        let read = rustix::io::read(&connection.socket, &mut buffer[..]);
        let is_open = if let Ok(bytes @ 1..) = read
            && connection.client.input.is_empty()
        {
            self.me.counts.bytes_read += bytes as u64;
            let done = self.serve_any(connection, id, &buffer[..bytes]);
            connection.client.input.extend_from_slice(&buffer[done..bytes]);
            self.clients.finish(connection, &mut self.me.counts)
        } else {
            let keep = |client: &mut Client| {
                client.input.extend_from_slice(&buffer[..read.unwrap_or_default()]);
            };
            self.on_read(connection, id, read, keep)
        };
        self.clients.return_read_buffer(buffer);
        is_open
    }

    /// Goes on with kept input, once `keep` has added to it what was `read`. False if the
    /// connection is over.
    fn on_read(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        read: Result<usize, Errno>,
        keep: impl FnOnce(&mut Client),
    ) -> bool {
        let client = &mut connection.client;
        match read {
            Ok(0) => {
                // A client that only shut down its sending side still gets its replies.
                client.phase = Phase::Closing;
                true
            }
            Ok(bytes) => {
                self.me.counts.bytes_read += bytes as u64;
                keep(client);
                if client.input.len() < client.want_bytes && client.phase == Phase::Requests {
                    return true;
                }
                let input = std::mem::take(&mut client.input);
                self.process(connection, id, input)
            }
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        }
    }

    /// Serves kept input. False if the connection is over.
    pub(crate) fn process(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        mut input: Vec<u8>,
    ) -> bool {
        let done = self.serve_any(connection, id, &input);
        input.drain(..done);
        let kept = &mut connection.client.input;
        if kept.is_empty() && input.capacity() <= 2 * input.len() {
            *kept = input;
        } else {
            // A greeting that another thread is to read is there already, in front. Of a buffer
            // that is mostly free only what is used is kept.
            kept.append(&mut input);
            self.clients.free_input(input);
        }
        self.clients.finish(connection, &mut self.me.counts)
    }

    /// Delivers answers of other shards to their connections.
    pub(crate) fn deliver(&mut self, batch: &Batch<Answer>) {
        let mut start = 0;
        let mut entries = batch.entries.iter().peekable();
        while let Some(first) = entries.next() {
            let id = first.address.connection;
            let number = id.number as usize;
            // The number may be another client's by now.
            let is_it = |it: &mut Connection| it.generation == id.generation;
            let mut connection = self.clients.take_if(number, is_it);
            if let Some(connection) = &mut connection {
                connection.client.replies.resume(&mut self.clients.out);
            }
            let mut entry = first;
            loop {
                let bytes = &batch.bytes[start..entry.end];
                start = entry.end;
                match &mut connection {
                    Some(Connection { keyvault: Some(keyvault), client, .. }) => {
                        let has_come = !matches!(entry.what, Answer::Parked);
                        client.awaited = client.awaited.saturating_sub(usize::from(has_come));
                        self.take_keyvault_answer(keyvault, entry, bytes)
                    }
                    Some(connection) => self.take_answer(&mut connection.client, entry, bytes),
                    None => {}
                }
                // Answers to one connection are mostly adjacent and are sent together.
                match entries.next_if(|next| next.address.connection == id) {
                    Some(next) => entry = next,
                    None => break,
                }
            }
            if let Some(mut connection) = connection {
                let mut is_open = self.clients.finish(&mut connection, &mut self.me.counts);
                if is_open
                    && connection.client.unsent.is_empty()
                    && connection.client.is_served_next()
                {
                    let input = std::mem::take(&mut connection.client.input);
                    is_open = self.process(&mut connection, id, input);
                }
                self.put_back(number, connection, is_open);
            }
        }
    }

    /// Sends journal lines to this thread's watchers.
    pub(crate) fn tell_watchers(&mut self, told: &Told) {
        for number in 0..self.clients.numbers() {
            let watches = |it: &mut Connection| it.client.watch.is_some();
            let Some(mut connection) = self.clients.take_if(number, watches) else { continue };
            self.clients.tell(&mut connection.client, told, &mut self.me.counts);
            let is_open = self.clients.finish(&mut connection, &mut self.me.counts);
            self.put_back(number, connection, is_open);
        }
    }
}
