//! One shard's bookkeeping, in any memory: promises, the table of zones, forget bits and their
//! sums.
//!
//! The process may end at any instruction (kill -9), and its successor must not find forgotten
//! records again: a bit is written before its sum, so a sum may lack the last bit, but a bit that
//! is lost is always noticed.

use std::ops::{DerefMut, Range};
use std::sync::atomic::{Ordering, compiler_fence};

use farpool_units::PAGE_BYTES;

use super::layout::{
    self, FORGET_BYTES, FORGET_SUM_BYTES, Geometry, Promises, TABLE_ENTRY_BYTES, TableEntry,
};

/// More uses of zones than a device can survive: with numbers beyond them, no seal of an earlier
/// use recurs.
const SEQUENCE_GAP: u32 = 1 << 24;

/// A shard's bookkeeping.
#[derive(Debug)]
pub struct Control<M> {
    memory: M,
    geometry: Geometry,
    format_id: u64,
}

impl<M: DerefMut<Target = [u8]>> Control<M> {
    /// `memory` must have the length that the geometry demands.
    pub fn new(memory: M, geometry: Geometry, format_id: u64) -> Self {
        assert!(memory.len() == geometry.control_bytes(), "the memory is the shard's part");
        Self { memory, geometry, format_id }
    }

    /// The whole memory.
    #[must_use]
    pub fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// The promises. None if neither copy is intact.
    #[must_use]
    pub fn promises(&self) -> Option<Promises> {
        Promises::newest(&self.memory[..2 * Promises::BYTES])
    }

    pub fn write_promises(&mut self, promises: &Promises) {
        self.memory[promises.slot()..][..Promises::BYTES].copy_from_slice(&promises.encode());
    }

    /// Drops everything: without the promises and forget bits, flushed or deleted items could come
    /// back. Sequence numbers continue above all earlier uses of zones, as far as these are known:
    /// `by_chance` is random.
    pub fn begin_empty(&mut self, by_chance: u32) {
        let known = (0..self.geometry.zones_per_shard).filter_map(|zone| self.table_entry(zone));
        let last = known.map(|entry| entry.sequence).max().unwrap_or(0);
        let sequence = last.saturating_add(SEQUENCE_GAP).max(by_chance >> 1);
        if self.promises().is_none() {
            self.memory[..PAGE_BYTES].fill(0);
            self.write_promises(&Promises::default());
        }
        self.memory[PAGE_BYTES..].fill(0);
        self.write_table(0, TableEntry::free(sequence));
    }

    /// Frees the zones whose table entries are damaged. Returns how many there were. Their sequence
    /// numbers are not known: later ones begin above any earlier use.
    pub fn free_damaged(&mut self) -> u64 {
        let zones = 0..self.geometry.zones_per_shard;
        let (mut damaged, mut last) = (Vec::new(), 0);
        for zone in zones {
            match self.table_entry(zone) {
                Some(entry) => last = last.max(entry.sequence),
                // All zeros: the zone was never used.
                None if self.memory[self.table_at(zone)].iter().all(|&byte| byte == 0) => {}
                None => damaged.push(zone),
            }
        }
        for &zone in &damaged {
            self.write_table(zone, TableEntry::free(last.saturating_add(SEQUENCE_GAP)));
        }
        damaged.len() as u64
    }

    fn table_at(&self, zone: usize) -> Range<usize> {
        // The sums follow the last entry.
        assert!(zone < self.geometry.zones_per_shard, "the zone is one of the shard's");
        let at = PAGE_BYTES + zone * TABLE_ENTRY_BYTES;
        at..at + TABLE_ENTRY_BYTES
    }

    /// The entry of a zone. None if the zone was never used, or the entry is damaged.
    #[must_use]
    pub fn table_entry(&self, zone: usize) -> Option<TableEntry> {
        TableEntry::decode(&self.memory[self.table_at(zone)])
    }

    pub fn write_table(&mut self, zone: usize, entry: TableEntry) {
        let at = self.table_at(zone);
        self.memory[at].copy_from_slice(&entry.encode());
    }

    #[must_use]
    pub fn seal_of(&self, zone: usize, sequence: u32) -> u32 {
        layout::zone_seal(self.format_id, zone, sequence)
    }

    fn forget_bits(&self, zone: usize) -> Range<usize> {
        assert!(zone < self.geometry.zones_per_shard, "the zone is one of the shard's");
        let at = self.geometry.forget_bits_at() + zone * FORGET_BYTES;
        at..at + FORGET_BYTES
    }

    fn forget_sum(&self, zone: usize) -> u64 {
        layout::long(&self.memory, self.geometry.sums_at() + zone * FORGET_SUM_BYTES)
    }

    fn write_forget_sum(&mut self, zone: usize, sum: u64) {
        // The bits follow the last sum.
        assert!(zone < self.geometry.zones_per_shard, "the zone is one of the shard's");
        let at = self.geometry.sums_at() + zone * FORGET_SUM_BYTES;
        self.memory[at..at + FORGET_SUM_BYTES].copy_from_slice(&sum.to_le_bytes());
    }

    /// Begins a use of a zone, with no record forgotten.
    pub fn open_zone(&mut self, zone: usize, sequence: u32) {
        self.write_table(zone, TableEntry::free(sequence));
        let bits = self.forget_bits(zone);
        self.memory[bits].fill(0);
        self.write_forget_sum(zone, empty_sum(self.seal_of(zone, sequence)));
    }

    /// Marks the record that begins here as never to be found again.
    pub fn forget(&mut self, zone: usize, unit: usize) {
        let bits = self.forget_bits(zone);
        let Some(byte) = self.memory[bits].get_mut(unit / 8) else { return };
        let bit = 1 << (unit % 8);
        if *byte & bit != 0 {
            return;
        }
        *byte |= bit;
        // A sum without its bit would look like a lost bit.
        compiler_fence(Ordering::SeqCst);
        let sum = self.forget_sum(zone).wrapping_add(weight(unit));
        self.write_forget_sum(zone, sum);
    }

    #[must_use]
    pub fn is_forgotten(&self, zone: usize, unit: u32) -> bool {
        let unit = unit as usize;
        let byte = self.memory[self.forget_bits(zone)].get(unit / 8);
        byte.is_none_or(|byte| byte & (1 << (unit % 8)) != 0)
    }

    /// Whether no forget bit of this use of a zone is lost. The sum may lack only the last bit, if
    /// its writer was killed: the bit is then added to it.
    pub fn are_forgets_whole(&mut self, zone: usize, sequence: u32) -> bool {
        let bits = &self.memory[self.forget_bits(zone)];
        let first = empty_sum(self.seal_of(zone, sequence));
        let seen = forgotten(bits).fold(first, |sum, unit| sum.wrapping_add(weight(unit)));
        let lacks = seen.wrapping_sub(self.forget_sum(zone));
        let is_whole = lacks == 0 || forgotten(bits).any(|unit| weight(unit) == lacks);
        if is_whole {
            self.write_forget_sum(zone, seen);
        }
        is_whole
    }
}

/// The units whose bits are set.
fn forgotten(bits: &[u8]) -> impl Iterator<Item = usize> {
    let set = bits.iter().enumerate().filter(|(_, byte)| **byte != 0);
    set.flat_map(|(at, &byte)| {
        (0..8).filter(move |bit| byte & (1 << bit) != 0).map(move |bit| at * 8 + bit)
    })
}

/// The sum of a use of a zone in which nothing is forgotten: pages of zeros do not match it.
fn empty_sum(seal: u32) -> u64 {
    mixed(u64::from(seal) | 1 << 63)
}

/// What a forgotten unit adds to the sum: a different number for each unit.
fn weight(unit: usize) -> u64 {
    mixed(unit as u64)
}

/// SplitMix64's step: a different number for each number.
const fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
