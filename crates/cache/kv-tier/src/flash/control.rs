//! One shard's book-keeping: promises, the table of zones, forget bits and their sums, in any
//! memory.
//!
//! It may end at any instruction (kill -9), and its successor must not find again what was
//! forgotten: the bit is written before its sum, so that a sum may lack the last bit, and a bit
//! that is gone is always noticed.

use std::ops::{DerefMut, Range};
use std::sync::atomic::{Ordering, compiler_fence};

use farpool_units::PAGE_BYTES;

use super::layout::{
    self, FORGET_BYTES, FORGET_SUM_BYTES, Geometry, Promises, TABLE_ENTRY_BYTES, TableEntry,
};

/// More uses of zones than a device lives for: beyond them, no seal of an earlier use comes again.
const SEQUENCE_GAP: u32 = 1 << 24;

/// A shard's book-keeping.
#[derive(Debug)]
pub struct Control<M> {
    memory: M,
    geometry: Geometry,
    format_id: u64,
}

impl<M: DerefMut<Target = [u8]>> Control<M> {
    /// `memory` is as long as the geometry has it.
    pub fn new(memory: M, geometry: Geometry, format_id: u64) -> Self {
        assert!(memory.len() == geometry.control_bytes(), "the memory is the shard's part");
        Self { memory, geometry, format_id }
    }

    /// All of it.
    #[must_use]
    pub fn memory(&self) -> &[u8] {
        &self.memory
    }

    /// The recorded state; None when neither copy is whole.
    #[must_use]
    pub fn promises(&self) -> Option<Promises> {
        Promises::newest(&self.memory[..2 * Promises::BYTES])
    }

    pub fn write_promises(&mut self, promises: &Promises) {
        self.memory[promises.slot()..][..Promises::BYTES].copy_from_slice(&promises.encode());
    }

    /// Drops everything: without the record of what was forgotten, flushed or deleted items could
    /// come back. Numbers continue where no earlier use of a zone has been, as far as can be known:
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

    /// Frees the zones whose table entries are damaged. Returns how many. Their numbers are not
    /// known: later ones begin where no use has been.
    pub fn free_damaged(&mut self) -> u64 {
        let zones = 0..self.geometry.zones_per_shard;
        let (mut damaged, mut last) = (Vec::new(), 0);
        for zone in zones {
            match self.table_entry(zone) {
                Some(entry) => last = last.max(entry.sequence),
                // Zeros: it never was used.
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
        // Behind the last entry are the sums.
        assert!(zone < self.geometry.zones_per_shard, "the zone is one of the shard's");
        let at = PAGE_BYTES + zone * TABLE_ENTRY_BYTES;
        at..at + TABLE_ENTRY_BYTES
    }

    /// None when the zone never was used, or the entry is damaged.
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
        // Behind the last sum are the bits.
        assert!(zone < self.geometry.zones_per_shard, "the zone is one of the shard's");
        let at = self.geometry.sums_at() + zone * FORGET_SUM_BYTES;
        self.memory[at..at + FORGET_SUM_BYTES].copy_from_slice(&sum.to_le_bytes());
    }

    /// A use of a zone begins: nothing in it is forgotten.
    pub fn open_zone(&mut self, zone: usize, sequence: u32) {
        self.write_table(zone, TableEntry::free(sequence));
        let bits = self.forget_bits(zone);
        self.memory[bits].fill(0);
        self.write_forget_sum(zone, empty_sum(self.seal_of(zone, sequence)));
    }

    /// The record that begins here is not to be found again.
    pub fn forget(&mut self, zone: usize, unit: usize) {
        let bits = self.forget_bits(zone);
        let Some(byte) = self.memory[bits].get_mut(unit / 8) else { return };
        let bit = 1 << (unit % 8);
        if *byte & bit != 0 {
            return;
        }
        *byte |= bit;
        // A sum without its bit would be a bit that is gone.
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

    /// Whether no forget bit of this use of a zone is gone. The sum has each of them but for the
    /// last at most, whose writer may have been killed: then it gets it.
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

/// The sum of a zone's use in which nothing is forgotten: pages of zeros do not pass for it.
fn empty_sum(seal: u32) -> u64 {
    mixed(u64::from(seal) | 1 << 63)
}

/// What a forgotten unit adds to the sum: a number of its own.
fn weight(unit: usize) -> u64 {
    mixed(unit as u64)
}

/// SplitMix64's step: another number for each number.
const fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
