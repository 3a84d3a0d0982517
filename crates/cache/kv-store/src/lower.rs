//! The store's view of the tiers below: entries of their items, without keys, and the items that
//! leave memory for them.
//!
//! Invariant: a key with an item in memory has no entry of a lower tier. So storing a new item
//! removes every lower entry that could be the key's; an entry of another key with the same tag
//! becomes a miss, never a wrong value.

use super::index::{Entry, EntryAt, IndexFull, ItemAt, Place, Tier};
use super::item::{ItemParts, ItemView, mark};
use super::{Found, Store, StoreError};
use crate::record::{self, Record};

/// How much of its memory a shard uses to point at items of lower tiers; beyond it, items that
/// leave memory are dropped.
const LOWER_INDEX_PERCENT_MAX: usize = 60;
/// The most that such an entry takes: 8 bytes in tables that are at least about 70 % full.
const LOWER_ENTRY_BYTES: usize = 12;

/// No tier keeps longer records: see the limits of the media.
const RECORD_BYTES_MAX: usize = (1 << 20) + (4 << 10);
/// The memory that an empty outbox keeps, so that a burst does not cost memory for ever.
const OUTBOX_KEPT_BYTES: usize = 1 << 20;

/// Items that had to leave memory, as records for a lower tier.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    victims: Vec<(u64, usize)>,
    forgotten: Vec<Place>,
}

impl Outbox {
    pub(super) fn push(&mut self, hash: u64, stored_as: u64, item: ItemView<'_>) {
        if item.bytes().len() > RECORD_BYTES_MAX {
            return;
        }
        record::push(&mut self.bytes, hash, stored_as, item.bytes());
        self.victims.push((hash, self.bytes.len()));
    }

    /// Adds a record as another tier held it.
    pub fn push_record(&mut self, record: &Record<'_>) {
        self.bytes.extend_from_slice(record.bytes);
        self.victims.push((record.hash, self.bytes.len()));
    }

    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.victims.is_empty() && self.forgotten.is_empty()
    }

    /// Places on flash that no entry points to any more, because a newer item was stored or the
    /// item was deleted. A later process must not find them either.
    #[must_use]
    pub fn forgotten(&self) -> &[Place] {
        &self.forgotten
    }

    /// Hash and record of each item, in the order in which they left.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let starts = std::iter::once(0).chain(self.victims.iter().map(|&(_, end)| end));
        self.victims.iter().zip(starts).map(|(&(hash, end), start)| (hash, &self.bytes[start..end]))
    }

    /// Empties the outbox, and keeps some memory for its next use.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(OUTBOX_KEPT_BYTES);
        self.victims.clear();
        self.forgotten.clear();
    }
}

impl Store {
    /// From now on keeps evicted items in the outbox.
    pub fn keep_victims(&mut self) {
        self.outbox = Some(Outbox::default());
    }

    #[inline]
    #[must_use]
    pub fn has_outbox(&self) -> bool {
        self.outbox.as_ref().is_some_and(|outbox| !outbox.is_empty())
    }

    /// Takes the items that left memory since the last call. Put back with [`Self::return_outbox`].
    pub fn take_outbox(&mut self) -> Option<Outbox> {
        self.outbox.take()
    }

    pub fn return_outbox(&mut self, mut outbox: Outbox) {
        outbox.clear();
        assert!(self.outbox.is_none(), "an outbox comes back to the store that it was taken from");
        self.outbox = Some(outbox);
    }

    /// Whether there are lower tiers.
    #[inline]
    #[must_use]
    pub const fn has_lower(&self) -> bool {
        self.outbox.is_some()
    }

    /// Whether memory has an item of this key, expired or not.
    #[inline]
    #[must_use]
    pub fn is_in_memory(&self, key: &[u8], hash: u64) -> bool {
        self.entry_of(key, hash).is_some()
    }

    /// The first lower-tier entry that may be the key's and that `accept` accepts.
    #[must_use]
    pub fn lower_entry(&self, hash: u64, mut accept: impl FnMut(ItemAt) -> bool) -> Option<Entry> {
        let found = self.index.find(hash, |it| it.tier() != Tier::Memory && accept(it.item_at()));
        found.map(|(_, entry)| entry)
    }

    fn lower_at(&self, hash: u64, tier: Tier, place: Place) -> Option<(EntryAt, Entry)> {
        self.index.find(hash, |it| it.tier() == tier && it.place() == place)
    }

    /// Whether the index, which is in memory, may point to more items of lower tiers.
    #[must_use]
    pub const fn has_room_for_lower(&self) -> bool {
        let most = self.settings.limit_bytes / 100 * LOWER_INDEX_PERCENT_MAX / LOWER_ENTRY_BYTES;
        self.lower_items < most
    }

    /// Adds an entry for an item of a lower tier. The caller knows that memory has no item of its
    /// key.
    pub fn insert_lower(
        &mut self,
        hash: u64,
        tier: Tier,
        place: Place,
        hits: u8,
    ) -> Result<(), IndexFull> {
        if !self.has_room_for_lower() {
            return Err(IndexFull);
        }
        self.index.insert(hash, Entry::new(tier, place, hits))?;
        self.lower_items += 1;
        self.flash_items += usize::from(tier == Tier::Flash);
        self.index_bytes = self.index.bytes();
        Ok(())
    }

    /// Removes the entry of an item in a lower tier. True if there was one.
    pub fn remove_lower(&mut self, hash: u64, tier: Tier, place: Place) -> bool {
        let Some((at, _)) = self.lower_at(hash, tier, place) else { return false };
        self.index.remove(at);
        self.lower_items -= 1;
        self.flash_items -= usize::from(tier == Tier::Flash);
        true
    }

    /// Counts a hit on an item of a lower tier. Returns its hits before this one, or None if it has
    /// no entry.
    pub fn hit_lower(&mut self, hash: u64, tier: Tier, place: Place) -> Option<u8> {
        let (at, entry) = self.lower_at(hash, tier, place)?;
        self.index.set(at, entry.hit());
        Some(entry.hits())
    }

    /// The hits of an item of a lower tier.
    #[must_use]
    pub fn lower_hits(&self, hash: u64, tier: Tier, place: Place) -> Option<u8> {
        self.lower_at(hash, tier, place).map(|(_, entry)| entry.hits())
    }

    /// Changes the place of an item within a lower tier, and resets its hits.
    pub fn move_lower(&mut self, hash: u64, tier: Tier, from: Place, to: Place) {
        if let Some((at, _)) = self.lower_at(hash, tier, from) {
            self.index.set(at, Entry::new(tier, to, 0));
        }
    }

    /// Removes the entries of far items whose places `is_gone` selects, in one part of the index.
    /// False if there is no such part: then all have been visited.
    pub fn forget_far_in(&mut self, part: usize, mut is_gone: impl FnMut(Place) -> bool) -> bool {
        let goes = |it: Entry| it.tier() == Tier::Far && is_gone(it.place());
        let Some(removed) = self.index.remove_in(part, goes) else { return false };
        self.lower_items -= removed;
        true
    }

    /// Shows the places of hit items in far memory, in one part of the index. False as for
    /// [`Self::forget_far_in`].
    pub fn see_hit_in_far(&self, part: usize, mut see: impl FnMut(Place)) -> bool {
        self.index.see_in(part, |it| {
            if it.tier() == Tier::Far && it.hits() > 0 {
                see(it.place());
            }
        })
    }

    /// Number of items in lower tiers.
    #[inline]
    #[must_use]
    pub const fn lower_items(&self) -> usize {
        self.lower_items
    }

    /// Whether a record is still valid: neither expired nor flushed.
    #[must_use]
    pub fn is_live(&self, record: &Record<'_>) -> bool {
        let expires_s = record.item.expires_s();
        (expires_s == 0 || expires_s > self.now_s) && record.stored_as > self.flushed_cas
    }

    /// How many of the items in lower tiers are on flash.
    #[must_use]
    pub const fn flash_items(&self) -> usize {
        self.flash_items
    }

    /// Stores a record in memory again, with its numbers and marks.
    pub fn promote(&mut self, record: &Record<'_>) -> Result<Found, StoreError> {
        let item = record.item;
        let parts = ItemParts {
            key: item.key(),
            value: [item.value(), b""],
            client_flags: item.client_flags(),
            expires_s: item.expires_s(),
            marks: item.header().marks & !mark::LAYOUT,
            wide_cas: item.wide_cas(),
        };
        self.put(&parts, record.hash, Some(record.stored_as))
    }

    /// Removes every lower entry that may be the key's, if there are lower entries at all.
    #[inline]
    pub fn forget_lower(&mut self, hash: u64) {
        if self.lower_items > 0 {
            self.drop_lower(hash);
        }
    }

    /// Removes every lower entry that may be the key's.
    pub(super) fn drop_lower(&mut self, hash: u64) {
        while let Some((at, entry)) = self.index.find(hash, |it| it.tier() != Tier::Memory) {
            self.index.remove(at);
            self.lower_items -= 1;
            self.flash_items -= usize::from(entry.tier() == Tier::Flash);
            if let (Tier::Flash, Some(outbox)) = (entry.tier(), &mut self.outbox) {
                outbox.forgotten.push(entry.place());
            }
        }
    }
}
