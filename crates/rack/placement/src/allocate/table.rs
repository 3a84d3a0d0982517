//! From a hash to a slot: open addressing with linear probing, eight entries a cache line.
//!
//! An entry holds half of its hash beside its slot. So a lookup touches one line of the table and
//! the record itself, and neither growth nor removal reads any other record: a removal moves the
//! entries behind it forward, which leaves no tombstones to sweep out.
//!
//! Rejected: `hashbrown` with slots as entries. Its control bytes are a second line, and under
//! steady insertion and removal it rehashes everything each time its tombstones fill it, which
//! reads all records in random order.
//!
//! Invariant: between an entry's home, its hash modulo the size, and its place no entry is free.

const FREE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u32,
    slot: u32,
}

/// The table. Equal hashes are told apart by the caller.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    /// Its length is a power of two, or zero.
    entries: Vec<Entry>,
    count: usize,
}

impl Table {
    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }

    fn home(&self, hash: u32) -> usize {
        hash as usize & (self.entries.len() - 1)
    }

    fn place(&self, hash: u32, is_it: impl Fn(u32) -> bool) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at];
            if entry.slot == FREE {
                return None;
            }
            if entry.hash == hash && is_it(entry.slot) {
                return Some(at);
            }
            at = self.next(at);
        }
    }

    /// Returns the slot under `hash` for which `is_it` is true.
    pub(super) fn find(&self, hash: u32, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        self.place(hash, is_it).map(|at| self.entries[at].slot)
    }

    /// Adds a slot that is not in the table.
    pub(super) fn insert(&mut self, hash: u32, slot: u32) {
        assert_ne!(slot, FREE, "fewer than 2^32 - 1 slots");
        // Half full at most: longer runs of entries would cost more lines.
        if self.entries.len() < 2 * (self.count + 1) {
            self.grow();
        }
        self.put(Entry { hash, slot });
        self.count += 1;
    }

    fn put(&mut self, entry: Entry) {
        let mut at = self.home(entry.hash);
        while self.entries[at].slot != FREE {
            at = self.next(at);
        }
        self.entries[at] = entry;
    }

    fn grow(&mut self) {
        let larger = vec![Entry { hash: 0, slot: FREE }; (2 * self.entries.len()).max(16)];
        let old = std::mem::replace(&mut self.entries, larger);
        old.into_iter().filter(|entry| entry.slot != FREE).for_each(|entry| self.put(entry));
    }

    /// Removes the slot under `hash` for which `is_it` is true, and returns it.
    pub(super) fn remove(&mut self, hash: u32, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut hole = self.place(hash, is_it)?;
        let slot = self.entries[hole].slot;
        let mut at = self.next(hole);
        while self.entries[at].slot != FREE {
            // An entry with its home behind the hole must stay behind it.
            let mask = self.entries.len() - 1;
            let from_home = at.wrapping_sub(self.home(self.entries[at].hash)) & mask;
            let from_hole = at.wrapping_sub(hole) & mask;
            if from_home >= from_hole {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.entries[hole].slot = FREE;
        self.count -= 1;
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few hashes, at both ends of a table of 16, so that runs meet, wrap round and hold equal
        /// hashes, and enough entries to make it grow.
        #[test]
        fn it_finds_what_was_put_in_and_nothing_else(
            steps in proptest::collection::vec((0..12_u32, any::<bool>()), 1..200),
        ) {
            let hash = |slot: u32| [0, 1, 14, 15, 31][slot as usize % 5];
            let (mut table, mut plain) = (Table::default(), BTreeMap::new());
            for (slot, add) in steps {
                let found = table.find(hash(slot), |it| it == slot);
                prop_assert_eq!(found, plain.get(&slot).copied());
                match (add, found) {
                    (true, None) => {
                        table.insert(hash(slot), slot);
                        plain.insert(slot, slot);
                    }
                    (true, Some(_)) => {}
                    (false, _) => {
                        let removed = table.remove(hash(slot), |it| it == slot);
                        prop_assert_eq!(removed, plain.remove(&slot));
                    }
                }
                for slot in 0..12 {
                    let found = table.find(hash(slot), |it| it == slot);
                    prop_assert_eq!(found, plain.get(&slot).copied());
                }
            }
            prop_assert_eq!(table.count, plain.len());
        }
    }
}
