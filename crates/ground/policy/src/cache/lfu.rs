//! Least frequently used, in constant time: pages of the same count share a queue, and the queues
//! are themselves chained in the order of their counts (Shah, Mitra, Matani, 2010).

use farpool_units::exactly;

use super::{PageCache, checked_capacity};
use crate::list::{Ends, Links};
use crate::ranking::Ranking;
use crate::tables::{Renumber, resize_exactly, table_bytes};

/// Pages with the same number of references since they entered.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    references: u64,
    pages: Ends,
    rarer: u32,
    commoner: u32,
}

/// The bucket before the rarest and after the commonest; it never holds a page.
const HEAD: u32 = 0;

/// Evicts the page with the fewest references since it entered; among equals the one that has had
/// its count for the longest. Counts are dropped when a page leaves. 12 bytes per page, and 32 for
/// each distinct count.
#[derive(Debug)]
pub struct Lfu {
    links: Links,
    /// Bucket of each page; `HEAD` = not resident.
    bucket_of: Vec<u32>,
    buckets: Vec<Bucket>,
    /// Buckets without pages, chained by `commoner`.
    spare: u32,
    len: u32,
    capacity: u32,
}

impl Lfu {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        Self {
            links: Links::new(page_count),
            bucket_of: vec![HEAD; page_count],
            buckets: vec![Bucket::default()],
            spare: HEAD,
            len: 0,
            capacity: checked_capacity(capacity),
        }
    }

    fn bucket(&mut self, at: u32) -> &mut Bucket {
        &mut self.buckets[at as usize]
    }

    /// Returns the bucket for `references` right after `rarer`, creating it if needed.
    fn bucket_after(&mut self, rarer: u32, references: u64) -> u32 {
        let next = self.bucket(rarer).commoner;
        if next != HEAD && self.bucket(next).references == references {
            return next;
        }
        let made = self.take_spare();
        *self.bucket(made) = Bucket { references, pages: Ends::default(), rarer, commoner: next };
        self.bucket(rarer).commoner = made;
        self.bucket(next).rarer = made;
        made
    }

    fn take_spare(&mut self) -> u32 {
        if self.spare == HEAD {
            self.buckets.push(Bucket::default());
            // There are fewer buckets than pages, which number below 2^32.
            return exactly(self.buckets.len() - 1);
        }
        let spare = self.spare;
        self.spare = self.bucket(spare).commoner;
        spare
    }

    fn enter(&mut self, page: u32, at: u32) {
        self.links.push_front(&mut self.buckets[at as usize].pages, page);
        self.bucket_of[page as usize] = at;
    }

    fn drop_if_empty(&mut self, at: u32) {
        let Bucket { pages, rarer, commoner, .. } = *self.bucket(at);
        if pages.len() == 0 {
            self.bucket(rarer).commoner = commoner;
            self.bucket(commoner).rarer = rarer;
            self.bucket(at).commoner = self.spare;
            self.spare = at;
        }
    }

    fn take_out(&mut self, page: u32) {
        let at = std::mem::replace(&mut self.bucket_of[page as usize], HEAD);
        self.links.unlink(&mut self.buckets[at as usize].pages, page);
        self.drop_if_empty(at);
        self.len -= 1;
    }

    #[inline]
    fn reference(&mut self, page: u32) -> bool {
        let at = self.bucket_of[page as usize];
        if at != HEAD {
            let references = self.bucket(at).references + 1;
            let next = self.bucket_after(at, references);
            self.links.unlink(&mut self.buckets[at as usize].pages, page);
            self.enter(page, next);
            self.drop_if_empty(at);
        }
        at != HEAD
    }

    fn evict(&mut self) -> Option<u32> {
        let rarest = self.bucket(HEAD).commoner;
        let victim = self.bucket(rarest).pages.back()?;
        self.take_out(victim);
        Some(victim)
    }

    fn take_in(&mut self, page: u32) {
        let first = self.bucket_after(HEAD, 1);
        self.enter(page, first);
        self.len += 1;
    }
}

impl PageCache for Lfu {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.reference(page) {
            return true;
        }
        if self.len == self.capacity
            && let Some(victim) = self.evict()
        {
            left(victim);
        }
        self.take_in(page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        self.bucket_of[page as usize] != HEAD
    }

    fn remove(&mut self, page: u32) -> bool {
        let was = PageCache::contains(self, page);
        if was {
            self.take_out(page);
        }
        was
    }

    fn len(&self) -> usize {
        self.len as usize
    }
}

impl Renumber for Lfu {
    fn rename(&mut self, from: u32, to: u32) {
        let at = std::mem::replace(&mut self.bucket_of[from as usize], HEAD);
        if at != HEAD {
            self.links.rename(&mut self.buckets[at as usize].pages, from, to);
            self.bucket_of[to as usize] = at;
        }
    }

    fn resize(&mut self, page_count: usize) {
        self.links.resize(page_count);
        resize_exactly(&mut self.bucket_of, page_count, HEAD);
    }

    fn bytes(&self) -> usize {
        self.links.bytes() + table_bytes(&self.bucket_of) + table_bytes(&self.buckets)
    }
}

impl Ranking for Lfu {
    fn insert(&mut self, page: u32, _: u32, _: &mut Vec<u32>) {
        self.take_in(page);
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        self.reference(page)
    }

    fn victim(&mut self, _: &mut Vec<u32>) -> Option<u32> {
        self.evict()
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        PageCache::remove(self, page)
    }

    fn set_capacity(&mut self, _: u32, _: &mut Vec<u32>) {}

    fn contains(&self, page: u32) -> bool {
        PageCache::contains(self, page)
    }

    fn knows(&self, page: u32) -> bool {
        PageCache::contains(self, page)
    }

    fn len(&self) -> usize {
        self.len as usize
    }
}
