//! Memory for bytes on their way: requests that are not complete, replies that are not sent.
//!
//! A shard counts what its thread's clients hold against its limit and evicts items for it, up to a
//! share of the limit. Beyond that, clients give up what they withhold, first those who have
//! withheld most for longest: input that is not complete if all input takes more than the share,
//! and replies that they do not read, or read too slowly. Nobody is closed for what others hold, or
//! for replies that are read.
//!
//! So replies take more than the share only for as long as somebody reads them at
//! [`READ_BYTES_PER_S_MIN`] or is given its first second, and then at most what one client may have
//! unread each: [`OUT_BYTES_MAX`] and one value. memcached need not count replies: they point at
//! items, which stay in its slabs until they are sent.
//!
//! [`READ_BYTES_PER_S_MIN`]: super::connection::READ_BYTES_PER_S_MIN
//! [`OUT_BYTES_MAX`]: super::sockets::OUT_BYTES_MAX

use std::time::{Duration, Instant};

use super::Clients;
use super::connection::{Client, Phase};
use super::events::number_of;
use super::sockets::{Connection, READ_BYTES};
use crate::heap;
use crate::mail::mailbox::ConnectionId;
use crate::settings::Dialect;
use crate::worker::Worker;
use farpool_kv_protocol::reply::push_line;

/// The part of a shard's limit that bytes on their way may take: one in so many. One value of the
/// largest size may always be received.
const SHARE: usize = 4;
/// What is held counts in whole steps of this size, so that usual requests evict nothing.
const STEP_BYTES: usize = 1 << 20;
/// Buffers of all lengths leave gaps between them in the heap: one byte in so many, as measured
/// with a thousand clients that stop within values of 1 MB.
const GAPS_SHARE: usize = 8;
/// When so much less is held than at the most since the last time, or what clients hold has come
/// and gone so often while it counts, the allocator returns its free memory to the kernel.
const RETURNED_BYTES_MIN: usize = 8 << 20;
/// The least time between two such returns while clients are served: other threads that allocate
/// wait meanwhile.
const RETURN_PAUSE: Duration = Duration::from_millis(50);

/// What one client holds.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counted {
    bytes: usize,
    /// How much of it is input.
    input_bytes: usize,
}

/// What a thread's clients hold.
#[derive(Debug, Default)]
pub(super) struct Held {
    bytes: usize,
    /// How much of it is input.
    input_bytes: usize,
    /// The most that was held since the allocator last returned memory.
    most_bytes: usize,
    /// By how much clients have held more since then, in all.
    grown_bytes: usize,
    /// When it last returned memory.
    returned: Option<Instant>,
}

const fn with_gaps(bytes: usize) -> usize {
    bytes + bytes / GAPS_SHARE
}

impl Held {
    fn return_free_memory(&mut self) {
        self.most_bytes = self.bytes;
        self.grown_bytes = 0;
        self.returned = Some(Instant::now());
        heap::return_free_memory();
    }
}

impl Clients {
    /// Counts what a connection holds now.
    pub(super) fn count_held(&mut self, connection: &mut Connection) {
        let (client, before) = (&connection.client, connection.counted);
        let now = Counted { bytes: client.held_bytes(), input_bytes: client.input.capacity() };
        let held = &mut self.held;
        held.bytes = held.bytes - before.bytes + now.bytes;
        held.input_bytes = held.input_bytes - before.input_bytes + now.input_bytes;
        held.most_bytes = held.most_bytes.max(held.bytes);
        held.grown_bytes += now.bytes.saturating_sub(before.bytes);
        connection.counted = now;
    }

    /// Whether clients hold so much that gaps between their buffers matter.
    const fn holds_much(&self) -> bool {
        self.held.bytes >= RETURNED_BYTES_MIN
    }

    /// Makes room for `more` bytes of input.
    pub(crate) fn grow_input(&self, input: &mut Vec<u8>, more: usize) {
        if self.holds_much() { heap::grow(input, more) } else { input.reserve_exact(more) }
    }

    /// Frees input.
    pub(super) fn free_input(&self, input: Vec<u8>) {
        if self.holds_much() { heap::give_back(input) } else { drop(input) }
    }

    /// Counts no longer what a connection holds.
    pub(super) const fn forget_held(&mut self, connection: &Connection) {
        self.held.bytes -= connection.counted.bytes;
        self.held.input_bytes -= connection.counted.input_bytes;
    }

    /// Memory that the thread's clients hold, with the gaps in it.
    pub(crate) const fn held_bytes(&self) -> usize {
        with_gaps(self.held.bytes)
    }

    /// The client of which `withheld` tells most. None if it tells nothing of anybody.
    fn first_to_give_up(&self, withheld: impl Fn(&Client) -> u64) -> Option<usize> {
        let all = (0..).zip(&self.connections);
        let all = all.filter_map(|(number, it)| Some((number, withheld(&it.as_ref()?.client))));
        let (number, most) = all.max_by_key(|&(_, withheld)| withheld)?;
        (most > 0).then_some(number)
    }
}

impl Worker {
    /// Makes room for what clients hold: items are evicted, or clients give up.
    pub(crate) fn make_room_for_held(&mut self) {
        loop {
            let most_bytes = self.count_against_items();
            let now_s = self.shard.clock.now_s();
            let clients = &self.clients;
            let input_bytes = with_gaps(clients.held.input_bytes);
            let first = if input_bytes > most_bytes {
                clients.first_to_give_up(|client| client.input_byte_seconds(now_s))
            } else if clients.held_bytes() > most_bytes {
                clients.first_to_give_up(|client| client.unread_byte_seconds(now_s))
            } else {
                None
            };
            let Some(number) = first else { return };
            self.give_up(number);
        }
    }

    /// Evicts items for what clients hold, as far as they may. Returns how much they may hold.
    fn count_against_items(&mut self) -> usize {
        let store = &mut self.shard.store;
        let one_value = with_gaps(self.me.limits.item_bytes_max + READ_BYTES);
        let most_bytes = (store.settings().limit_bytes / SHARE).max(one_value);
        let counted_bytes = self.clients.held_bytes().min(most_bytes) / STEP_BYTES * STEP_BYTES;
        let is_counted =
            counted_bytes <= store.beside_bytes() || store.set_beside(counted_bytes).is_ok();
        let held = &mut self.clients.held;
        if store.beside_bytes() > 0
            && held.grown_bytes >= RETURNED_BYTES_MIN
            && held.returned.is_none_or(|returned| returned.elapsed() >= RETURN_PAUSE)
        {
            held.return_free_memory();
        }
        if is_counted { most_bytes } else { one_value }
    }

    /// Lets items have the memory that clients no longer hold. The allocator would keep it for
    /// later requests.
    pub(crate) fn take_back_held(&mut self) {
        let counted_bytes = self.clients.held_bytes() / STEP_BYTES * STEP_BYTES;
        let held = &self.clients.held;
        if held.most_bytes - held.bytes >= RETURNED_BYTES_MIN {
            self.clients.held.return_free_memory();
        }
        if counted_bytes < self.shard.store.beside_bytes() {
            let lowered = self.shard.store.set_beside(counted_bytes);
            debug_assert!(lowered.is_ok(), "less needs no room");
        }
    }

    /// Makes a client give up what it withholds: a value that is not complete is refused, and the
    /// rest of it discarded when it comes. A client that withholds anything else is closed.
    fn give_up(&mut self, number: usize) {
        let Some(mut connection) = self.clients.take(number) else { return };
        let generation = connection.generation;
        let id = ConnectionId { number: number_of(number), generation };
        let withheld_bytes = connection.client.withheld_bytes();
        self.me.counts.read_buf_oom += 1;
        self.me.counts.response_obj_oom += u64::from(!connection.client.unsent.is_empty());
        tracing::debug!(number, withheld_bytes, "a client gives up memory for others");
        let mut is_open = true;
        if connection.is_in_a_request() {
            let mut input = std::mem::take(&mut connection.client.input);
            let done = self.refuse_any(&mut connection, id, &input);
            input.drain(..done);
            is_open = self.process(&mut connection, id, input);
        }
        if connection.client.withheld_bytes() >= withheld_bytes {
            is_open = false;
            if connection.is_in_a_request() && connection.client.dialect == Dialect::Text {
                push_line(&mut self.clients.out, "SERVER_ERROR out of memory reading request");
                // The client may be gone already.
                let _ = self.clients.finish(&mut connection, &mut self.me.counts);
            }
        }
        self.put_back_alone(number, connection, is_open);
    }
}

impl Connection {
    /// Whether what it withholds is a request of which it has not sent the rest.
    fn is_in_a_request(&self) -> bool {
        let client = &self.client;
        let is_at_requests = client.phase == Phase::Requests && client.is_authenticated;
        is_at_requests
            && self.keyvault.is_none()
            && client.unsent.is_empty()
            && !client.has_turn_left
            && !client.is_held_up()
    }
}
