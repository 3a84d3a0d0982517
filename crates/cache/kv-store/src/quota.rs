//! Quotas: how much memory the items of a prefix may take together.
//!
//! A store that would exceed its quota makes room among the items of its own prefix: the oldest are
//! evicted, those read since get another round. Other items are not touched, and a quota guarantees
//! no memory: it is only a limit.
//!
//! Invariant: `used_bytes` of a quota is the sum of its items' footprints in memory.

use std::collections::{HashSet, VecDeque};

use farpool_units::exactly;

use super::index::{Entry, Place, Tier};
use super::key::HashedKey;
use super::{Found, Store, StoreError};

/// The most items that get another round before one is evicted whether it was read or not: this
/// bounds the work for one insertion.
const ROUNDS_MAX: usize = 32;
/// Hashes of items that are gone are cleaned up once there are more of them than items, plus this.
const STALE_MIN: usize = 64;

/// The use that one prefix makes of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaReport {
    pub prefix: Vec<u8>,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    pub items: u64,
    /// Items evicted because of it.
    pub evictions: u64,
}

#[derive(Debug)]
struct Quota {
    report: QuotaReport,
    /// Hashes of its keys, oldest first, including some whose items are gone.
    order: VecDeque<u64>,
}

/// All quotas of a shard, longer prefixes before shorter ones.
#[derive(Debug, Default)]
pub(super) struct Quotas(Vec<Quota>);

impl Quotas {
    /// The quota that applies to a key: that of the longest prefix.
    fn number_of(&self, key: &[u8]) -> Option<usize> {
        self.0.iter().position(|it| key.starts_with(&it.report.prefix))
    }

    /// Counts a new item of this key and size.
    #[inline]
    pub(super) fn born(&mut self, key: &[u8], footprint: usize) {
        if !self.0.is_empty()
            && let Some(number) = self.number_of(key)
        {
            let report = &mut self.0[number].report;
            report.used_bytes += footprint as u64;
            report.items += 1;
        }
    }

    /// Counts an item of this key and size as gone.
    #[inline]
    pub(super) fn died(&mut self, key: &[u8], footprint: usize) {
        if !self.0.is_empty()
            && let Some(number) = self.number_of(key)
        {
            let report = &mut self.0[number].report;
            assert!(
                report.items > 0 && report.used_bytes >= footprint as u64,
                "a quota counts each of its items"
            );
            report.used_bytes -= footprint as u64;
            report.items -= 1;
        }
    }
}

impl Store {
    /// Limits the memory of items by their prefixes, in this shard. Only for an empty store.
    pub fn set_quotas(&mut self, limits: impl IntoIterator<Item = (Vec<u8>, u64)>) {
        let quota = |(prefix, limit_bytes)| Quota {
            report: QuotaReport { prefix, limit_bytes, used_bytes: 0, items: 0, evictions: 0 },
            order: VecDeque::new(),
        };
        let mut quotas: Vec<Quota> = limits.into_iter().map(quota).collect();
        quotas.sort_by_key(|it| std::cmp::Reverse(it.report.prefix.len()));
        self.quotas = Quotas(quotas);
    }

    /// The use of the quotas, longest prefix first.
    #[must_use]
    pub fn quotas(&self) -> Vec<QuotaReport> {
        self.quotas.0.iter().map(|it| it.report.clone()).collect()
    }

    /// Makes room under the key's quota, if it has one, for an item of this size that replaces the
    /// key's item.
    #[inline]
    pub(super) fn make_quota_room(
        &mut self,
        key: &[u8],
        hash: u64,
        footprint: usize,
    ) -> Result<(), StoreError> {
        if self.quotas.0.is_empty() {
            return Ok(());
        }
        match self.quotas.number_of(key) {
            Some(number) => self.make_room_in(number, HashedKey { key, hash }, footprint as u64),
            None => Ok(()),
        }
    }

    fn make_room_in(
        &mut self,
        number: usize,
        HashedKey { key, hash }: HashedKey<'_>,
        footprint: u64,
    ) -> Result<(), StoreError> {
        let old = self.entry_of(key, hash).map(|(_, entry)| entry.place());
        let old_bytes =
            old.map_or(0, |place| self.arena.item(place).header().footprint_bytes() as u64);
        let limit_bytes = self.quotas.0[number].report.limit_bytes;
        if footprint > limit_bytes {
            return Err(StoreError::OutOfMemory);
        }
        // Every item once, and those that get another round a second time: then none is left to
        // evict.
        let mut looks_left = self.quotas.0[number].order.len() + ROUNDS_MAX + 1;
        let mut rounds = 0;
        while self.quotas.0[number].report.used_bytes - old_bytes + footprint > limit_bytes {
            looks_left = looks_left.saturating_sub(1);
            if !self.settings.evicts || looks_left == 0 {
                return Err(StoreError::OutOfMemory);
            }
            let oldest = self.quotas.0[number].order.pop_front();
            let oldest = oldest.ok_or(StoreError::OutOfMemory)?;
            if oldest == hash && old.is_some() {
                // The key's own item is replaced, which makes room by itself.
                self.quotas.0[number].order.push_back(oldest);
            } else {
                rounds += usize::from(self.let_go(number, oldest, rounds < ROUNDS_MAX));
            }
        }
        if old.is_none() {
            self.quotas.0[number].order.push_back(hash);
            self.forget_stale(number);
        }
        Ok(())
    }

    /// Evicts the item of this hash, if there is one. True if it was read and is kept for another
    /// round.
    fn let_go(&mut self, number: usize, hash: u64, may_go_on: bool) -> bool {
        let (quotas, arena, seed) = (&self.quotas, &self.arena, self.hash_seed);
        let is_ours = |place: Place| {
            let key = arena.item(place).key();
            seed.hash_of(key) == hash && quotas.number_of(key) == Some(number)
        };
        let found =
            self.index.find(hash, |entry| entry.tier() == Tier::Memory && is_ours(entry.place()));
        let Some((at, entry)) = found else { return false };
        let place = entry.place();
        if may_go_on && entry.hits() > 0 {
            self.index.set(at, Entry::new(Tier::Memory, place, entry.hits() - 1));
            self.quotas.0[number].order.push_back(hash);
            return true;
        }
        let header = self.arena.item(place).header();
        self.quotas.0[number].report.evictions += 1;
        self.leave(hash, place, header);
        self.remove(Found { at, place });
        false
    }

    /// Removes hashes that are duplicates or have no item, once there are too many.
    fn forget_stale(&mut self, number: usize) {
        let Quota { report, order } = &self.quotas.0[number];
        let items: usize = exactly(report.items);
        if order.len() <= items.saturating_mul(2).saturating_add(STALE_MIN) {
            return;
        }
        let order = std::mem::take(&mut self.quotas.0[number].order);
        let newest = order.back().copied();
        let mut seen = HashSet::new();
        let (index, arena, seed) = (&self.index, &self.arena, self.hash_seed);
        let is_there = |hash: u64| {
            let same = |place: Place| seed.hash_of(arena.item(place).key()) == hash;
            index.find(hash, |it| it.tier() == Tier::Memory && same(it.place())).is_some()
        };
        // The newest is the one being stored.
        let kept = order
            .into_iter()
            .filter(|&hash| (Some(hash) == newest || is_there(hash)) && seen.insert(hash))
            .collect();
        self.quotas.0[number].order = kept;
    }
}
