//! A thread's clients: their connections, and the replies to the client being served.

pub mod auth;
pub(crate) mod connection;
mod events;
mod held;
pub(crate) mod replies;
pub(crate) mod sockets;

use crate::mail::mailbox::{Address, ConnectionId};
use connection::Client;
use replies::SpareBuffers;
use sockets::{Connection, OUT_BYTES_MAX, READ_BYTES};

/// A thread's clients.
#[derive(Debug)]
pub(crate) struct Clients {
    connections: Vec<Option<Connection>>,
    free: Vec<u32>,
    last_generation: u32,
    held: held::Held,
    read_buffer: Vec<u8>,
    /// Replies to the connection being served.
    pub(crate) out: Vec<u8>,
    spare: SpareBuffers,
}

impl Clients {
    pub(crate) fn new() -> Self {
        Self {
            connections: Vec::new(),
            free: Vec::new(),
            last_generation: 0,
            held: held::Held::default(),
            read_buffer: vec![0; READ_BYTES],
            out: Vec::with_capacity(OUT_BYTES_MAX),
            spare: SpareBuffers::default(),
        }
    }

    /// Returns a number that no connection has.
    fn take_number(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            u32::try_from(self.connections.len() - 1)
                .expect("the limit on connections is far below")
        })
    }

    fn return_number(&mut self, number: u32) {
        self.free.push(number);
    }

    fn next_generation(&mut self) -> u32 {
        self.last_generation = self.last_generation.wrapping_add(1);
        self.last_generation
    }

    /// Takes a connection out while it is served, so that serving may use the rest of the thread.
    #[inline]
    pub(crate) fn take(&mut self, number: usize) -> Option<Connection> {
        self.connections.get_mut(number).and_then(Option::take)
    }

    /// As [`Self::take`], if `is_it` accepts the connection.
    #[inline]
    pub(crate) fn take_if(
        &mut self,
        number: usize,
        is_it: impl FnOnce(&mut Connection) -> bool,
    ) -> Option<Connection> {
        self.connections.get_mut(number).and_then(|slot| slot.take_if(is_it))
    }

    #[inline]
    pub(crate) fn put(&mut self, number: usize, connection: Connection) {
        self.connections[number] = Some(connection);
    }

    #[inline]
    pub(crate) fn get(&self, number: usize) -> Option<&Connection> {
        self.connections[number].as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut Connection> {
        self.connections[number].as_mut()
    }

    /// Upper bound of the connection numbers.
    pub(crate) const fn numbers(&self) -> usize {
        self.connections.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter().flatten()
    }

    /// Takes the buffer of reads, to be returned after use.
    pub(crate) fn take_read_buffer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.read_buffer)
    }

    pub(crate) fn return_read_buffer(&mut self, buffer: Vec<u8>) {
        self.read_buffer = buffer;
    }

    /// Whether no client is owed anything.
    pub(crate) fn are_quiet(&self) -> bool {
        let owes_nothing = |client: &Client| client.is_quiet() && !client.has_turn_left;
        self.iter().all(|connection| owes_nothing(&connection.client))
    }

    /// While a reply is awaited, new replies queue behind it. `out` always comes after the client's
    /// queued replies.
    pub(crate) fn settle(&mut self, client: &mut Client) {
        if !client.replies.is_empty() {
            client.replies.push_ready(&self.out);
            self.out.clear();
        }
    }

    /// Queues the replies made so far, ahead of a reply that is to be awaited.
    pub(crate) fn push_ready(&mut self, client: &mut Client) {
        client.replies.prepare(&mut self.spare);
        client.replies.push_ready(&self.out);
        self.out.clear();
    }

    /// Reserves a place for a reply that may take long.
    pub(crate) fn await_slow(&mut self, client: &mut Client, id: ConnectionId) -> Address {
        self.push_ready(client);
        id.address(client.replies.push_slow())
    }
}
