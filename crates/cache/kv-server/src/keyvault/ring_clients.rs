//! A thread's connections in shared memory: the order of their turns, and how the thread sleeps.

use std::time::Duration;

use farpool_keyvault::arbiter::LeastRecentlyGranted;
use rustix::event::epoll;
use smallvec::SmallVec;

use super::ring_client::RingClient;
use crate::clients::Clients;
use crate::clients::connection::{Client, Phase};
use crate::clients::sockets::Connection;
use crate::me::{Me, TOKEN_BELL};

/// How often a full ring is checked: a client sends no signal when it makes room in its ring of
/// answers.
const FULL_RING_LOOK: Duration = Duration::from_millis(1);

/// A thread's connections in shared memory.
#[derive(Debug, Default)]
pub(crate) struct RingClients {
    /// Connections, in the order of their turns.
    pub(super) turns: LeastRecentlyGranted,
    /// Connections that are over.
    pub(super) ended: Vec<usize>,
    /// Frames of the ring being served.
    pub(super) frames: Vec<u8>,
    /// Whether rings had requests since the clock was last read.
    are_busy: bool,
}

impl RingClients {
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether rings had requests since the clock was last read.
    pub(crate) const fn are_busy(&self) -> bool {
        self.are_busy
    }

    /// As [`Self::are_busy`], and resets it.
    pub(crate) const fn take_busy(&mut self) -> bool {
        std::mem::replace(&mut self.are_busy, false)
    }

    pub(crate) const fn note_busy(&mut self) {
        self.are_busy = true;
    }

    /// Adds a connection that has just moved into shared memory to the turns.
    pub(crate) fn join(&mut self, me: &Me, number: u32, connection: &Connection) {
        let Some(ring_client) =
            connection.keyvault.as_ref().and_then(|keyvault| keyvault.ring_client.as_ref())
        else {
            return;
        };
        if self.turns.members().any(|member| member == number) {
            return;
        }
        let data = epoll::EventData::new_u64(TOKEN_BELL | u64::from(number));
        if epoll::add(&me.epoll, ring_client.bell(), data, epoll::EventFlags::IN).is_ok() {
            self.turns.join(number);
        }
    }

    /// Removes a connection that ends.
    pub(crate) fn leave(&mut self, me: &Me, number: u32, connection: &Connection) {
        self.turns.leave(number);
        if let Some(ring_client) =
            connection.keyvault.as_ref().and_then(|keyvault| keyvault.ring_client.as_ref())
        {
            // The client has this descriptor, too: closing ours alone would leave it registered.
            let _ = epoll::delete(&me.epoll, ring_client.bell());
        }
    }

    /// Notes a connection whose client broke the ring's protocol.
    pub(super) fn check(&mut self, clients: &Clients, number: usize) {
        let is_over = clients.get(number).is_some_and(|connection| {
            connection.client.phase == Phase::Closing && connection.keyvault.is_some()
        });
        if is_over {
            self.ended.push(number);
        }
    }

    /// Prepares all rings for a sleep. Returns how long it may last, or None if a request has
    /// arrived meanwhile.
    pub(crate) fn fall_asleep(&self, clients: &mut Clients) -> Option<Duration> {
        let mut all_asleep = true;
        let mut limit = Duration::MAX;
        self.for_each(clients, |client, ring_client| {
            if client.is_ring_full {
                limit = FULL_RING_LOOK;
            } else if client.unsent.is_empty() && !client.is_held_up() {
                all_asleep &= ring_client.fall_asleep();
            }
            // Other clients need not ring for requests: what holds them up wakes the thread.
        });
        all_asleep.then_some(limit)
    }

    pub(crate) fn wake_up(&self, clients: &mut Clients) {
        self.for_each(clients, |_, ring_client| ring_client.wake_up());
    }

    fn for_each(&self, clients: &mut Clients, mut each: impl FnMut(&Client, &mut RingClient)) {
        let members: SmallVec<[u32; 16]> = self.turns.members().collect();
        for number in members {
            if let Some(Connection { client, keyvault: Some(keyvault), .. }) =
                clients.get_mut(number as usize)
                && let Some(ring_client) = &mut keyvault.ring_client
            {
                each(client, ring_client);
            }
        }
    }
}
