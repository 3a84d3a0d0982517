//! Requests on keys whose items are in a lower tier: they are parked while others are answered.
//!
//! Requests on one key stay in order: while its item is being read, later requests on the key queue
//! behind, and one read serves all. A plain first read is answered from the record; anything else,
//! including a second read, promotes the item and is then answered like any other request
//! ([`answers`]).

mod answers;
mod falling;
pub(crate) mod far;
pub(crate) mod flash;
mod waiting;

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use farpool_keyvault::message::Keys;
use rustix::event::epoll;

use self::falling::{Falling, StoreJudge, give};
use self::far::order::FarOrder;
use self::far::shard::Reclaim;
use self::waiting::{ParkedRequest, WaitingKeys};
use crate::keyvault::gather::{Gathering, GatheringId, Gatherings};
use crate::mail::mailbox::{GetKey, Origin};
use crate::me::TOKEN_LOWER;
use crate::watch::report::TierAnswers;
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::keyvault::{self, AnswerHead};
use farpool_kv_store::Store;
use farpool_kv_store::index::{ItemAt, Tier};
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::record;
use farpool_kv_tier::far::Far;
use farpool_kv_tier::flash::{self as flash_tier, Flash};
use farpool_kv_tier::log::{Log, Outcomes};

/// What a parked request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parked {
    /// One key of a `get`.
    GetKey(GetKey),
    /// Any other request: its bytes.
    Request,
    /// A request of the binary protocol: its bytes.
    Binary { is_plain_read: bool },
    /// A KeyVault frame.
    KeyVault { checked: bool },
    /// One key of a MULTIGET.
    Part { gathering: GatheringId, index: u16 },
}

/// Whether a MULTIGET has to wait.
pub(crate) enum Gathered {
    /// Memory has every item that exists.
    AllInMemory,
    /// It is answered when its last item has been read.
    Waits,
    /// Memory had so many items that the answer is full before the first key in a lower tier.
    Whole(Gathering),
}

/// The tiers below memory, and the requests that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Below {
    pub(crate) far: Option<Far>,
    pub(crate) flash: Option<Flash>,
    waiting: WaitingKeys,
    /// MULTIGETs with keys among those.
    pub(crate) gatherings: Gatherings,
    watched: Vec<RawFd>,
    /// Items that leave far memory.
    falling: Falling,
    /// Pieces of far memory that have to be given back, and what the index is to forget.
    pub(crate) reclaim: Reclaim,
    pub(crate) from_far: TierAnswers,
    pub(crate) from_flash: TierAnswers,
    /// Requests answered as misses because a tier took too long.
    pub(crate) late: u64,
}

impl Below {
    /// Begins to read an item, which will be among the tier's outcomes.
    fn read(&mut self, ItemAt { tier, place }: ItemAt, hash: u64) {
        match (tier, &mut self.far, &mut self.flash) {
            (Tier::Far, Some(far), _) => far.read(place, hash),
            (Tier::Flash, _, Some(flash)) => flash.read(place, hash),
            _ => {}
        }
    }

    /// Takes an item that left memory: into far memory if possible, else to flash.
    fn take(&mut self, store: &mut Store, hash: u64, bytes: &[u8]) {
        let Self { far, flash, falling, .. } = self;
        let in_far = far
            .as_mut()
            .is_some_and(|far| give(far, store, Tier::Far, (hash, bytes), Some(falling)));
        if !in_far && let Some(flash) = flash {
            give(flash, store, Tier::Flash, (hash, bytes), None);
        }
    }

    /// Gives flash the items that left far memory.
    fn take_fallen(&mut self, store: &mut Store) {
        let Self { flash, falling, reclaim, .. } = self;
        reclaim.counts.dropped += std::mem::take(&mut falling.dropped);
        if let Some(flash) = flash {
            for (hash, bytes) in falling.fallen.iter() {
                give(flash, store, Tier::Flash, (hash, bytes), None);
            }
            for (hash, bytes) in falling.emptied() {
                let is_taken = give(flash, store, Tier::Flash, (hash, bytes), None);
                reclaim.counts.spilled += u64::from(is_taken);
                reclaim.counts.dropped += u64::from(!is_taken);
            }
        }
        falling.clear();
    }

    /// Removes an item whose place is known, so that a later process does not find it either.
    fn remove(&mut self, store: &mut Store, hash: u64, ItemAt { tier, place }: ItemAt) {
        store.remove_lower(hash, tier, place);
        if let (Tier::Flash, Some(flash)) = (tier, &mut self.flash) {
            flash.forget(place);
        }
    }

    /// Whether any operation is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.reclaim.is_busy()
            || self.far.as_ref().is_some_and(Log::is_busy)
            || self.flash.as_ref().is_some_and(Log::is_busy)
    }

    /// Whether there is work to do without waiting for an event.
    pub(crate) fn has_at_hand(&self) -> bool {
        self.reclaim.is_walking()
            || self.far.as_ref().is_some_and(Log::has_at_hand)
            || self.flash.as_ref().is_some_and(Log::has_at_hand)
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let far = self.far.iter().flat_map(|far| far.medium().descriptors());
        far.chain(self.flash.iter().map(|flash| flash.medium().bell()))
    }

    const fn answers(&mut self, tier: Tier) -> &mut TierAnswers {
        if matches!(tier, Tier::Flash) { &mut self.from_flash } else { &mut self.from_far }
    }

    /// Whether a request on this key has to wait for a lower tier. A request that `replaces` the
    /// value whatever it is waits only behind others parked on the key.
    #[inline]
    pub(crate) fn holds(&self, store: &Store, key: HashedKey<'_>, replaces: bool) -> bool {
        if replaces {
            return self.waiting.contains(key);
        }
        if store.lower_items() == 0 && self.waiting.is_empty() {
            return false;
        }
        self.waiting.contains(key)
            || !store.is_in_memory(key.key, key.hash)
                && store.lower_entry(key.hash, |_| true).is_some()
    }

    /// Parks a request. The caller has found that the key is in a lower tier.
    pub(crate) fn park(
        &mut self,
        store: &Store,
        key: HashedKey<'_>,
        origin: Origin,
        what: Parked,
        bytes: &[u8],
    ) {
        let hash = key.hash;
        let waiting = self.waiting.get_or_insert(key);
        waiting.requests.push(ParkedRequest { origin, what, bytes: bytes.to_vec() });
        if waiting.requests.len() == 1
            && let Some(entry) = store.lower_entry(hash, |_| true)
        {
            waiting.reading = Some(entry.item_at());
            self.read(entry.item_at(), hash);
        }
    }

    /// Takes the items that had to leave memory.
    pub(crate) fn demote(&mut self, store: &mut Store) {
        let Some(outbox) = store.take_outbox() else { return };
        if let Some(flash) = &mut self.flash {
            outbox.forgotten().iter().for_each(|&place| flash.forget(place));
        }
        for (hash, bytes) in outbox.iter() {
            let Some(key) = record::key_of(bytes) else { continue };
            // Stored anew in the meantime: the old value must not come back.
            if !store.is_in_memory(key, hash) {
                self.take(store, hash, bytes);
            }
        }
        self.take_fallen(store);
        store.return_outbox(outbox);
    }

    /// Polls the tiers. Returns the outcomes of each tier's reads. `now` is given when deadlines
    /// are to be checked.
    fn poll(&mut self, store: &mut Store, now: Option<Instant>) -> [(Tier, Option<Outcomes>); 2] {
        let mut outcomes = [(Tier::Far, None), (Tier::Flash, None)];
        if let Some(flash) = &mut self.flash {
            flash.poll(now, &mut StoreJudge { store, tier: Tier::Flash, falling: None });
            outcomes[1].1 = Some(flash.take_outcomes());
        }
        if let Some(far) = &mut self.far {
            self.falling.has_flash = self.flash.is_some();
            let falling = Some(&mut self.falling);
            far.poll(now, &mut StoreJudge { store, tier: Tier::Far, falling });
            outcomes[0].1 = Some(far.take_outcomes());
        }
        self.take_fallen(store);
        if let Some(far) = &mut self.far {
            let is_backed_up = self.flash.as_ref().is_some_and(Log::is_backed_up);
            self.reclaim.go_on(far, store, is_backed_up, now);
        }
        outcomes
    }

    fn return_outcomes(&mut self, tier: Tier, outcomes: Outcomes) {
        match (tier, &mut self.far, &mut self.flash) {
            (Tier::Far, Some(far), _) => far.return_outcomes(outcomes),
            (_, _, Some(flash)) => flash.return_outcomes(outcomes),
            _ => {}
        }
    }

    /// Carries out an order of the keeper of far memory.
    pub(crate) fn obey(&mut self, order: FarOrder) {
        if let Some(far) = &mut self.far {
            self.reclaim.obey(far, order, self.flash.is_some());
        }
    }

    /// Notes on flash what a later process must know of the store.
    pub(crate) fn keep_promises(&mut self, store: &Store) {
        if let Some(flash) = &mut self.flash {
            flash.medium_mut().promise(store.last_cas(), store.flushes(), store.now_s());
        }
    }

    /// Completes pending writes to flash. True if the device has answered all of them.
    pub(crate) fn close(&mut self, store: &mut Store) -> bool {
        self.keep_promises(store);
        match &mut self.flash {
            Some(log) => {
                flash_tier::close(log, &mut StoreJudge { store, tier: Tier::Flash, falling: None })
            }
            None => true,
        }
    }

    /// Registers the blades' connections with epoll. They change when a blade reconnects.
    fn watch(&mut self, epoll: &OwnedFd, anew: bool) {
        if anew {
            self.watched.clear();
        }
        let mut watched = std::mem::take(&mut self.watched);
        for descriptor in self.descriptors() {
            let number = descriptor.as_raw_fd();
            if !watched.contains(&number) {
                let data = epoll::EventData::new_u64(TOKEN_LOWER);
                // It makes no difference if it is registered already.
                let _ = epoll::add(epoll, descriptor, data, epoll::EventFlags::IN);
                watched.push(number);
            }
        }
        self.watched = watched;
    }

    /// Begins to read all keys of a MULTIGET that are in a lower tier, at the same time, if there
    /// are any.
    pub(crate) fn gather(
        &mut self,
        shard: &mut Shard,
        keys: Keys<'_>,
        head: AnswerHead<'_>,
        origin: Origin,
    ) -> Gathered {
        let seed = shard.store.hash_seed();
        if !keys.iter().any(|key| self.holds(&shard.store, HashedKey::of(key, seed), false)) {
            return Gathered::AllInMemory;
        }
        let id = self.gatherings.begin(head, origin, usize::from(keys.count()));
        for (index, key) in (0u16..).zip(keys.iter()) {
            let key = HashedKey::of(key, seed);
            if !self.gatherings.wants(id, index) {
                break;
            }
            if self.holds(&shard.store, key, false) {
                let what = Parked::Part { gathering: id, index };
                self.park(&shard.store, key, origin, what, b"");
            } else {
                self.gather_from_memory(shard, key, (id, index));
            }
        }
        match self.gatherings.finished(id) {
            Some(gathering) => Gathered::Whole(gathering),
            None => Gathered::Waits,
        }
    }

    /// Reads one key of a waiting MULTIGET from memory.
    fn gather_from_memory(
        &mut self,
        shard: &mut Shard,
        key: HashedKey<'_>,
        (id, index): (GatheringId, u16),
    ) {
        let found = keyvault::read(shard, key.key, key.hash);
        let item = found.map(|found| keyvault::item_of(shard, found));
        self.gatherings.take(id, index, item);
    }
}
