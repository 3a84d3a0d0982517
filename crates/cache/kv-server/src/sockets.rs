//! A thread's clients at their sockets: they come, are read, served and written to, and go.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::event::epoll;
use rustix::io::Errno;

use super::connection::{Client, Phase, Ticket};
use super::light::{Light, Source};
use super::mailbox::{Address, Answer, Batch, Message, Protocol};
use super::watch::CloseReason;
use super::worker::{TOKEN_BELL, Worker};

/// What one read takes at most. It also bounds what one connection can ask before others have their turn.
pub(super) const READ_BYTES: usize = 64 << 10;
/// The reply buffer keeps no more than this between rounds.
const OUT_BYTES_KEPT: usize = 1 << 20;
/// Replies beyond this are sent before more are made.
pub(super) const OUT_BYTES_MAX: usize = 256 << 10;

/// A client and its socket.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) client: Client,
    /// Tells it from an earlier connection of the same number.
    pub(super) generation: u32,
    pub(super) interest: epoll::EventFlags,
    pub(super) is_local: bool,
    /// What it needs if it speaks KeyVault.
    pub(super) light: Option<Light>,
    /// The thread that is to serve it from now on.
    pub(super) moves_to: Option<usize>,
}

/// Which connection of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionId {
    pub(super) number: u32,
    pub(super) generation: u32,
}

impl ConnectionId {
    /// Where the reply with this number goes.
    pub(super) const fn address(self, ticket: Ticket) -> Address {
        Address { connection: self.number, generation: self.generation, ticket }
    }
}

impl Worker {
    pub(super) fn add(
        &mut self,
        (socket, is_local): (OwnedFd, bool),
        protocol: Protocol,
        input: Vec<u8>,
    ) {
        if !is_local {
            // A reply is one write; waiting for more to send would only delay it.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            let _ = rustix::net::sockopt::set_socket_keepalive(&socket, true);
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            u32::try_from(self.connections.len() - 1)
                .expect("the limit on connections is far below")
        });
        let interest = epoll::EventFlags::IN;
        let data = epoll::EventData::new_u64(u64::from(number));
        if let Err(errno) = epoll::add(&self.epoll, &socket, data, interest) {
            tracing::warn!(%errno, "a client cannot be watched and is sent away");
            self.free.push(number);
            self.shared.connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.next_generation = self.next_generation.wrapping_add(1);
        self.counts.connections += 1;
        let is_known = self.shared.settings.credentials.is_none();
        let client = Client::new(is_known, self.shard.clock.now_s(), self.limits.item_bytes_max);
        let generation = self.next_generation;
        let light = (protocol == Protocol::KeyVault).then(Light::default);
        let mut connection =
            Connection { socket, client, generation, interest, is_local, light, moves_to: None };
        self.note_opened(&connection);
        let mut is_open = true;
        if !input.is_empty() {
            is_open = self.process(&mut connection, ConnectionId { number, generation }, input);
        }
        self.put_back(number as usize, connection, is_open);
    }

    /// Hands a connection to another thread, with what it sent that this thread did not answer.
    fn hand_over(&mut self, number: usize, to: usize) {
        let Some(mut connection) = self.connections[number].take() else { return };
        let _ = epoll::delete(&self.epoll, &connection.socket);
        self.free.push(u32::try_from(number).expect("numbers of connections are u32"));
        self.counts.connections -= 1;
        let input = std::mem::take(&mut connection.client.input);
        let Connection { socket, is_local, .. } = connection;
        self.shared.mailboxes[to].put(Message::Client {
            socket,
            is_local,
            protocol: Protocol::KeyVault,
            input,
        });
    }

    /// Closes a connection; what it was promised is lost with it.
    pub(super) fn close(&mut self, number: usize, reason: CloseReason) {
        if let Some(mut connection) = self.connections[number].take() {
            self.end_leases(&mut connection);
            let number = u32::try_from(number).expect("numbers of connections are u32");
            self.note_closed(number, &connection, reason);
            self.turns.leave(number);
            if let Some(port) = connection.light.as_ref().and_then(|light| light.port.as_ref()) {
                // The client has this descriptor, too: closing ours alone would leave it watched.
                let _ = epoll::delete(&self.epoll, port.bell());
            }
            self.free.push(number);
            self.counts.connections -= 1;
            self.shared.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn on_event(&mut self, number: usize, flags: epoll::EventFlags) {
        // Taken out while it is served, so that serving may use the rest of the worker.
        let Some(mut connection) = self.connections.get_mut(number).and_then(Option::take) else {
            return;
        };
        let id = ConnectionId {
            number: u32::try_from(number).expect("numbers of connections are u32"),
            generation: connection.generation,
        };
        connection.client.last_active_s = self.shard.clock.now_s();
        let mut is_open = true;
        if flags.contains(epoll::EventFlags::OUT) {
            is_open = self.send(&mut connection);
            if is_open && connection.client.unsent.is_empty() {
                // What back-pressure held up comes before what is new.
                let input = std::mem::take(&mut connection.client.input);
                is_open = self.process(&mut connection, id, input);
            }
        }
        let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if is_open && wants_input(&connection.client) {
            if flags.intersects(gone | epoll::EventFlags::IN) {
                is_open = self.receive(&mut connection, id);
            }
        } else if flags.intersects(gone) {
            // Nobody is left to read what is still to be sent.
            is_open = false;
        }
        self.put_back(number, connection, is_open);
    }

    /// Watches for what the connection needs next, or closes it.
    pub(super) fn put_back(&mut self, number: usize, mut connection: Connection, is_open: bool) {
        if let Some(to) = connection.moves_to {
            self.connections[number] = Some(connection);
            return self.hand_over(number, to);
        }
        self.watch_port(number, &connection);
        let is_done = connection.client.phase == Phase::Closing && connection.client.is_quiet();
        let is_refused = connection.client.is_refused;
        let is_open = is_open && !is_done && self.watch(number, &mut connection);
        self.connections[number] = Some(connection);
        if !is_open {
            let is_normal = is_done && !is_refused;
            self.close(number, if is_normal { CloseReason::Normal } else { CloseReason::Error });
        }
    }

    /// Has epoll watch for what the connection needs next; false when that fails.
    pub(super) fn watch(&self, number: usize, connection: &mut Connection) -> bool {
        let mut interest = epoll::EventFlags::empty();
        if wants_input(&connection.client) {
            interest |= epoll::EventFlags::IN;
        }
        // Input that waits for its turn, and nothing else to wake for: writable at once.
        if !connection.client.unsent.is_empty() || connection.client.is_served_next() {
            interest |= epoll::EventFlags::OUT;
        }
        if interest == connection.interest {
            return true;
        }
        connection.interest = interest;
        let data = epoll::EventData::new_u64(number as u64);
        epoll::modify(&self.epoll, &connection.socket, data, interest).is_ok()
    }

    /// A connection that has just moved into shared memory gets its turns.
    fn watch_port(&mut self, number: usize, connection: &Connection) {
        let Some(port) = connection.light.as_ref().and_then(|light| light.port.as_ref()) else {
            return;
        };
        let id = u32::try_from(number).expect("numbers of connections are u32");
        if self.turns.members().any(|member| member == id) {
            return;
        }
        let data = epoll::EventData::new_u64(TOKEN_BELL | u64::from(id));
        if epoll::add(&self.epoll, port.bell(), data, epoll::EventFlags::IN).is_ok() {
            self.turns.join(id);
        }
    }

    /// Serves bytes in the client's protocol; how many are done.
    fn serve_any(&mut self, connection: &mut Connection, id: ConnectionId, input: &[u8]) -> usize {
        self.note_client(Some(connection));
        if connection.light.is_some() {
            self.serve_light(connection, id, (input, Source::Socket))
        } else {
            self.serve(connection, id, input)
        }
    }

    /// Reads once and serves what came; false when the connection is over.
    fn receive(&mut self, connection: &mut Connection, id: ConnectionId) -> bool {
        let client = &mut connection.client;
        if client.input.is_empty() {
            let mut buffer = std::mem::take(&mut self.read_buffer);
            let read = rustix::io::read(&connection.socket, &mut buffer[..]);
            let is_open = match read {
                Ok(0) => {
                    // Whoever only closed his sending side still gets what he asked for.
                    client.phase = Phase::Closing;
                    true
                }
                Ok(bytes) => {
                    self.counts.bytes_read += bytes as u64;
                    let done = self.serve_any(connection, id, &buffer[..bytes]);
                    let rest = &buffer[done..bytes];
                    if !rest.is_empty() {
                        let want = connection.client.want_bytes.max(rest.len());
                        connection.client.input.reserve_exact(want.min(rest.len() + READ_BYTES));
                        connection.client.input.extend_from_slice(rest);
                    }
                    self.finish(connection)
                }
                Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
            };
            self.read_buffer = buffer;
            return is_open;
        }
        // The rest of a request: straight behind what is there. Room grows with what came, so that
        // nobody gets memory for what he only announces.
        let want = client.want_bytes.saturating_sub(client.input.len());
        client.input.reserve(want.min(client.input.len().max(READ_BYTES)).max(1));
        match rustix::io::read(
            &connection.socket,
            rustix::buffer::spare_capacity(&mut client.input),
        ) {
            Ok(0) => {
                client.phase = Phase::Closing;
                true
            }
            Ok(bytes) => {
                self.counts.bytes_read += bytes as u64;
                if client.input.len() < client.want_bytes && client.phase == Phase::Requests {
                    return true;
                }
                let input = std::mem::take(&mut client.input);
                self.process(connection, id, input)
            }
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        }
    }

    /// Serves bytes that were kept; false when the connection is over.
    fn process(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        mut input: Vec<u8>,
    ) -> bool {
        let done = self.serve_any(connection, id, &input);
        input.drain(..done);
        // A greeting that another thread is to read stands there already, in front.
        connection.client.input.append(&mut input);
        self.finish(connection)
    }

    /// Sends what is ready at the end of a turn.
    pub(super) fn finish(&mut self, connection: &mut Connection) -> bool {
        self.push_answers(&mut connection.client, connection.light.as_mut());
        let is_due = connection.client.replies.settle(&mut self.out, &mut self.spare_buffers);
        !is_due || self.send(connection)
    }

    /// Sends the replies made so far, after what is still unsent; false when the connection is over.
    pub(super) fn send(&mut self, connection: &mut Connection) -> bool {
        let client = &mut connection.client;
        if !client.unsent.is_empty() {
            client.unsent.extend_from_slice(&self.out);
            self.out.clear();
            while client.sent_bytes < client.unsent.len() {
                match send_bytes(&connection.socket, &client.unsent[client.sent_bytes..]) {
                    Ok(bytes) => {
                        client.sent_bytes += bytes;
                        self.counts.bytes_written += bytes as u64;
                    }
                    Err(Errno::AGAIN) => return true,
                    Err(Errno::INTR) => {}
                    Err(_) => return false,
                }
            }
            client.unsent = Vec::new();
            client.sent_bytes = 0;
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
        self.counts.bytes_written += sent as u64;
        if is_open && sent < self.out.len() {
            client.unsent.extend_from_slice(&self.out[sent..]);
        }
        self.out.clear();
        self.out.shrink_to(OUT_BYTES_KEPT);
        is_open
    }

    /// Hands answers of other shards to their connections.
    pub(super) fn deliver(&mut self, batch: &Batch<Answer>) {
        let mut start = 0;
        let mut entries = batch.entries.iter().peekable();
        while let Some(first) = entries.next() {
            let number = first.address.connection as usize;
            // Its number may be another client's by now.
            let is_it = |it: &mut Connection| it.generation == first.address.generation;
            let slot = self.connections.get_mut(number);
            let mut connection = slot.and_then(|slot| slot.take_if(is_it));
            if let Some(connection) = &mut connection {
                connection.client.replies.resume(&mut self.out);
            }
            let mut entry = first;
            loop {
                let bytes = &batch.bytes[start..entry.end];
                start = entry.end;
                match &mut connection {
                    Some(Connection { light: Some(light), client, .. }) => {
                        let has_come = !matches!(entry.what, Answer::Parked);
                        client.awaited = client.awaited.saturating_sub(usize::from(has_come));
                        self.take_light_answer(light, entry, bytes)
                    }
                    Some(connection) => self.take_answer(&mut connection.client, entry, bytes),
                    None => {}
                }
                // Answers to one connection mostly follow each other and go out together.
                match entries.next_if(|next| same_connection(&next.address, &first.address)) {
                    Some(next) => entry = next,
                    None => break,
                }
            }
            if let Some(mut connection) = connection {
                let id = ConnectionId {
                    number: first.address.connection,
                    generation: connection.generation,
                };
                let mut is_open = self.finish(&mut connection);
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
}

fn same_connection(a: &Address, b: &Address) -> bool {
    (a.connection, a.generation) == (b.connection, b.generation)
}

/// Whether more is read from the client: not while it does not read, or waits for its turn.
fn wants_input(client: &Client) -> bool {
    client.unsent.is_empty()
        && client.phase != Phase::Closing
        && !client.is_held_up()
        && !client.has_turn_left
}

fn send_bytes(socket: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(
        socket,
        bytes,
        rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
    )
}
