//! Answering a client's input, in batches.
//!
//! A batch of requests is first parsed only as far as its keys, so that index entries and items are
//! on their way from memory while the first requests are answered.

use smallvec::SmallVec;

use super::BATCH;
use crate::below::Parked;
use crate::clients::auth::{Attempt, attempt};
use crate::clients::connection::{Client, Phase};
use crate::clients::sockets::{Connection, OUT_BYTES_MAX};
use crate::mail::mailbox::{Ask, ConnectionId, Origin, StoreHead};
use crate::watch::admin;
use crate::worker::Worker;
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::change::Change;
use farpool_kv_protocol::classic;
use farpool_kv_protocol::command::StoreMode;
use farpool_kv_protocol::meta;
use farpool_kv_protocol::reply::{OUT_OF_MEMORY, TOO_LARGE, push_line, push_unless};
use farpool_kv_protocol::request::{KeyRequest, KeyWord, Request, Scan, scan};
use farpool_kv_protocol::token::split;
use farpool_kv_store::StoreError;
use farpool_kv_store::key::HashedKey;

#[derive(Debug)]
struct Planned<'a> {
    request: Request<'a>,
    /// All of its bytes, data included.
    bytes: &'a [u8],
    /// Hash of its first key, if known already.
    hash: u64,
}

/// What to do after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Answer the next request.
    Request,
    /// Answer the rest of this one, once replies are sent and answers have arrived.
    Rest,
    /// Do what the connection's phase says.
    Phase,
}

impl Worker {
    /// Answers the complete requests in `input` until the client's turn is used up. Returns the
    /// bytes consumed.
    pub(crate) fn serve(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let mut at = 0;
        let mut budget = self.me.shared.settings.requests_per_turn;
        connection.client.has_turn_left = false;
        while at < input.len() {
            let client = &mut connection.client;
            match client.phase {
                Phase::Closing => return input.len(),
                _ if client.watch.is_some() => return input.len(),
                Phase::Skipping { .. } => {
                    at += client.skip(input.len() - at);
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
            let client = &mut connection.client;
            for request in &planned {
                budget -= 1;
                let next = self.answer(client, id, request);
                self.settle_victims();
                if next == Next::Rest {
                    client.has_turn_left = true;
                    break;
                }
                at += request.bytes.len();
                client.requests += 1;
                // What a client does not read yet is not made yet.
                let is_full = self.clients.out.len() >= OUT_BYTES_MAX || client.is_held_up();
                if is_full || next == Next::Phase {
                    break;
                }
            }
            if !self.end_batch(connection, budget, at < input.len()) {
                break;
            }
        }
        if connection.client.phase == Phase::Closing { input.len() } else { at }
    }

    /// Refuses the request at the start of the input for lack of memory, if only its value is not
    /// complete. Returns the bytes consumed; the rest of the value is skipped.
    pub(crate) fn refuse(&mut self, client: &mut Client, id: ConnectionId, input: &[u8]) -> usize {
        let Scan::Incomplete { refused: Some((bytes, request)), .. } = scan(input, &self.me.limits)
        else {
            return 0;
        };
        self.answer(client, id, &Planned { request, bytes: &input[..bytes], hash: 0 });
        client.requests += 1;
        self.clients.settle(client);
        self.settle_victims();
        bytes
    }

    /// Queues or sends the replies to a batch. False if the client's turn is over: its `budget` of
    /// requests is used up, it does not read, or too much is awaited. Whether `has_more` input is
    /// there decides whether it waits for another turn.
    pub(crate) fn end_batch(
        &mut self,
        connection: &mut Connection,
        budget: usize,
        has_more: bool,
    ) -> bool {
        self.clients.settle(&mut connection.client);
        if self.clients.out.len() >= OUT_BYTES_MAX
            && !self.clients.send(connection, &mut self.me.counts)
        {
            connection.client.phase = Phase::Closing;
            return false;
        }
        let client = &mut connection.client;
        let is_over = budget == 0 || !client.unsent.is_empty() || client.is_held_up();
        if is_over {
            self.me.counts.yields += u64::from(budget == 0);
            client.has_turn_left = has_more;
        }
        !is_over
    }

    fn authenticate(&mut self, client: &mut Client, input: &[u8]) -> Option<usize> {
        match attempt(input, self.me.limits.compat) {
            Attempt::Incomplete => {
                client.want_bytes = input.len() + 1;
                None
            }
            Attempt::Close => {
                client.phase = Phase::Closing;
                Some(input.len())
            }
            Attempt::Refused { bytes, reply } => {
                push_line(&mut self.clients.out, reply);
                Some(bytes)
            }
            Attempt::Token { bytes, name, password } => {
                let credentials = self.me.shared.settings.credentials.as_ref();
                client.is_authenticated =
                    credentials.is_some_and(|known| known.accept(name, password));
                self.me.counts.auth_commands += 1;
                self.me.counts.auth_errors += u64::from(!client.is_authenticated);
                let failure = "CLIENT_ERROR authentication failure";
                push_line(
                    &mut self.clients.out,
                    if client.is_authenticated { "STORED" } else { failure },
                );
                Some(bytes)
            }
        }
    }

    /// Parses requests and begins to load the items they name.
    fn plan<'a>(
        &mut self,
        client: &mut Client,
        input: &'a [u8],
        most: usize,
    ) -> SmallVec<[Planned<'a>; BATCH]> {
        let mut planned: SmallVec<[Planned<'a>; BATCH]> = SmallVec::new();
        let mut at = 0;
        while planned.len() < most && at < input.len() {
            match scan(&input[at..], &self.me.limits) {
                Scan::Incomplete { want_bytes, .. } => {
                    client.want_bytes = want_bytes;
                    break;
                }
                Scan::Request { bytes, request } => {
                    let hash = first_key(&request).map_or(0, |key| self.shard.store.hash_of(key));
                    if self.me.owns(hash) {
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
    pub(crate) fn prefetch_own_item(&mut self, hash: u64) {
        if self.me.owns(hash) {
            self.shard.store.prefetch_item(hash);
        }
    }

    fn answer(&mut self, client: &mut Client, id: ConnectionId, planned: &Planned<'_>) -> Next {
        match planned.request {
            Request::Keys(KeyRequest::Get { keys, flags }) => {
                return self.answer_get(client, id, keys, flags);
            }
            Request::Keys(request) => self.answer_keys(client, id, &request, planned),
            Request::Refused { reply, quiet } => push_unless(&mut self.clients.out, quiet, reply),
            Request::Skipped { reply, quiet, skip_bytes, drop } => {
                match reply {
                    TOO_LARGE => self.refuse_value(client, id, StoreError::TooLarge, drop),
                    OUT_OF_MEMORY => self.refuse_value(client, id, StoreError::OutOfMemory, drop),
                    _ => {}
                }
                push_unless(&mut self.clients.out, quiet, reply);
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
                    admin::go_on(self, client, id);
                } else {
                    admin::answer(self, client, id, request);
                }
                return if client.dump.is_some() { Next::Rest } else { Next::Phase };
            }
        }
        Next::Request
    }

    fn answer_keys(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        request: &KeyRequest<'_>,
        planned: &Planned<'_>,
    ) {
        let prepared = match request {
            KeyRequest::Meta(meta) => match meta::prepare(meta, self.shard.store.hash_seed()) {
                Ok(prepared) => Some(prepared),
                Err(reply) => return push_line(&mut self.clients.out, reply),
            },
            _ => None,
        };
        let hash = prepared.as_ref().map_or(planned.hash, |prepared| prepared.hash);
        let owner = self.me.owner_of(hash);
        if owner != self.me.number {
            return match request {
                KeyRequest::Store(store) if self.below.is_none() => {
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
            Some(prepared) => meta::execute(&mut self.shard, &prepared, &mut self.clients.out),
            None => execute(&mut self.shard, request, hash, &mut self.clients.out),
        }
    }

    /// Reserves a place for a reply that may take long.
    pub(crate) fn await_slow(&mut self, client: &mut Client, id: ConnectionId) -> Origin {
        Origin { thread: self.me.number, address: self.clients.await_slow(client, id) }
    }

    /// Asks another shard and reserves a place for its answer.
    pub(crate) fn forward(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        owner: usize,
        ask: Ask,
        bytes: [&[u8]; 2],
    ) {
        self.clients.push_ready(client);
        let address = id.address(client.replies.push_awaited(bytes[0].len() + bytes[1].len()));
        self.mail.ask(owner, address, ask, |batch| {
            batch.extend_from_slice(bytes[0]);
            batch.extend_from_slice(bytes[1]);
        });
        self.me.counts.forwarded += 1;
    }

    /// Counts a value that is not stored, and removes the item of `key`, which would outlive it.
    pub(crate) fn refuse_value(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        error: StoreError,
        key: Option<KeyWord<'_>>,
    ) {
        let counts = &mut self.shard.counts;
        let (count, status) = match error {
            StoreError::TooLarge => (&mut counts.store_too_large, "too_large"),
            StoreError::OutOfMemory => (&mut counts.store_no_memory, "no_memory"),
        };
        *count += 1;
        let Some(key) = key else { return };
        if let Some(journal) = self.shard.store.journal_mut() {
            journal.stored(key.word, ("set", status), 0, 0);
        }
        self.drop_key(client, id, key);
    }

    /// Removes a key's item, wherever it is.
    pub(crate) fn drop_key(&mut self, client: &mut Client, id: ConnectionId, key: KeyWord<'_>) {
        let decoded;
        let key = if key.is_base64 {
            decoded = meta::decode_key(key.word).unwrap_or_default();
            &decoded[..]
        } else {
            key.word
        };
        let hash = self.shard.store.hash_of(key);
        let owner = self.me.owner_of(hash);
        if owner == self.me.number {
            drop_item(&mut self.shard, key, hash);
        } else {
            self.forward(client, id, owner, Ask::Drop, [key, b""]);
        }
    }
}

/// Whether the request is a plain `set`, which replaces the value in whatever tier it is.
pub(crate) const fn is_plain_set(request: &KeyRequest<'_>) -> bool {
    matches!(request, KeyRequest::Store(store) if matches!(store.mode, StoreMode::Set))
}

pub(crate) fn drop_item(shard: &mut Shard, key: &[u8], hash: u64) {
    if let Some(found) = shard.store.find(key, hash) {
        shard.store.remove(found);
    }
    shard.store.forget_lower(hash);
}

/// The key that decides what is loaded ahead; for a meta command, as it stands in the line.
pub(crate) fn first_key<'a>(request: &Request<'a>) -> Option<&'a [u8]> {
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
pub(crate) fn execute(shard: &mut Shard, request: &KeyRequest<'_>, hash: u64, out: &mut Vec<u8>) {
    match *request {
        KeyRequest::Store(store) => classic::execute_store(shard, &store, hash, out),
        KeyRequest::Delete { key, quiet } => {
            classic::execute_delete(shard, HashedKey { key, hash }, quiet, out);
        }
        KeyRequest::Arithmetic { key, delta, increments, quiet } => {
            let change = Change::new(HashedKey { key, hash }, delta, increments);
            classic::execute_change(shard, &change, quiet, out);
        }
        KeyRequest::Touch { key, exptime, quiet } => {
            classic::execute_touch(shard, key, hash, (exptime, quiet), out)
        }
        KeyRequest::Get { .. } | KeyRequest::Meta(_) => debug_assert!(false, "answered elsewhere"),
    }
}
