//! Answering `get` and its variants: their keys may belong to any shard and lie in any tier.

use super::BATCH;
use super::serve::Next;
use crate::below::Parked;
use crate::clients::connection::{Client, Resume};
use crate::clients::sockets::OUT_BYTES_MAX;
use crate::mail::mailbox::{Ask, ConnectionId, GetKey};
use crate::mail::merge::{Merge, push_key};
use crate::worker::Worker;
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::classic::{self, GetProgress};
use farpool_kv_protocol::command::ReadFlags;
use farpool_kv_protocol::token::split;
use farpool_kv_store::key::HashedKey;

/// The end of the reply to a `get`.
pub(crate) const GET_END: &[u8] = b"END\r\n";

impl Worker {
    pub(super) fn answer_get(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        keys: &[u8],
        flags: ReadFlags,
    ) -> Next {
        let start = client.resume.take().map_or(0, |resume| resume.done_bytes);
        if self.me.shared.shards() == 1 && self.below.is_none() {
            let (shard, out) = (&mut self.shard, &mut self.clients.out);
            let progress = classic::get_many(shard, &keys[start..], flags, out, OUT_BYTES_MAX);
            let GetProgress::Stopped { done_bytes } = progress else { return Next::Request };
            client.resume = Some(Resume { done_bytes: start + done_bytes });
            return Next::Rest;
        }
        self.answer_get_mixed(client, id, (keys, start), flags)
    }

    /// Answers a `get` whose keys may belong to other shards or lie in lower tiers, from byte
    /// `start`.
    fn answer_get_mixed(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        (keys, start): (&[u8], usize),
        flags: ReadFlags,
    ) -> Next {
        let mut words = split(&keys[start..]).peekable();
        let mut ahead = [HashedKey::default(); BATCH];
        while words.peek().is_some() {
            let mut count = 0;
            for (slot, key) in ahead.iter_mut().zip(std::iter::from_fn(|| words.next())) {
                *slot = HashedKey::of(key, self.shard.store.hash_seed());
                if self.me.owns(slot.hash) {
                    self.shard.store.prefetch_entry(slot.hash);
                }
                count += 1;
            }
            let ahead = &ahead[..count];
            if count > 1 {
                ahead.iter().for_each(|it| self.prefetch_own_item(it.hash));
            }
            let read = GetKey { flags, is_last: words.peek().is_none() };
            let done = if self.is_merged(ahead) {
                self.merge_keys(client, id, ahead, read)
            } else {
                self.answer_get_keys(client, id, ahead, read)
            };
            if let Some(HashedKey { key, .. }) = ahead.get(done) {
                let done_bytes = key.as_ptr() as usize - keys.as_ptr() as usize;
                client.resume = Some(Resume { done_bytes });
                return Next::Rest;
            }
        }
        Next::Request
    }

    /// Whether other shards are each asked for all their keys among these at once.
    fn is_merged(&self, keys: &[HashedKey<'_>]) -> bool {
        self.below.is_none() && keys.len() > 1 && keys.iter().any(|it| !self.me.owns(it.hash))
    }

    /// Answers keys of a `get` one by one, or has other shards or tiers answer. Returns how many
    /// there was room for. `read` applies to the last; the others do not end the reply.
    fn answer_get_keys(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        keys: &[HashedKey<'_>],
        read: GetKey,
    ) -> usize {
        for (number, &key) in keys.iter().enumerate() {
            if self.clients.out.len() >= OUT_BYTES_MAX || client.is_held_up() {
                return number;
            }
            let is_last = read.is_last && number + 1 == keys.len();
            self.answer_get_key(client, id, key, GetKey { is_last, ..read });
        }
        keys.len()
    }

    /// As [`Self::answer_get_keys`], but each other shard is asked once, for all keys that it has.
    fn merge_keys(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        keys: &[HashedKey<'_>],
        read: GetKey,
    ) -> usize {
        self.clients.push_ready(client);
        let before = client.replies.ready_mut().len();
        let mut merge = Merge::default();
        let (mut done, mut own_bytes) = (0, 0);
        for &key in keys {
            if own_bytes >= OUT_BYTES_MAX || client.is_held_up_by(merge.keys()) {
                break;
            }
            done += 1;
            let owner = self.me.owner_of(key.hash);
            if owner == self.me.number {
                let (own, read) = (client.replies.ready_mut(), GetKey { is_last: false, ..read });
                get_key(&mut self.shard, key, read, own);
                own_bytes = own.len() - before;
            } else {
                merge.add(owner, own_bytes);
                push_key(key, self.mail.bytes_for(owner));
            }
        }
        if read.is_last && done == keys.len() {
            client.replies.ready_mut().extend_from_slice(GET_END);
            own_bytes += GET_END.len();
        }
        let asked = merge.asked();
        if asked.is_empty() {
            client.replies.note_ready(own_bytes);
            return done;
        }
        merge.close(own_bytes);
        self.me.counts.forwarded += merge.keys() as u64;
        let address = id.address(client.replies.push_merged(merge));
        for (owner, part) in asked {
            let ask = Ask::GetKeys { part, flags: read.flags };
            // Their bytes are the keys appended above.
            self.mail.ask(owner, address, ask, |_| {});
        }
        done
    }

    /// Answers one key of a `get`, or has another shard or tier answer it.
    #[inline]
    fn answer_get_key(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        key: HashedKey<'_>,
        read: GetKey,
    ) {
        let owner = self.me.owner_of(key.hash);
        if owner != self.me.number {
            let ask = Ask::GetKey { hash: key.hash, read };
            return self.forward(client, id, owner, ask, [key.key, b""]);
        }
        if self.is_below(key, false) {
            let origin = self.await_slow(client, id);
            return self.park(key, origin, Parked::GetKey(read), b"");
        }
        get_key(&mut self.shard, key, read, &mut self.clients.out);
    }
}

/// Appends the reply to one key of a `get`, and the end if it is the last.
pub(crate) fn get_key(shard: &mut Shard, key: HashedKey<'_>, read: GetKey, out: &mut Vec<u8>) {
    classic::get_one(shard, key, read.flags, out);
    if read.is_last {
        out.extend_from_slice(GET_END);
    }
}
