//! Answering: what a client sent, in batches, and what other threads ask of this one's shard.
//!
//! A batch of requests is first looked at only as far as their keys, so that index and items are on
//! their way from memory while the first are answered.

use smallvec::SmallVec;

use super::admin;
use super::auth::{Attempt, attempt};
use super::connection::{Client, Phase, Resume};
use super::dump;
use super::lower::Parked;
use super::mailbox::{Ask, GetKey, Origin, StoreHead};
use super::merge::{Merge, push_key};
use super::sockets::{Connection, ConnectionId, OUT_BYTES_MAX};
use super::worker::Worker;
use farpool_keyvault::owner::{hash_key, shard_of};
use farpool_kv_protocol::classic::{self, Change, GetProgress};
use farpool_kv_protocol::command::{ReadFlags, StoreMode};
use farpool_kv_protocol::meta;
use farpool_kv_protocol::reply::{push_line, push_unless};
use farpool_kv_protocol::request::{KeyRequest, KeyWord, Request, Scan, scan};
use farpool_kv_protocol::token::split;
use farpool_kv_store::key::HashedKey;

/// Requests that are looked at together.
pub(super) const BATCH: usize = 32;
/// What ends the reply to a `get`.
pub(super) const GET_END: &[u8] = b"END\r\n";

#[derive(Debug)]
struct Planned<'a> {
    request: Request<'a>,
    /// All of its bytes, data included.
    bytes: &'a [u8],
    /// Of its first key, if that is known already.
    hash: u64,
}

/// What comes after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The request behind it.
    Request,
    /// The rest of this one, when replies are sent and answers came.
    Rest,
    /// Whatever the connection's phase says.
    Phase,
}

impl Worker {
    /// Answers what `input` holds, as far as it is whole and its turn goes; how many bytes are done.
    pub(super) fn serve(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let mut at = 0;
        let mut budget = self.shared.settings.requests_per_turn;
        connection.client.has_turn_left = false;
        while at < input.len() {
            let client = &mut connection.client;
            match client.phase {
                Phase::Closing => return input.len(),
                _ if client.watch.is_some() => return input.len(),
                Phase::Skipping { bytes } => {
                    let skipped = bytes.min(input.len() - at);
                    at += skipped;
                    let left = bytes - skipped;
                    client.phase =
                        if left == 0 { Phase::Requests } else { Phase::Skipping { bytes: left } };
                    continue;
                }
                Phase::Requests if !client.is_authenticated => {
                    let Some(bytes) = self.authenticate(client, &input[at..]) else { break };
                    at += bytes;
                    continue;
                }
                Phase::Requests => {}
            }
            let planned = self.plan(&mut connection.client, &input[at..], budget.min(BATCH));
            if planned.is_empty() {
                break;
            }
            budget -= planned.len();
            for request in &planned {
                let next = self.answer(&mut connection.client, id, request);
                self.settle_victims();
                if next == Next::Rest {
                    connection.client.has_turn_left = true;
                    break;
                }
                at += request.bytes.len();
                connection.client.requests += 1;
                if next == Next::Phase {
                    break;
                }
            }
            self.settle(&mut connection.client);
            if self.out.len() >= OUT_BYTES_MAX && !self.send(connection) {
                connection.client.phase = Phase::Closing;
                return input.len();
            }
            let client = &mut connection.client;
            if budget == 0 || !client.unsent.is_empty() || client.is_held_up() {
                self.counts.yields += u64::from(budget == 0);
                client.has_turn_left = at < input.len();
                break;
            }
        }
        at
    }

    /// What was made while something is awaited waits behind it. `out` always comes behind the client's replies.
    pub(super) fn settle(&mut self, client: &mut Client) {
        if !client.replies.is_empty() {
            client.replies.push_ready(&self.out);
            self.out.clear();
        }
    }

    fn authenticate(&mut self, client: &mut Client, input: &[u8]) -> Option<usize> {
        match attempt(input) {
            Attempt::Incomplete => {
                client.want_bytes = input.len() + 1;
                None
            }
            Attempt::Close => {
                client.phase = Phase::Closing;
                Some(input.len())
            }
            Attempt::Refused { bytes, reply } => {
                push_line(&mut self.out, reply);
                Some(bytes)
            }
            Attempt::Token { bytes, name, password } => {
                let credentials = self.shared.settings.credentials.as_ref();
                client.is_authenticated =
                    credentials.is_some_and(|known| known.accept(name, password));
                self.counts.auth_commands += 1;
                self.counts.auth_errors += u64::from(!client.is_authenticated);
                let failure = "CLIENT_ERROR authentication failure";
                push_line(&mut self.out, if client.is_authenticated { "STORED" } else { failure });
                Some(bytes)
            }
        }
    }

    /// Takes requests apart and begins to load what they ask for.
    fn plan<'a>(
        &mut self,
        client: &mut Client,
        input: &'a [u8],
        most: usize,
    ) -> SmallVec<[Planned<'a>; BATCH]> {
        let mut planned: SmallVec<[Planned<'a>; BATCH]> = SmallVec::new();
        let mut at = 0;
        while planned.len() < most && at < input.len() {
            match scan(&input[at..], &self.limits) {
                Scan::Incomplete { want_bytes } => {
                    client.want_bytes = want_bytes;
                    break;
                }
                Scan::Request { bytes, request } => {
                    let hash = first_key(&request).map_or(0, hash_key);
                    if self.owns(hash) {
                        self.shard.store.prefetch_entry(hash);
                    }
                    let is_plain = matches!(request, Request::Keys(_) | Request::Refused { .. });
                    planned.push(Planned { request, bytes: &input[at..at + bytes], hash });
                    at += bytes;
                    if !is_plain {
                        break;
                    }
                }
            }
        }
        if planned.len() > 1 {
            planned.iter().for_each(|it| self.prefetch_own_item(it.hash));
        }
        planned
    }

    #[inline]
    fn prefetch_own_item(&mut self, hash: u64) {
        if self.owns(hash) {
            self.shard.store.prefetch_item(hash);
        }
    }

    /// Whether a key of this hash belongs to this thread's shard.
    #[inline]
    pub(super) fn owns(&self, hash: u64) -> bool {
        shard_of(hash, self.shared.shards()) == self.number
    }

    fn answer(&mut self, client: &mut Client, id: ConnectionId, planned: &Planned<'_>) -> Next {
        match planned.request {
            Request::Keys(KeyRequest::Get { keys, flags }) => {
                return self.answer_get(client, id, keys, flags);
            }
            Request::Keys(request) => self.answer_keys(client, id, &request, planned),
            Request::Refused { reply, quiet } => push_unless(&mut self.out, quiet, reply),
            Request::Skipped { reply, quiet, skip_bytes, drop } => {
                if let Some(key) = drop {
                    if let Some(journal) = self.shard.store.journal_mut() {
                        journal.stored(key.word, ("set", "too_large"), 0, 0);
                    }
                    self.drop_key(client, id, key);
                }
                self.shard.counts.store_too_large += u64::from(drop.is_some());
                push_unless(&mut self.out, quiet, reply);
                client.phase = Phase::Skipping { bytes: skip_bytes };
                return Next::Phase;
            }
            Request::Close => {
                client.is_refused = true;
                client.phase = Phase::Closing;
                return Next::Phase;
            }
            Request::Admin(request) => {
                if client.dump.is_some() {
                    dump::go_on(self, client, id);
                } else {
                    admin::answer(self, client, id, request);
                }
                return if client.dump.is_some() { Next::Rest } else { Next::Phase };
            }
        }
        Next::Request
    }

    fn answer_get(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        keys: &[u8],
        flags: ReadFlags,
    ) -> Next {
        let start = client.resume.take().map_or(0, |resume| resume.done_bytes);
        if self.shared.shards() == 1 && self.lower.is_none() {
            let mut out = std::mem::take(&mut self.out);
            let progress =
                classic::get_many(&mut self.shard, &keys[start..], flags, &mut out, OUT_BYTES_MAX);
            self.out = out;
            let GetProgress::Stopped { done_bytes } = progress else { return Next::Request };
            client.resume = Some(Resume { done_bytes: start + done_bytes });
            return Next::Rest;
        }
        self.answer_get_mixed(client, id, (keys, start), flags)
    }

    /// Answers a `get` whose keys may belong to other shards or lie in lower tiers, from byte `start` on.
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
                *slot = HashedKey::of(key);
                if self.owns(slot.hash) {
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

    /// Whether other shards are asked for their keys of these all at once.
    fn is_merged(&self, keys: &[HashedKey<'_>]) -> bool {
        self.lower.is_none() && keys.len() > 1 && keys.iter().any(|it| !self.owns(it.hash))
    }

    /// Answers keys of a `get` one by one, or has them answered; how many there was room for. `read` is for the last.
    fn answer_get_keys(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        keys: &[HashedKey<'_>],
        read: GetKey,
    ) -> usize {
        for (number, &key) in keys.iter().enumerate() {
            if self.out.len() >= OUT_BYTES_MAX || client.is_held_up() {
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
        self.push_ready(client);
        let before = client.replies.ready_mut().len();
        let (mut merge, shards) = (Merge::default(), self.shared.shards());
        let (mut done, mut own_bytes) = (0, 0);
        for &key in keys {
            if own_bytes >= OUT_BYTES_MAX || client.is_held_up_by(merge.keys()) {
                break;
            }
            done += 1;
            let owner = shard_of(key.hash, shards);
            if owner == self.number {
                let (own, read) = (client.replies.ready_mut(), GetKey { is_last: false, ..read });
                get_key(&mut self.shard, key, read, own);
                own_bytes = own.len() - before;
            } else {
                merge.add(owner, own_bytes);
                push_key(key, &mut self.asks[owner].bytes);
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
        self.counts.forwarded += merge.keys() as u64;
        let address = id.address(client.replies.push_merged(merge));
        for (owner, part) in asked {
            let ask = Ask::GetKeys { part, flags: read.flags };
            // The keys are there already.
            self.asks[owner].push(address, ask, |_| {});
        }
        done
    }

    /// Answers one key of a `get`, or has it answered.
    #[inline]
    fn answer_get_key(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        key: HashedKey<'_>,
        read: GetKey,
    ) {
        let owner = shard_of(key.hash, self.shared.shards());
        if owner != self.number {
            let ask = Ask::GetKey { hash: key.hash, read };
            return self.forward(client, id, owner, ask, [key.key, b""]);
        }
        if self.is_below(key, false) {
            let origin = self.await_slow(client, id);
            return self.park(key, origin, Parked::GetKey(read), b"");
        }
        let mut out = std::mem::take(&mut self.out);
        get_key(&mut self.shard, key, read, &mut out);
        self.out = out;
    }

    fn answer_keys(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        request: &KeyRequest<'_>,
        planned: &Planned<'_>,
    ) {
        let prepared = match request {
            KeyRequest::Meta(meta) => match meta::prepare(meta) {
                Ok(prepared) => Some(prepared),
                Err(reply) => return push_line(&mut self.out, reply),
            },
            _ => None,
        };
        let hash = prepared.as_ref().map_or(planned.hash, |prepared| prepared.hash);
        let owner = shard_of(hash, self.shared.shards());
        if owner != self.number {
            return match request {
                KeyRequest::Store(store) if self.lower.is_none() => {
                    let ask = Ask::Store { hash, store: StoreHead::of(store) };
                    self.forward(client, id, owner, ask, [store.key, store.data]);
                }
                _ => self.forward(client, id, owner, Ask::Request, [planned.bytes, b""]),
            };
        }
        let key =
            prepared.as_ref().map_or_else(|| first_key(&planned.request), |it| Some(&it.key[..]));
        if let Some(key) = key
            && let key = (HashedKey { key, hash })
            && self.is_below(key, is_plain_set(request))
        {
            let origin = self.await_slow(client, id);
            return self.park(key, origin, Parked::Request, planned.bytes);
        }
        match prepared {
            Some(prepared) => meta::execute(&mut self.shard, &prepared, &mut self.out),
            None => execute(&mut self.shard, request, hash, &mut self.out),
        }
    }

    /// What is ready comes before what is to be awaited.
    pub(super) fn push_ready(&mut self, client: &mut Client) {
        client.replies.prepare(&mut self.spare_buffers);
        client.replies.push_ready(&self.out);
        self.out.clear();
    }

    /// Keeps a place for a reply that takes its time.
    pub(super) fn await_slow(&mut self, client: &mut Client, id: ConnectionId) -> Origin {
        self.push_ready(client);
        Origin { thread: self.number, address: id.address(client.replies.push_slow()) }
    }

    /// Asks another shard and keeps a place for its answer.
    fn forward(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        owner: usize,
        ask: Ask,
        bytes: [&[u8]; 2],
    ) {
        self.push_ready(client);
        let address = id.address(client.replies.push_awaited());
        self.asks[owner].push(address, ask, |batch| {
            batch.extend_from_slice(bytes[0]);
            batch.extend_from_slice(bytes[1]);
        });
        self.counts.forwarded += 1;
    }

    fn drop_key(&mut self, client: &mut Client, id: ConnectionId, key: KeyWord<'_>) {
        let decoded;
        let key = if key.is_base64 {
            decoded = meta::decode_key(key.word).unwrap_or_default();
            &decoded[..]
        } else {
            key.word
        };
        let hash = hash_key(key);
        let owner = shard_of(hash, self.shared.shards());
        if owner == self.number {
            drop_item(&mut self.shard, key, hash);
        } else {
            self.forward(client, id, owner, Ask::Drop, [key, b""]);
        }
    }
}

/// Appends what one key of a `get` is answered, and the end if it is the last.
pub(super) fn get_key(
    shard: &mut farpool_kv_protocol::Shard,
    key: HashedKey<'_>,
    read: GetKey,
    out: &mut Vec<u8>,
) {
    classic::get_one(shard, key, read.flags, out);
    if read.is_last {
        out.extend_from_slice(GET_END);
    }
}

/// A plain `set` replaces whatever there is, wherever it is.
pub(super) const fn is_plain_set(request: &KeyRequest<'_>) -> bool {
    matches!(request, KeyRequest::Store(store) if matches!(store.mode, StoreMode::Set))
}

pub(super) fn drop_item(shard: &mut farpool_kv_protocol::Shard, key: &[u8], hash: u64) {
    if let Some(found) = shard.store.find(key, hash) {
        shard.store.remove(found);
    }
    shard.store.forget_lower(hash);
}

/// The key that decides what is loaded ahead; of a meta command as the line has it.
pub(super) fn first_key<'a>(request: &Request<'a>) -> Option<&'a [u8]> {
    let Request::Keys(request) = request else { return None };
    match *request {
        KeyRequest::Get { keys, .. } => split(keys).next(),
        KeyRequest::Store(store) => Some(store.key),
        KeyRequest::Delete { key, .. }
        | KeyRequest::Arithmetic { key, .. }
        | KeyRequest::Touch { key, .. } => Some(key),
        KeyRequest::Meta(meta) => split(meta.line).nth(1),
    }
}

/// Answers a classic command on one key of this shard.
pub(super) fn execute(
    shard: &mut farpool_kv_protocol::Shard,
    request: &KeyRequest<'_>,
    hash: u64,
    out: &mut Vec<u8>,
) {
    match *request {
        KeyRequest::Store(store) => classic::execute_store(shard, &store, hash, out),
        KeyRequest::Delete { key, quiet } => classic::execute_delete(shard, key, hash, quiet, out),
        KeyRequest::Arithmetic { key, delta, increments, quiet } => {
            let change = Change { delta, increments, cas: 0 };
            classic::execute_change(shard, key, hash, change, quiet, out);
        }
        KeyRequest::Touch { key, exptime, quiet } => {
            classic::execute_touch(shard, key, hash, (exptime, quiet), out)
        }
        KeyRequest::Get { .. } | KeyRequest::Meta(_) => debug_assert!(false, "answered elsewhere"),
    }
}
