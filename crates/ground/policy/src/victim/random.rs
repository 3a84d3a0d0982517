//! Random victims: almost no state, and no worst case.

use farpool_units::exactly;

use super::VictimPolicy;
use crate::Rng;
use crate::tables::{Renumber, resize_exactly, table_bytes};

/// Evicts any page with equal probability.
#[derive(Debug)]
pub struct Random {
    resident: Vec<u32>,
    /// Place of each page in `resident` plus one; 0 = not resident.
    place: Vec<u32>,
    rng: Rng,
}

impl Random {
    /// Creates a policy for pages `0..page_count`; the same seed gives the same victims.
    #[must_use]
    pub fn new(page_count: usize, seed: u64) -> Self {
        assert!(u32::try_from(page_count).is_ok_and(|n| n < u32::MAX), "pages number below 2^32-1");
        Self {
            resident: Vec::with_capacity(page_count),
            place: vec![0; page_count],
            rng: Rng::new(seed),
        }
    }

    fn count(&self) -> u32 {
        exactly(self.resident.len())
    }
}

impl VictimPolicy for Random {
    fn insert(&mut self, page: u32) {
        if self.place[page as usize] == 0 {
            self.resident.push(page);
            self.place[page as usize] = self.count();
        }
    }

    #[inline]
    fn touch(&mut self, page: u32) -> bool {
        self.place[page as usize] != 0
    }

    fn contains(&self, page: u32) -> bool {
        self.place[page as usize] != 0
    }

    fn remove(&mut self, page: u32) -> bool {
        let Some(place) = self.place[page as usize].checked_sub(1) else {
            return false;
        };
        self.place[page as usize] = 0;
        self.resident.swap_remove(place as usize);
        if let Some(moved) = self.resident.get(place as usize) {
            self.place[*moved as usize] = place + 1;
        }
        true
    }

    #[inline]
    fn victim(&mut self) -> Option<u32> {
        let at = self.rng.below(self.count());
        let page = *self.resident.get(at as usize)?;
        self.remove(page);
        Some(page)
    }

    fn len(&self) -> usize {
        self.resident.len()
    }
}

impl Renumber for Random {
    fn rename(&mut self, from: u32, to: u32) {
        let place = std::mem::take(&mut self.place[from as usize]);
        if let Some(at) = place.checked_sub(1) {
            self.resident[at as usize] = to;
            self.place[to as usize] = place;
        }
    }

    fn resize(&mut self, page_count: usize) {
        resize_exactly(&mut self.place, page_count, 0);
        self.resident.shrink_to(page_count);
        self.resident.reserve_exact(page_count - self.resident.len());
    }

    fn bytes(&self) -> usize {
        table_bytes(&self.place) + table_bytes(&self.resident)
    }
}
