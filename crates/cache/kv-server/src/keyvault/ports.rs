//! A thread's connections in shared memory: whose turn it is, and how the thread sleeps with them.

use std::time::Duration;

use farpool_keyvault::arbiter::LeastRecentlyGranted;
use farpool_units::exactly;
use rustix::event::epoll;
use smallvec::SmallVec;

use super::light::{BATCH, Source};
use super::port::Port;
use crate::clients::Clients;
use crate::clients::connection::{Client, CloseReason, Phase};
use crate::clients::sockets::Connection;
use crate::mail::mailbox::ConnectionId;
use crate::me::{Me, TOKEN_BELL};
use crate::worker::Worker;

/// A client tells nobody when it makes room in its ring of answers: how often one that was full is
/// checked.
const FULL_RING_LOOK: Duration = Duration::from_millis(1);

/// A thread's connections in shared memory.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// In the order of their turns.
    turns: LeastRecentlyGranted,
    /// Of them, those that are over.
    ended: Vec<usize>,
    /// Frames of the ring that is served now.
    frames: Vec<u8>,
    /// Whether rings had requests since the last look at the time.
    are_busy: bool,
}

impl Ports {
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether rings had requests since the last look at the time.
    pub(crate) const fn are_busy(&self) -> bool {
        self.are_busy
    }

    /// As [`Self::are_busy`]; counts anew from now on.
    pub(crate) const fn take_busy(&mut self) -> bool {
        std::mem::replace(&mut self.are_busy, false)
    }

    pub(crate) const fn note_busy(&mut self) {
        self.are_busy = true;
    }

    /// Gives a connection that has just moved into shared memory its turns.
    pub(crate) fn join(&mut self, me: &Me, number: u32, connection: &Connection) {
        let Some(port) = connection.light.as_ref().and_then(|light| light.port.as_ref()) else {
            return;
        };
        if self.turns.members().any(|member| member == number) {
            return;
        }
        let data = epoll::EventData::new_u64(TOKEN_BELL | u64::from(number));
        if epoll::add(&me.epoll, port.bell(), data, epoll::EventFlags::IN).is_ok() {
            self.turns.join(number);
        }
    }

    /// A connection ends.
    pub(crate) fn leave(&mut self, me: &Me, number: u32, connection: &Connection) {
        self.turns.leave(number);
        if let Some(port) = connection.light.as_ref().and_then(|light| light.port.as_ref()) {
            // The client has this descriptor, too: closing ours alone would leave it watched.
            let _ = epoll::delete(&me.epoll, port.bell());
        }
    }

    /// Notes a connection whose other side broke the rules.
    fn check(&mut self, clients: &Clients, number: usize) {
        let is_over = clients.get(number).is_some_and(|connection| {
            connection.client.phase == Phase::Closing && connection.light.is_some()
        });
        if is_over {
            self.ended.push(number);
        }
    }

    /// Prepares all rings for a sleep. Returns how long it may last, or None if a request has come
    /// meanwhile.
    pub(crate) fn fall_asleep(&self, clients: &mut Clients) -> Option<Duration> {
        let mut all_asleep = true;
        let mut limit = Duration::MAX;
        self.for_each(clients, |client, port| {
            if client.is_ring_full {
                limit = FULL_RING_LOOK;
            } else if client.unsent.is_empty() && !client.is_held_up() {
                all_asleep &= port.fall_asleep();
            }
            // Others are not asked for requests: what they wait for wakes the thread.
        });
        all_asleep.then_some(limit)
    }

    pub(crate) fn wake_up(&self, clients: &mut Clients) {
        self.for_each(clients, |_, port| port.wake_up());
    }

    fn for_each(&self, clients: &mut Clients, mut each: impl FnMut(&Client, &mut Port)) {
        let members: SmallVec<[u32; 16]> = self.turns.members().collect();
        for number in members {
            if let Some(Connection { client, light: Some(light), .. }) =
                clients.get_mut(number as usize)
                && let Some(port) = &mut light.port
            {
                each(client, port);
            }
        }
    }
}

impl Worker {
    /// Looks at every ring once, least recently granted first. True if any had a request.
    pub(crate) fn serve_ports(&mut self) -> bool {
        let mut turns = std::mem::take(&mut self.ports.turns);
        let any = turns.round(|number| self.serve_port(number as usize));
        turns.members().for_each(|number| self.ports.check(&self.clients, number as usize));
        self.ports.turns = turns;
        any
    }

    fn serve_port(&mut self, number: usize) -> bool {
        let Some(connection) = self.clients.get_mut(number) else { return false };
        if connection.client.is_ring_full {
            // Who does not take his answers is not asked for more requests.
            return self.push_held(number);
        }
        if !connection.client.unsent.is_empty() || connection.client.is_held_up() {
            return false;
        }
        let Some(port) = connection.light.as_mut().and_then(|light| light.port.as_mut()) else {
            return false;
        };
        if !port.has_frame() {
            return false;
        }
        let mut frames = std::mem::take(&mut self.ports.frames);
        frames.clear();
        let mut is_broken = port.take_frames(BATCH, &mut frames);
        let Some(mut connection) = self.clients.take(number) else { return false };
        connection.client.last_active_s = self.shard.clock.now_s();
        let id = ConnectionId { number: exactly(number), generation: connection.generation };
        let done = self.serve_light(&mut connection, id, (&frames, Source::Ring));
        is_broken |= done < frames.len();
        self.ports.frames = frames;
        is_broken |= !self.clients.finish(&mut connection, &mut self.me.counts)
            || !connection.watch(number, &self.me.epoll);
        if is_broken {
            connection.client.phase = Phase::Closing;
        }
        self.clients.put(number, connection);
        true
    }

    /// Gives a client that has made room the answers that wait for it. True if it had made some.
    fn push_held(&mut self, number: usize) -> bool {
        let port = self.clients.get_mut(number).and_then(|it| it.light.as_mut()?.port.as_mut());
        if !port.is_some_and(Port::push_held) {
            return false;
        }
        let Some(mut connection) = self.clients.take(number) else { return false };
        // What it sent meanwhile over the socket has its turn again.
        if !self.clients.finish(&mut connection, &mut self.me.counts)
            || !connection.watch(number, &self.me.epoll)
        {
            connection.client.phase = Phase::Closing;
        }
        self.clients.put(number, connection);
        true
    }

    pub(crate) fn close_ended_ports(&mut self) {
        while let Some(number) = self.ports.ended.pop() {
            self.close(number, CloseReason::Normal);
        }
    }
}
