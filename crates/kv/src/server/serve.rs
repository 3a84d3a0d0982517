//! Answering: what a client sent, in batches, and what other threads ask of this one's shard.
//!
//! A batch of requests is first looked at only as far as their keys, so that index and items are on
//! their way from memory while the first are answered.

use smallvec::SmallVec;

use super::admin;
use super::auth::{Attempt, attempt};
use super::connection::{AWAITED_MAX, Client, Phase, Resume};
use super::dump;
use super::lower::Parked;
use super::mailbox::{Address, Answer, Ask, Batch, Entry};
use super::sockets::{Connection, ConnectionId, OUT_BYTES_MAX};
use super::worker::Worker;
use crate::protocol::classic::{self, Change, GetProgress};
use crate::protocol::meta;
use crate::protocol::reply::{push_line, push_unless};
use crate::protocol::request::{KeyRequest, KeyWord, Request, Scan, StoreMode, scan};
use crate::protocol::token::split;
use farpool_keyvault::owner::{hash_key, shard_of};

/// Requests that are looked at together.
const BATCH: usize = 32;

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
                self.settle(&mut connection.client);
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

    /// Replies made while something is awaited wait behind it.
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
        &self,
        client: &mut Client,
        input: &'a [u8],
        most: usize,
    ) -> SmallVec<[Planned<'a>; BATCH]> {
        let mut planned = SmallVec::new();
        let mut at = 0;
        while planned.len() < most && at < input.len() {
            match scan(&input[at..], &self.limits) {
                Scan::Incomplete { want_bytes } => {
                    client.want_bytes = want_bytes;
                    break;
                }
                Scan::Request { bytes, request } => {
                    let hash = first_key(&request).map_or(0, hash_key);
                    self.shard.store.prefetch_entry(hash);
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
            planned.iter().for_each(|it: &Planned<'_>| self.shard.store.prefetch_item(it.hash));
        }
        planned
    }

    fn answer(&mut self, client: &mut Client, id: ConnectionId, planned: &Planned<'_>) -> Next {
        match planned.request {
            Request::Keys(KeyRequest::Get { keys, with_cas, touch }) => {
                return self.answer_get(client, id, keys, (with_cas, touch));
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
        (with_cas, touch): (bool, Option<i32>),
    ) -> Next {
        let start = client.resume.take().map_or(0, |resume| resume.done_bytes);
        if self.shared.shards() == 1 && self.lower.is_none() {
            let mut out = std::mem::take(&mut self.out);
            let progress = classic::get_many(
                &mut self.shard,
                &keys[start..],
                (with_cas, touch),
                &mut out,
                OUT_BYTES_MAX,
            );
            self.out = out;
            let GetProgress::Stopped { done_bytes } = progress else { return Next::Request };
            client.resume = Some(Resume { done_bytes: start + done_bytes });
            return Next::Rest;
        }
        for key in split(&keys[start..]) {
            if self.out.len() >= OUT_BYTES_MAX || client.replies.len() >= AWAITED_MAX {
                let done_bytes = key.as_ptr() as usize - keys.as_ptr() as usize;
                client.resume = Some(Resume { done_bytes });
                return Next::Rest;
            }
            let hash = hash_key(key);
            let owner = shard_of(hash, self.shared.shards());
            if owner == self.number {
                if self.is_below((key, hash), false) {
                    let address = self.await_own(client, id);
                    self.park(
                        (key, hash),
                        (self.number, address),
                        Parked::GetKey { with_cas, touch },
                        b"",
                    );
                    continue;
                }
                let mut out = std::mem::take(&mut self.out);
                classic::get_one(&mut self.shard, (key, hash), with_cas, touch, &mut out);
                self.out = out;
                // What is ready stays behind what is awaited.
                self.settle(client);
            } else {
                self.forward(client, id, owner, Ask::GetKey { with_cas, touch }, key);
            }
        }
        self.out.extend_from_slice(b"END\r\n");
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
            KeyRequest::Meta(meta) => match meta::prepare(meta) {
                Ok(prepared) => Some(prepared),
                Err(reply) => return push_line(&mut self.out, reply),
            },
            _ => None,
        };
        let hash = prepared.as_ref().map_or(planned.hash, |prepared| prepared.hash);
        let owner = shard_of(hash, self.shared.shards());
        if owner != self.number {
            self.forward(client, id, owner, Ask::Request, planned.bytes);
            return;
        }
        let key =
            prepared.as_ref().map_or_else(|| first_key(&planned.request), |it| Some(&it.key[..]));
        if let Some(key) = key
            && self.is_below((key, hash), is_plain_set(request))
        {
            let address = self.await_own(client, id);
            return self.park((key, hash), (self.number, address), Parked::Request, planned.bytes);
        }
        match prepared {
            Some(prepared) => meta::execute(&mut self.shard, &prepared, &mut self.out),
            None => execute(&mut self.shard, request, hash, &mut self.out),
        }
    }

    /// Keeps a place for a reply that this shard makes later.
    pub(super) fn await_own(&mut self, client: &mut Client, id: ConnectionId) -> Address {
        // What is ready comes before what is awaited.
        client.replies.push_ready(&self.out);
        self.out.clear();
        let ticket = client.replies.push_awaited();
        Address { connection: id.number, generation: id.generation, ticket }
    }

    /// Asks another shard and keeps a place for its answer.
    fn forward(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        owner: usize,
        ask: Ask,
        bytes: &[u8],
    ) {
        let address = self.await_own(client, id);
        self.asks[owner].push(address, ask, |batch| batch.extend_from_slice(bytes));
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
            self.forward(client, id, owner, Ask::Drop, key);
        }
    }

    /// Answers what another thread asks of this shard.
    pub(super) fn answer_asks(&mut self, from: usize, batch: &Batch<Ask>) {
        self.note_client(None);
        let mut answers = std::mem::take(&mut self.answers[from]);
        let keys = |entry: usize| {
            let start = if entry == 0 { 0 } else { batch.entries[entry - 1].end };
            &batch.bytes[start..batch.entries[entry].end]
        };
        for number in 0..batch.entries.len() {
            let entry = &batch.entries[number];
            if !self.park_ask(from, entry, keys(number), &mut answers) {
                self.answer_ask(entry, keys(number), &mut answers);
                self.settle_victims();
            }
        }
        self.answers[from] = answers;
    }

    /// Has another thread's request wait if its key is in a lower tier.
    fn park_ask(
        &mut self,
        from: usize,
        entry: &Entry<Ask>,
        bytes: &[u8],
        answers: &mut Batch<Answer>,
    ) -> bool {
        if self.lower.is_none() {
            return false;
        }
        let (what, key, hash) = match entry.what {
            Ask::GetKey { with_cas, touch } => {
                let hash = hash_key(bytes);
                if !self.is_below((bytes, hash), false) {
                    return false;
                }
                (Parked::GetKey { with_cas, touch }, bytes.to_vec(), hash)
            }
            Ask::Light { checked } => {
                return self.park_light_ask((from, entry.address), bytes, checked, answers);
            }
            Ask::Request => match self.forwarded_below(bytes) {
                Some((key, hash)) => (Parked::Request, key, hash),
                None => return false,
            },
            Ask::Drop
            | Ask::Flush { .. }
            | Ask::SetLimit { .. }
            | Ask::CountPrefixes { .. }
            | Ask::LeaveObserved
            | Ask::List { .. }
            | Ask::Report
            | Ask::ResetCounts => return false,
        };
        self.park((&key, hash), (from, entry.address), what, bytes);
        true
    }

    /// The key of a forwarded request, if it is in a lower tier.
    fn forwarded_below(&self, bytes: &[u8]) -> Option<(Vec<u8>, u64)> {
        let Scan::Request { request: Request::Keys(request), .. } = scan(bytes, &self.limits)
        else {
            return None;
        };
        let key = match &request {
            KeyRequest::Meta(meta) => meta::prepare(meta).ok()?.key.into_owned(),
            _ => first_key(&Request::Keys(request))?.to_vec(),
        };
        let hash = hash_key(&key);
        self.is_below((&key, hash), is_plain_set(&request)).then_some((key, hash))
    }

    fn answer_ask(&mut self, entry: &Entry<Ask>, bytes: &[u8], answers: &mut Batch<Answer>) {
        let report = match entry.what {
            Ask::GetKey { with_cas, touch } => {
                let key = (bytes, hash_key(bytes));
                answers.push(entry.address, Answer::Bytes, |out| {
                    classic::get_one(&mut self.shard, key, with_cas, touch, out);
                });
                return;
            }
            Ask::Request => {
                answers.push(entry.address, Answer::Bytes, |out| self.answer_forwarded(bytes, out));
                return;
            }
            Ask::Light { checked } => {
                answers.push(entry.address, Answer::Bytes, |out| {
                    self.answer_passed_on(bytes, checked, out)
                });
                return;
            }
            Ask::Drop => {
                drop_item(&mut self.shard, bytes, hash_key(bytes));
                answers.push(entry.address, Answer::Bytes, |_| {});
                return;
            }
            Ask::List { list, from, lines_max, bytes_max } => {
                let mut lines = Vec::new();
                let piece = self.list(list, from, (lines_max, bytes_max), &mut lines);
                answers.push(entry.address, Answer::Listed(piece), |out| {
                    out.extend_from_slice(&lines);
                });
                return;
            }
            Ask::Flush { .. }
            | Ask::SetLimit { .. }
            | Ask::CountPrefixes { .. }
            | Ask::LeaveObserved
            | Ask::Report
            | Ask::ResetCounts => self.do_for_all(entry.what),
        };
        answers.push(entry.address, Answer::Report(Box::new(report)), |_| {});
    }

    /// Does what all shards are asked, and reports.
    pub(super) fn do_for_all(&mut self, ask: Ask) -> super::report::ShardReport {
        let mut limit_was_set = true;
        match ask {
            Ask::Flush { at_s } => {
                self.shard.store.flush_all(at_s);
                self.keep_promises();
            }
            Ask::SetLimit { bytes } => limit_was_set = self.shard.store.set_limit(bytes).is_ok(),
            Ask::CountPrefixes { on } => self.count_prefixes(on),
            Ask::LeaveObserved => self.leave_observed(),
            Ask::ResetCounts => {
                self.shard.observer.iter_mut().for_each(|observer| observer.reset());
                self.shard.store.reset_counts();
                self.shard.counts = crate::protocol::CommandCounts::default();
                let connections = self.counts.connections;
                self.counts = super::report::ThreadCounts { connections, ..Default::default() };
            }
            Ask::Report
            | Ask::GetKey { .. }
            | Ask::Request
            | Ask::Light { .. }
            | Ask::List { .. }
            | Ask::Drop => {}
        }
        super::report::ShardReport { limit_was_set, ..self.report() }
    }

    /// A request that its client's thread has found whole and in order.
    pub(super) fn answer_forwarded(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let Scan::Request { request: Request::Keys(request), .. } = scan(bytes, &self.limits)
        else {
            debug_assert!(false, "only requests on keys are forwarded");
            return push_line(out, "SERVER_ERROR request lost between threads");
        };
        match request {
            KeyRequest::Meta(meta) => match meta::prepare(&meta) {
                Ok(prepared) => meta::execute(&mut self.shard, &prepared, out),
                Err(reply) => push_line(out, reply),
            },
            _ => {
                let hash = first_key(&Request::Keys(request)).map_or(0, hash_key);
                execute(&mut self.shard, &request, hash, out);
            }
        }
    }

    /// Takes the answer of another shard.
    pub(super) fn take_answer(&mut self, client: &mut Client, entry: &Entry<Answer>, bytes: &[u8]) {
        let ticket = entry.address.ticket;
        match &entry.what {
            Answer::Bytes => client.replies.arrive(ticket, bytes, &mut self.out),
            Answer::Listed(piece) => {
                client.dump.iter_mut().for_each(|dump| dump.take(*piece, bytes.len()));
                client.replies.arrive(ticket, bytes, &mut self.out);
            }
            Answer::Report(report) => {
                let whole = client
                    .replies
                    .gathered_mut(ticket)
                    .and_then(|gather| gather.take(report).then(|| gather.clone()));
                if let Some(gather) = whole {
                    let reply = admin::gathered(self, &gather);
                    client.replies.arrive(ticket, &reply, &mut self.out);
                }
            }
        }
    }
}

/// A plain `set` replaces whatever there is, wherever it is.
const fn is_plain_set(request: &KeyRequest<'_>) -> bool {
    matches!(request, KeyRequest::Store(store) if matches!(store.mode, StoreMode::Set))
}

fn drop_item(shard: &mut crate::protocol::Shard, key: &[u8], hash: u64) {
    if let Some(found) = shard.store.find(key, hash) {
        shard.store.remove(found);
    }
    shard.store.forget_lower(hash);
}

/// The key that decides what is loaded ahead; of a meta command as the line has it.
fn first_key<'a>(request: &Request<'a>) -> Option<&'a [u8]> {
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
fn execute(
    shard: &mut crate::protocol::Shard,
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
