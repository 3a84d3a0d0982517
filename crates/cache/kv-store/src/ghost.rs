//! The keys that left the small queue unread: one that comes back soon goes straight to the main
//! queue.
//!
//! 16-bit fingerprints in rows of one cache line, each row first in, first out. Each row forgets by
//! itself, so the whole remembers about as many keys as it has places. About one miss in two
//! thousand is mistaken for a known key, which costs nothing but a place in the main queue.

use farpool_units::exactly;

/// Fingerprints of one row; with the row's hand they fill 64 bytes.
const ROW_KEYS: usize = 31;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Row {
    hand: u16,
    keys: [u16; ROW_KEYS],
}

const _: () = assert!(size_of::<Row>() == 64);

/// Remembers hashes of keys for a while.
#[derive(Debug, Default)]
pub struct Ghost {
    rows: Vec<Row>,
}

impl Ghost {
    /// Makes room for about `keys` keys and forgets the present ones.
    pub fn resize(&mut self, keys: usize) {
        self.rows = vec![Row { hand: 0, keys: [0; ROW_KEYS] }; keys.div_ceil(ROW_KEYS)];
    }

    /// The number of places for keys.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.rows.len() * ROW_KEYS
    }

    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.rows.len() * size_of::<Row>()
    }

    fn place(&self, hash: u64) -> Option<(usize, u16)> {
        // Bits other than those that choose shard and bucket are not needed: rows are wide.
        let row = (u128::from(hash.rotate_left(24)) * self.rows.len() as u128) >> 64;
        let key = exactly::<u16, _>(hash & 0xffff).max(1);
        (!self.rows.is_empty()).then_some((usize::try_from(row).ok()?, key))
    }

    /// Remembers a key.
    pub fn insert(&mut self, hash: u64) {
        if let Some((row, key)) = self.place(hash) {
            let row = &mut self.rows[row];
            row.keys[usize::from(row.hand) % ROW_KEYS] = key;
            row.hand = (row.hand + 1) % 31;
        }
    }

    /// Whether the key is remembered. If so, forgets it.
    pub fn take(&mut self, hash: u64) -> bool {
        let Some((row, key)) = self.place(hash) else { return false };
        let found = self.rows[row].keys.iter_mut().find(|known| **known == key);
        found.map(|known| *known = 0).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_remembers_what_came_lately_and_takes_little_for_known() {
        let hash = |number: u64| farpool_keyvault::owner::hash_key(&number.to_le_bytes());
        let mut ghost = Ghost::default();
        assert!(!ghost.take(hash(1)));
        ghost.resize(31_000);
        (0..200_000).for_each(|number| ghost.insert(hash(number)));
        let lately = (185_000..200_000).filter(|&number| ghost.take(hash(number))).count();
        assert!(lately > 14_500, "{lately} of 15,000");
        let mistaken = (1_000_000..1_100_000).filter(|&number| ghost.take(hash(number))).count();
        assert!(mistaken < 150, "{mistaken} of 100,000");
        assert!(!ghost.take(hash(199_999)), "a key is taken once");
    }
}
