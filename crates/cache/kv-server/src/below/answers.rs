//! What happens when a lower tier has answered, or has taken too long.

use std::time::Instant;

use farpool_keyvault::message::Item;

use super::Parked;
use super::waiting::{ParkedRequest, Waiting, is_plain};
use crate::keyvault::gather::GatheringId;
use crate::mail::mailbox::{Answer, Batch, Origin};
use crate::text::get::{GET_END, get_key};
use crate::watch::journal;
use crate::worker::Worker;
use farpool_kv_protocol::classic;
use farpool_kv_store::index::ItemAt;
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::record::{self, Record};
use farpool_kv_tier::log::Outcome;

impl Worker {
    /// Takes the lower tiers' answers. `now` is given when deadlines are to be checked.
    pub(crate) fn poll_below(&mut self, now: Option<Instant>) {
        journal::note_client(&mut self.shard.store, None);
        let Some(below) = &mut self.below else { return };
        let outcomes = below.poll(&mut self.shard.store, now);
        let late = now.map(|now| below.waiting.take_late(now)).unwrap_or_default();
        let mut own = Batch::default();
        for (tier, outcomes) in outcomes {
            let Some(outcomes) = outcomes else { continue };
            let mut start = 0;
            for &(hash, place, outcome) in &outcomes.reads {
                let record = match outcome {
                    Outcome::Found { end } => {
                        let bytes = &outcomes.records[start..end];
                        start = end;
                        record::read_unchecked(bytes)
                    }
                    Outcome::Gone | Outcome::Failed => None,
                };
                self.take_read(hash, ItemAt { tier, place }, record, &mut own);
            }
            if let Some(below) = &mut self.below {
                below.return_outcomes(tier, outcomes);
            }
        }
        for (hash, waiting) in late {
            self.execute_late(hash, waiting, &mut own);
        }
        if !own.is_empty() {
            self.deliver(&own);
        }
        if let Some(below) = &mut self.below {
            below.watch(&self.me.epoll, now.is_some());
        }
    }

    /// Resumes the requests that waited for one item.
    fn take_read(
        &mut self,
        hash: u64,
        at: ItemAt,
        found: Option<Record<'_>>,
        own: &mut Batch<Answer>,
    ) {
        let Some(below) = &mut self.below else { return };
        let Some(mut waiting) = below.waiting.take_reading(hash, at) else { return };
        match found {
            Some(record) if record.hash == hash && record.item.key() == waiting.key => {
                self.take_record(at, &record, waiting, own);
                return;
            }
            // Another key with the same tag.
            Some(_) => waiting.tried.push(at),
            None => below.remove(&mut self.shard.store, hash, at),
        }
        let next = self.shard.store.lower_entry(hash, |at| !waiting.tried.contains(&at));
        match (next, &mut self.below) {
            (Some(entry), Some(below)) if !self.shard.store.is_in_memory(&waiting.key, hash) => {
                waiting.reading = Some(entry.item_at());
                below.read(entry.item_at(), hash);
                below.waiting.put_back(hash, waiting);
            }
            _ => {
                // What a request changes must stay so even if another key's item was only what the
                // tier took for it.
                if !waiting.tried.is_empty() && !waiting.requests.iter().all(is_plain) {
                    self.shard.store.forget_lower(hash);
                    self.settle_victims();
                }
                let key = HashedKey { key: &waiting.key, hash };
                self.execute_parked(key, waiting.requests, own);
            }
        }
    }

    /// The item has been read: answers from it, or promotes it first.
    fn take_record(
        &mut self,
        at: ItemAt,
        record: &Record<'_>,
        waiting: Waiting,
        own: &mut Batch<Answer>,
    ) {
        let Waiting { key, mut requests, .. } = waiting;
        let hash = record.hash;
        let hashed = HashedKey { key: &key, hash };
        let hits_before = self.shard.store.hit_lower(hash, at.tier, at.place);
        if !self.shard.store.is_live(record) {
            self.remove_below(hash, at);
            return self.execute_parked(hashed, requests, own);
        }
        let stays = match hits_before {
            // Overwritten or deleted since: a request made before that gets the value of that time.
            None => requests.first().is_some_and(is_plain),
            Some(0) => requests.len() == 1 && is_plain(&requests[0]),
            Some(_) => false,
        };
        if stays {
            let first = requests.remove(0);
            self.shard.counts.cmd_get += 1;
            self.shard.counts.get_hits += 1;
            self.shard.observe_read_below(hash, &record.item);
            self.answer_from_record(&first, record, own);
            if let Some(below) = &mut self.below {
                below.answers(at.tier).served += 1;
            }
        } else if hits_before.is_some() {
            if self.shard.store.promote(record).is_err() {
                self.remove_below(hash, at);
            }
            self.settle_victims();
            if let Some(below) = &mut self.below {
                below.answers(at.tier).promoted += 1;
            }
        }
        if requests.is_empty() {
            return;
        }
        // The item may have left memory again, to another place.
        if self.is_below(hashed, false) {
            for it in requests {
                self.park(hashed, it.origin, it.what, &it.bytes);
            }
            return;
        }
        self.execute_parked(hashed, requests, own);
    }

    /// Answers a plain read from the record.
    fn answer_from_record(
        &mut self,
        request: &ParkedRequest,
        record: &Record<'_>,
        own: &mut Batch<Answer>,
    ) {
        let item = &record.item;
        let cas = item.wide_cas().unwrap_or(record.stored_as);
        match request.what {
            Parked::GetKey(read) => {
                self.reply(request.origin, own, |_, out| {
                    classic::push_item(item.key(), item, read.flags.with_cas.then_some(cas), out);
                    if read.is_last {
                        out.extend_from_slice(GET_END);
                    }
                });
            }
            Parked::Part { gathering, index } => {
                let item = Item { client_flags: item.client_flags(), cas, value: item.value() };
                if let Some(below) = &mut self.below {
                    below.gatherings.take(gathering, index, Some(item));
                }
                self.answer_gathering(gathering, own);
            }
            Parked::Binary { .. } => {
                self.reply(request.origin, own, |worker, out| {
                    worker.answer_binary_from_record(&request.bytes, (item, cas), out);
                });
            }
            Parked::Request | Parked::KeyVault { .. } => {
                debug_assert!(false, "only plain reads are answered so");
            }
        }
    }

    /// Answers a MULTIGET if none of its keys is awaited any more.
    fn answer_gathering(&mut self, id: GatheringId, own: &mut Batch<Answer>) {
        let Some(below) = &mut self.below else { return };
        if let Some(gathering) = below.gatherings.finished(id) {
            self.reply(gathering.origin, own, |_, out| gathering.write(out));
        }
    }

    fn remove_below(&mut self, hash: u64, at: ItemAt) {
        if let Some(below) = &mut self.below {
            below.remove(&mut self.shard.store, hash, at);
        }
    }

    /// Answers requests that have waited too long as misses. What they change must not be undone by
    /// an item that arrives later, so only plain reads leave the item in its tier.
    fn execute_late(&mut self, hash: u64, waiting: Waiting, own: &mut Batch<Answer>) {
        if let Some(below) = &mut self.below {
            below.late += waiting.requests.len() as u64;
        }
        if !waiting.requests.iter().all(is_plain) {
            self.shard.store.forget_lower(hash);
            self.settle_victims();
        }
        self.execute_parked(HashedKey { key: &waiting.key, hash }, waiting.requests, own);
    }

    /// Answers requests from what is in memory now.
    fn execute_parked(
        &mut self,
        key: HashedKey<'_>,
        requests: Vec<ParkedRequest>,
        own: &mut Batch<Answer>,
    ) {
        for request in requests {
            if let Parked::Part { gathering, index } = request.what {
                if let Some(below) = &mut self.below {
                    below.gather_from_memory(&mut self.shard, key, (gathering, index));
                }
                self.answer_gathering(gathering, own);
                continue;
            }
            self.reply(request.origin, own, |worker, out| match request.what {
                Parked::GetKey(read) => get_key(&mut worker.shard, key, read, out),
                Parked::Request => worker.answer_forwarded(&request.bytes, out),
                Parked::Binary { .. } => {
                    worker.answer_binary_passed_on(&request.bytes, key.hash, out);
                }
                Parked::KeyVault { checked } => {
                    worker.answer_passed_on(&request.bytes, checked, out)
                }
                Parked::Part { .. } => {}
            });
            self.settle_victims();
        }
    }

    /// Answers a parked request; `write` appends the answer.
    fn reply(
        &mut self,
        Origin { thread, address }: Origin,
        own: &mut Batch<Answer>,
        write: impl FnOnce(&mut Self, &mut Vec<u8>),
    ) {
        if thread == self.me.number {
            own.push(address, Answer::Bytes, |out| write(self, out));
            return;
        }
        let mut answers = self.mail.take_answers(thread);
        answers.push(address, Answer::Bytes, |out| write(self, out));
        self.mail.return_answers(thread, answers);
    }
}
