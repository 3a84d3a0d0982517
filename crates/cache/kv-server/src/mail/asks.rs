//! Requests between threads: a shard answers asks, and the thread that asked takes the answers.

use super::mailbox::{Answer, Ask, Batch, Entry, Origin, StoreHead};
use super::merge::{read_keys, write_part};
use crate::below::Parked;
use crate::clients::connection::Client;
use crate::text::BATCH;
use crate::text::get::get_key;
use crate::text::serve::{drop_item, execute, first_key, is_plain_set};
use crate::watch::admin;
use crate::watch::dump::{self, List, Listed};
use crate::watch::journal;
use crate::watch::report::{ShardReport, ThreadCounts};
use crate::worker::Worker;
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::classic;
use farpool_kv_protocol::command::{ReadFlags, StoreRequest};
use farpool_kv_protocol::meta;
use farpool_kv_protocol::reply::push_line;
use farpool_kv_protocol::request::{KeyRequest, Request, Scan, scan};
use farpool_kv_store::key::HashedKey;

impl Worker {
    /// Answers another thread's asks of this shard.
    pub(crate) fn answer_asks(&mut self, from: usize, batch: &Batch<Ask>) {
        journal::note_client(&mut self.shard.store, None);
        let mut answers = self.mail.take_answers(from);
        for (turn, entries) in batch.entries.chunks(BATCH).enumerate() {
            let hashes = || entries.iter().filter_map(|entry| entry.what.hash());
            hashes().for_each(|hash| self.shard.store.prefetch_entry(hash));
            hashes().for_each(|hash| self.shard.store.prefetch_item(hash));
            for (number, entry) in entries.iter().enumerate() {
                let bytes = batch.bytes_of(turn * BATCH + number);
                if self.park_ask(from, entry, bytes, &mut answers) {
                    answers.push(entry.address, Answer::Parked, |_| {});
                } else {
                    self.answer_ask(entry, bytes, &mut answers);
                    self.settle_victims();
                }
            }
        }
        self.mail.return_answers(from, answers);
    }

    /// Parks another thread's request if its key is in a lower tier.
    fn park_ask(
        &mut self,
        from: usize,
        entry: &Entry<Ask>,
        bytes: &[u8],
        answers: &mut Batch<Answer>,
    ) -> bool {
        if self.below.is_none() {
            return false;
        }
        let origin = Origin { thread: from, address: entry.address };
        let (what, key, hash) = match entry.what {
            Ask::GetKey { hash, read } => {
                if !self.is_below(HashedKey { key: bytes, hash }, false) {
                    return false;
                }
                (Parked::GetKey(read), bytes.to_vec(), hash)
            }
            Ask::KeyVault { checked } => {
                return self.park_keyvault_ask(origin, bytes, checked, answers);
            }
            Ask::Binary { hash } => match self.binary_below(bytes, hash) {
                Some((key, what)) => (what, key.key.to_vec(), hash),
                None => return false,
            },
            Ask::Request => match self.forwarded_below(bytes) {
                Some((key, hash)) => (Parked::Request, key, hash),
                None => return false,
            },
            // With a lower tier, keys are asked for one by one.
            Ask::GetKeys { .. }
            | Ask::Store { .. }
            | Ask::Drop
            | Ask::Flush { .. }
            | Ask::SetLimit { .. }
            | Ask::CountPrefixes { .. }
            | Ask::LeaveObserved
            | Ask::List { .. }
            | Ask::Report
            | Ask::ResetCounts => return false,
        };
        self.park(HashedKey { key: &key, hash }, origin, what, bytes);
        true
    }

    /// The key of a forwarded request, if it is in a lower tier.
    fn forwarded_below(&self, bytes: &[u8]) -> Option<(Vec<u8>, u64)> {
        let Scan::Request { request: Request::Keys(request), .. } = scan(bytes, &self.me.limits)
        else {
            return None;
        };
        let seed = self.shard.store.hash_seed();
        let key = match &request {
            KeyRequest::Meta(meta) => meta::prepare(meta, seed).ok()?.key.into_owned(),
            _ => first_key(&Request::Keys(request))?.to_vec(),
        };
        let hash = seed.hash_of(&key);
        let is_below = self.is_below(HashedKey { key: &key, hash }, is_plain_set(&request));
        is_below.then_some((key, hash))
    }

    fn answer_ask(&mut self, entry: &Entry<Ask>, bytes: &[u8], answers: &mut Batch<Answer>) {
        let report = match entry.what {
            Ask::GetKey { hash, read } => {
                answers.push(entry.address, Answer::Bytes, |out| {
                    get_key(&mut self.shard, HashedKey { key: bytes, hash }, read, out);
                });
                return;
            }
            Ask::GetKeys { part, flags } => {
                debug_assert!(self.below.is_none(), "all shards have tiers below, or none has");
                answers.push(entry.address, Answer::Part(part), |out| {
                    get_keys(&mut self.shard, &read_keys(bytes), flags, out);
                });
                return;
            }
            Ask::Store { hash, store } => {
                let store = store.with(bytes);
                answers.push(entry.address, Answer::Bytes, |out| {
                    classic::execute_store(&mut self.shard, &store, hash, out);
                });
                return;
            }
            Ask::Request => {
                answers.push(entry.address, Answer::Bytes, |out| self.answer_forwarded(bytes, out));
                return;
            }
            Ask::Binary { hash } => {
                let answer = |out: &mut Vec<u8>| self.answer_binary_passed_on(bytes, hash, out);
                return answers.push(entry.address, Answer::Bytes, answer);
            }
            Ask::KeyVault { checked } => {
                answers.push(entry.address, Answer::Bytes, |out| {
                    self.answer_passed_on(bytes, checked, out)
                });
                return;
            }
            Ask::Drop => {
                let hash = self.shard.store.hash_of(bytes);
                drop_item(&mut self.shard, bytes, hash);
                answers.push(entry.address, Answer::Bytes, |_| {});
                return;
            }
            Ask::List { list, from, lines_max, bytes_max } => {
                let mut lines = Vec::new();
                let piece = match list {
                    List::Connections => {
                        let now_s = self.shard.clock.now_s();
                        let lines = self.clients.list(&self.me, now_s, &mut lines);
                        Listed { next: None, lines }
                    }
                    _ => dump::push_piece(
                        &self.shard,
                        list,
                        from,
                        (lines_max, bytes_max),
                        &mut lines,
                    ),
                };
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

    /// Does this shard's part of an ask to all shards. Returns its report.
    pub(crate) fn do_for_all(&mut self, ask: Ask) -> ShardReport {
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
                self.shard.counts = farpool_kv_protocol::CommandCounts::default();
                let connections = self.me.counts.connections;
                self.me.counts = ThreadCounts { connections, ..Default::default() };
            }
            Ask::Report
            | Ask::GetKey { .. }
            | Ask::GetKeys { .. }
            | Ask::Store { .. }
            | Ask::Request
            | Ask::Binary { .. }
            | Ask::KeyVault { .. }
            | Ask::List { .. }
            | Ask::Drop => {}
        }
        ShardReport { limit_was_set, ..self.report() }
    }

    /// Answers a request that its client's thread has found complete and well-formed.
    pub(crate) fn answer_forwarded(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let Scan::Request { request: Request::Keys(request), .. } = scan(bytes, &self.me.limits)
        else {
            debug_assert!(false, "only requests on keys are forwarded");
            return push_line(out, "SERVER_ERROR request lost between threads");
        };
        match request {
            KeyRequest::Meta(meta) => match meta::prepare(&meta, self.shard.store.hash_seed()) {
                Ok(prepared) => meta::execute(&mut self.shard, &prepared, out),
                Err(reply) => push_line(out, reply),
            },
            _ => {
                let key = first_key(&Request::Keys(request));
                let hash = key.map_or(0, |key| self.shard.store.hash_of(key));
                execute(&mut self.shard, &request, hash, out);
            }
        }
    }

    /// Takes another shard's answer.
    pub(crate) fn take_answer(&mut self, client: &mut Client, entry: &Entry<Answer>, bytes: &[u8]) {
        let ticket = entry.address.ticket;
        match &entry.what {
            Answer::Bytes => client.replies.arrive(ticket, bytes, &mut self.clients.out),
            Answer::Part(part) => {
                client.replies.arrive_part(ticket, *part, bytes, &mut self.clients.out);
            }
            Answer::Parked => client.replies.note_slow(),
            Answer::Listed(piece) => {
                client.dump.iter_mut().for_each(|dump| dump.take(*piece, bytes.len()));
                client.replies.arrive(ticket, bytes, &mut self.clients.out);
            }
            Answer::Report(report) => {
                let whole = client
                    .replies
                    .gathered_mut(ticket)
                    .and_then(|gather| gather.take(report).then(|| gather.clone()));
                if let Some(gather) = whole {
                    let reply = admin::gathered(&self.me.shared, &self.shard.clock, &gather);
                    client.replies.arrive(ticket, &reply, &mut self.clients.out);
                }
            }
        }
    }
}

/// Appends the replies to some keys of a `get`, all of which this shard owns.
fn get_keys(shard: &mut Shard, keys: &[HashedKey<'_>], flags: ReadFlags, out: &mut Vec<u8>) {
    keys.iter().for_each(|it| shard.store.prefetch_entry(it.hash));
    keys.iter().for_each(|it| shard.store.prefetch_item(it.hash));
    write_part(keys, out, |&key, out| classic::get_one(shard, key, flags, out));
}

impl Ask {
    /// The hash of its key, if it was sent along.
    const fn hash(&self) -> Option<u64> {
        match *self {
            Self::GetKey { hash, .. } | Self::Store { hash, .. } | Self::Binary { hash } => {
                Some(hash)
            }
            _ => None,
        }
    }
}

impl StoreHead {
    pub(crate) fn of(request: &StoreRequest<'_>) -> Self {
        let StoreRequest { mode, key, client_flags, exptime, cas, quiet, .. } = *request;
        let key_bytes = u8::try_from(key.len()).expect("the parser refuses longer keys");
        Self { mode, key_bytes, quiet, client_flags, exptime, cas }
    }

    /// Restores the whole request: `bytes` are its key and its data.
    fn with(self, bytes: &[u8]) -> StoreRequest<'_> {
        let Self { mode, key_bytes, quiet, client_flags, exptime, cas } = self;
        let (key, data) = bytes.split_at(usize::from(key_bytes).min(bytes.len()));
        StoreRequest { mode, key, client_flags, exptime, cas, quiet, data }
    }
}
