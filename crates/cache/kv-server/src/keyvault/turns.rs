//! The turns of a thread's connections in shared memory: requests are taken from their rings, and
//! held answers are pushed.

use farpool_units::exactly;

use super::ring_client::RingClient;
use super::state::{BATCH, Source};
use crate::clients::connection::{CloseReason, Phase};
use crate::mail::mailbox::ConnectionId;
use crate::worker::Worker;

impl Worker {
    /// Serves every ring once, least recently granted first. True if any had a request.
    pub(crate) fn serve_ports(&mut self) -> bool {
        let mut turns = std::mem::take(&mut self.ring_clients.turns);
        let any = turns.round(|number| self.serve_port(number as usize));
        turns.members().for_each(|number| self.ring_clients.check(&self.clients, number as usize));
        self.ring_clients.turns = turns;
        any
    }

    fn serve_port(&mut self, number: usize) -> bool {
        let Some(connection) = self.clients.get_mut(number) else { return false };
        if connection.client.is_ring_full {
            // A client that does not take its answers has no more requests taken.
            return self.push_held(number);
        }
        if !connection.client.unsent.is_empty() || connection.client.is_held_up() {
            return false;
        }
        let Some(ring_client) =
            connection.keyvault.as_mut().and_then(|keyvault| keyvault.ring_client.as_mut())
        else {
            return false;
        };
        if !ring_client.has_frame() {
            return false;
        }
        let mut frames = std::mem::take(&mut self.ring_clients.frames);
        frames.clear();
        let mut is_broken = ring_client.take_frames(BATCH, &mut frames);
        let Some(mut connection) = self.clients.take(number) else { return false };
        connection.client.last_active_s = self.shard.clock.now_s();
        let id = ConnectionId { number: exactly(number), generation: connection.generation };
        let done = self.serve_keyvault(&mut connection, id, (&frames, Source::Ring));
        is_broken |= done < frames.len();
        self.ring_clients.frames = frames;
        is_broken |= !self.clients.finish(&mut connection, &mut self.me.counts)
            || !connection.watch(number, &self.me.epoll);
        if is_broken {
            connection.client.phase = Phase::Closing;
        }
        self.clients.put(number, connection);
        true
    }

    /// Pushes held answers to a client that has made room. True if it had made some.
    fn push_held(&mut self, number: usize) -> bool {
        let ring_client =
            self.clients.get_mut(number).and_then(|it| it.keyvault.as_mut()?.ring_client.as_mut());
        if !ring_client.is_some_and(RingClient::push_held) {
            return false;
        }
        let Some(mut connection) = self.clients.take(number) else { return false };
        // What it sent over the socket meanwhile gets its turn again.
        if !self.clients.finish(&mut connection, &mut self.me.counts)
            || !connection.watch(number, &self.me.epoll)
        {
            connection.client.phase = Phase::Closing;
        }
        self.clients.put(number, connection);
        true
    }

    pub(crate) fn close_ended_ports(&mut self) {
        while let Some(number) = self.ring_clients.ended.pop() {
            self.close(number, CloseReason::Normal);
        }
    }
}
