//! Requests on keys whose items lie in a lower tier: they wait for the item while others are answered.
//!
//! Requests on one key stay in order: as long as its item is being read, whatever else is asked of the key
//! waits behind, and one read serves all. A plain first read is answered from what came; anything else,
//! and a second read, brings the item back into memory and is then answered like any other request.

mod falling;

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use farpool_keyvault::message::Item;
use rustix::event::epoll;

use self::falling::{Below, StoreJudge, give};
use super::far::shard::Reclaim;
use super::gather::{GatheringId, Gatherings};
use super::mailbox::{Answer, Batch, GetKey, Origin};
use super::serve::{GET_END, get_key};
use super::worker::Worker;
use farpool_kv_protocol::classic;
use farpool_kv_store::Store;
use farpool_kv_store::index::{ItemAt, Tier};
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::record::{self, Record};
use farpool_kv_tier::far::Far;
use farpool_kv_tier::flash::{self, Flash};
use farpool_kv_tier::log::{Log, Outcome};

/// Who waits for a lower tier for so long is answered as if the item were not there. A medium that fails
/// says so earlier.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a request that waits asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parked {
    /// One key of a `get`.
    GetKey(GetKey),
    /// Any other request: its bytes.
    Request,
    /// A KeyVault frame.
    Light { checked: bool },
    /// One key of a MULTIGET.
    Part { gathering: GatheringId, index: u16 },
}

#[derive(Debug)]
struct ParkedRequest {
    origin: Origin,
    what: Parked,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Waiting {
    key: Vec<u8>,
    /// Where its item is being read. What an earlier read brings, for which nobody waited any longer, is not it.
    reading: Option<ItemAt>,
    /// Places whose items turned out to be another key's.
    tried: Vec<ItemAt>,
    requests: Vec<ParkedRequest>,
    /// When it was first seen waiting.
    since: Option<Instant>,
}

/// What became of reads in one tier.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Answers {
    /// Reads answered without bringing the item back.
    pub(super) served: u64,
    pub(super) promoted: u64,
}

/// The tiers below memory, and who waits for them.
#[derive(Debug, Default)]
pub(super) struct Lower {
    pub(super) far: Option<Far>,
    pub(super) flash: Option<Flash>,
    /// By the hash of their key.
    waiting: HashMap<u64, Waiting>,
    /// MULTIGETs whose keys are among those.
    pub(super) gatherings: Gatherings,
    watched: Vec<RawFd>,
    /// What left far memory.
    below: Below,
    /// Pieces of far memory that have to be given back, and what the index is to forget.
    pub(super) reclaim: Reclaim,
    pub(super) from_far: Answers,
    pub(super) from_flash: Answers,
    /// Requests answered as misses because a tier took too long.
    pub(super) late: u64,
}

impl Lower {
    /// Begins to read an item; it comes among the tier's outcomes.
    fn read(&mut self, ItemAt { tier, place }: ItemAt, hash: u64) {
        match (tier, &mut self.far, &mut self.flash) {
            (Tier::Far, Some(far), _) => far.read(place, hash),
            (Tier::Flash, _, Some(flash)) => flash.read(place, hash),
            _ => {}
        }
    }

    /// Takes what left memory: far memory first, then flash.
    fn take(&mut self, store: &mut Store, hash: u64, bytes: &[u8]) {
        let Self { far, flash, below, .. } = self;
        let in_far =
            far.as_mut().is_some_and(|far| give(far, store, Tier::Far, (hash, bytes), Some(below)));
        if !in_far && let Some(flash) = flash {
            give(flash, store, Tier::Flash, (hash, bytes), None);
        }
    }

    /// Gives flash what left far memory.
    fn take_fallen(&mut self, store: &mut Store) {
        let Self { flash, below, reclaim, .. } = self;
        reclaim.counts.dropped += std::mem::take(&mut below.dropped);
        if let Some(flash) = flash {
            for (hash, bytes) in below.fallen.iter() {
                give(flash, store, Tier::Flash, (hash, bytes), None);
            }
            for (hash, bytes) in below.emptied() {
                let is_taken = give(flash, store, Tier::Flash, (hash, bytes), None);
                reclaim.counts.spilled += u64::from(is_taken);
                reclaim.counts.dropped += u64::from(!is_taken);
            }
        }
        below.clear();
    }

    /// Takes an item out whose place is known; a later process does not find it either.
    fn remove(&mut self, store: &mut Store, hash: u64, ItemAt { tier, place }: ItemAt) {
        store.remove_lower(hash, tier, place);
        if let (Tier::Flash, Some(flash)) = (tier, &mut self.flash) {
            flash.forget(place);
        }
    }

    /// Whether anything is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.reclaim.is_busy()
            || self.far.as_ref().is_some_and(Log::is_busy)
            || self.flash.as_ref().is_some_and(Log::is_busy)
    }

    /// Whether there is something to do without anything coming.
    pub(super) fn has_at_hand(&self) -> bool {
        self.reclaim.is_walking()
            || self.far.as_ref().is_some_and(Log::has_at_hand)
            || self.flash.as_ref().is_some_and(Log::has_at_hand)
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let far = self.far.iter().flat_map(|far| far.medium().descriptors());
        far.chain(self.flash.iter().map(|flash| flash.medium().bell()))
    }

    const fn answers(&mut self, tier: Tier) -> &mut Answers {
        if matches!(tier, Tier::Flash) { &mut self.from_flash } else { &mut self.from_far }
    }

    /// Takes who has waited for too long.
    fn take_late(&mut self, now: Instant) -> Vec<(u64, Waiting)> {
        let is_late = |_: &u64, it: &mut Waiting| now - *it.since.get_or_insert(now) > PATIENCE;
        self.waiting.extract_if(is_late).collect()
    }
}

/// Whether a request reads and changes nothing.
const fn is_plain(request: &ParkedRequest) -> bool {
    match request.what {
        Parked::GetKey(read) => read.flags.touch.is_none(),
        Parked::Part { .. } => true,
        Parked::Request | Parked::Light { .. } => false,
    }
}

impl Worker {
    /// Whether a request on this key has to wait for a lower tier. One that `replaces` whatever there is waits
    /// only for others that wait for the key.
    #[inline]
    pub(super) fn is_below(&self, HashedKey { key, hash }: HashedKey<'_>, replaces: bool) -> bool {
        let Some(lower) = &self.lower else { return false };
        if replaces {
            return lower.waiting.contains_key(&hash);
        }
        if self.shard.store.lower_items() == 0 && lower.waiting.is_empty() {
            return false;
        }
        lower.waiting.contains_key(&hash)
            || !self.shard.store.is_in_memory(key, hash)
                && self.shard.store.lower_entry(hash, |_| true).is_some()
    }

    /// Has a request wait. The caller has found that the key is below.
    pub(super) fn park(
        &mut self,
        HashedKey { key, hash }: HashedKey<'_>,
        origin: Origin,
        what: Parked,
        bytes: &[u8],
    ) {
        let Some(lower) = &mut self.lower else { return };
        let waiting = lower.waiting.entry(hash).or_insert_with(|| Waiting {
            key: key.to_vec(),
            reading: None,
            tried: Vec::new(),
            requests: Vec::new(),
            since: None,
        });
        waiting.requests.push(ParkedRequest { origin, what, bytes: bytes.to_vec() });
        if waiting.requests.len() == 1
            && let Some(entry) = self.shard.store.lower_entry(hash, |_| true)
        {
            waiting.reading = Some(entry.item_at());
            lower.read(entry.item_at(), hash);
        }
    }

    /// Gives what had to leave memory to the lower tiers. To be done before the next request is looked at.
    #[inline]
    pub(super) fn settle_victims(&mut self) {
        if self.shard.store.has_outbox() {
            self.demote_victims();
        }
    }

    fn demote_victims(&mut self) {
        let Some(lower) = &mut self.lower else { return };
        let store = &mut self.shard.store;
        let Some(outbox) = store.take_outbox() else { return };
        if let Some(flash) = &mut lower.flash {
            outbox.forgotten().iter().for_each(|&place| flash.forget(place));
        }
        for (hash, bytes) in outbox.iter() {
            let Some(key) = record::key_of(bytes) else { continue };
            // Stored anew in the meantime: the old one must not come back.
            if !store.is_in_memory(key, hash) {
                lower.take(store, hash, bytes);
            }
        }
        lower.take_fallen(store);
        store.return_outbox(outbox);
    }

    /// Whether the lower tiers have something under way.
    pub(super) fn lower_is_busy(&self) -> bool {
        self.lower.as_ref().is_some_and(Lower::is_busy)
    }

    /// Takes what lower tiers have answered. `now` is given when it is time to look at deadlines.
    pub(super) fn poll_lower(&mut self, now: Option<Instant>) {
        self.note_client(None);
        let Some(lower) = &mut self.lower else { return };
        let store = &mut self.shard.store;
        let mut outcomes = [(Tier::Far, None), (Tier::Flash, None)];
        if let Some(flash) = &mut lower.flash {
            flash.poll(now, &mut StoreJudge { store, tier: Tier::Flash, below: None });
            outcomes[1].1 = Some(flash.take_outcomes());
        }
        if let Some(far) = &mut lower.far {
            lower.below.has_flash = lower.flash.is_some();
            let below = Some(&mut lower.below);
            far.poll(now, &mut StoreJudge { store, tier: Tier::Far, below });
            outcomes[0].1 = Some(far.take_outcomes());
        }
        lower.take_fallen(store);
        if let Some(far) = &mut lower.far {
            let is_backed_up = lower.flash.as_ref().is_some_and(Log::is_backed_up);
            lower.reclaim.go_on(far, store, is_backed_up, now);
        }
        let late = now.map(|now| lower.take_late(now)).unwrap_or_default();
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
            match (tier, &mut self.lower) {
                (Tier::Far, Some(Lower { far: Some(far), .. })) => far.return_outcomes(outcomes),
                (_, Some(Lower { flash: Some(flash), .. })) => flash.return_outcomes(outcomes),
                _ => {}
            }
        }
        for (hash, waiting) in late {
            self.execute_late(hash, waiting, &mut own);
        }
        if !own.is_empty() {
            self.deliver(&own);
        }
        self.watch_lower(now.is_some());
    }

    /// Notes on flash what a later process must know of the store.
    pub(super) fn keep_promises(&mut self) {
        if let Some(Lower { flash: Some(flash), .. }) = &mut self.lower {
            let store = &self.shard.store;
            flash.medium_mut().promise(store.last_cas(), store.flushes(), store.now_s());
        }
    }

    /// Brings what is on its way to flash there; whether the device has answered all.
    pub(super) fn close_lower(&mut self) -> bool {
        self.keep_promises();
        let store = &mut self.shard.store;
        match &mut self.lower {
            Some(Lower { flash: Some(log), .. }) => {
                flash::close(log, &mut StoreJudge { store, tier: Tier::Flash, below: None })
            }
            _ => true,
        }
    }

    /// Has epoll watch the ways to the blades. They change when a blade is connected to again.
    fn watch_lower(&mut self, anew: bool) {
        let Some(lower) = &mut self.lower else { return };
        if anew {
            lower.watched.clear();
        }
        let mut watched = std::mem::take(&mut lower.watched);
        for descriptor in lower.descriptors() {
            let number = descriptor.as_raw_fd();
            if !watched.contains(&number) {
                let data = epoll::EventData::new_u64(super::worker::TOKEN_LOWER);
                // Watched already is as good.
                let _ = epoll::add(&self.epoll, descriptor, data, epoll::EventFlags::IN);
                watched.push(number);
            }
        }
        lower.watched = watched;
    }

    /// Goes on with the requests that waited for one item.
    fn take_read(
        &mut self,
        hash: u64,
        at: ItemAt,
        found: Option<Record<'_>>,
        own: &mut Batch<Answer>,
    ) {
        let Some(lower) = &mut self.lower else { return };
        // Who asked for what an earlier read brings was answered long ago, and it may be out of date.
        let is_asked = |it: &Waiting| it.reading == Some(at);
        if !lower.waiting.get(&hash).is_some_and(is_asked) {
            return;
        }
        let Some(mut waiting) = lower.waiting.remove(&hash) else { return };
        match found {
            Some(record) if record.hash == hash && record.item.key() == waiting.key => {
                self.take_record(at, &record, waiting, own);
                return;
            }
            // Another key with the same tag.
            Some(_) => waiting.tried.push(at),
            None => lower.remove(&mut self.shard.store, hash, at),
        }
        let next = self.shard.store.lower_entry(hash, |at| !waiting.tried.contains(&at));
        match (next, &mut self.lower) {
            (Some(entry), Some(lower)) if !self.shard.store.is_in_memory(&waiting.key, hash) => {
                waiting.reading = Some(entry.item_at());
                lower.read(entry.item_at(), hash);
                lower.waiting.insert(hash, waiting);
            }
            _ => self.execute_parked(HashedKey { key: &waiting.key, hash }, waiting.requests, own),
        }
    }

    /// The item has come: answers from it, or brings it back first.
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
            // Overwritten or deleted since: who asked before that gets what was there then.
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
            if let Some(lower) = &mut self.lower {
                lower.answers(at.tier).served += 1;
            }
        } else if hits_before.is_some() {
            if self.shard.store.promote(record).is_err() {
                self.remove_below(hash, at);
            }
            self.settle_victims();
            if let Some(lower) = &mut self.lower {
                lower.answers(at.tier).promoted += 1;
            }
        }
        if requests.is_empty() {
            return;
        }
        // The item may be below again, at another place.
        if self.is_below(hashed, false) {
            for it in requests {
                self.park(hashed, it.origin, it.what, &it.bytes);
            }
            return;
        }
        self.execute_parked(hashed, requests, own);
    }

    /// Answers a plain read with what came.
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
                if let Some(lower) = &mut self.lower {
                    lower.gatherings.take(gathering, index, Some(item));
                }
                self.answer_gathering(gathering, own);
            }
            Parked::Request | Parked::Light { .. } => {
                debug_assert!(false, "only plain reads are answered so");
            }
        }
    }

    fn remove_below(&mut self, hash: u64, at: ItemAt) {
        if let Some(lower) = &mut self.lower {
            lower.remove(&mut self.shard.store, hash, at);
        }
    }

    /// Answers requests that have waited for too long as if the item were not there. What they change must not be
    /// undone by an item that comes later, so only plain reads leave it where it is.
    fn execute_late(&mut self, hash: u64, waiting: Waiting, own: &mut Batch<Answer>) {
        if let Some(lower) = &mut self.lower {
            lower.late += waiting.requests.len() as u64;
        }
        if !waiting.requests.iter().all(is_plain) {
            self.shard.store.forget_lower(hash);
            self.settle_victims();
        }
        self.execute_parked(HashedKey { key: &waiting.key, hash }, waiting.requests, own);
    }

    /// Answers requests by what memory has now.
    fn execute_parked(
        &mut self,
        key: HashedKey<'_>,
        requests: Vec<ParkedRequest>,
        own: &mut Batch<Answer>,
    ) {
        for request in requests {
            if let Parked::Part { gathering, index } = request.what {
                self.execute_part(key, (gathering, index), own);
                continue;
            }
            self.reply(request.origin, own, |worker, out| match request.what {
                Parked::GetKey(read) => get_key(&mut worker.shard, key, read, out),
                Parked::Request => worker.answer_forwarded(&request.bytes, out),
                Parked::Light { checked } => worker.answer_passed_on(&request.bytes, checked, out),
                Parked::Part { .. } => {}
            });
            self.settle_victims();
        }
    }

    pub(super) fn reply(
        &mut self,
        Origin { thread, address }: Origin,
        own: &mut Batch<Answer>,
        write: impl FnOnce(&mut Self, &mut Vec<u8>),
    ) {
        if thread == self.number {
            own.push(address, Answer::Bytes, |out| write(self, out));
            return;
        }
        let mut answers = std::mem::take(&mut self.answers[thread]);
        answers.push(address, Answer::Bytes, |out| write(self, out));
        self.answers[thread] = answers;
    }
}
