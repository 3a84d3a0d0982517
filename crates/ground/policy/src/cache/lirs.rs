//! LIRS (Jiang, Zhang, SIGMETRICS 2002): pages whose last two references are close together keep
//! most of the memory; the others pass through a small queue, and are remembered after they leave.

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity, percent};
use crate::list::IndexList;
use crate::ranking::Ranking;
use crate::tables::{Renumber, resize_exactly, table_bytes};

/// The percentage of the capacity for pages that are not (yet) referenced closely.
pub const LIRS_FAR_PERCENT: u32 = 1;

/// The most pages in the stack, in multiples of the capacity: this bounds the pages remembered.
pub const LIRS_STACK_TIMES: u32 = 2;

/// Resident, referenced far apart (the paper's resident HIR), in the order of eviction.
const FAR: u8 = 1;
/// Not resident, remembered in the stack (non-resident HIR).
const GHOST: u8 = 2;

/// Evicts the page that has been longest in the queue of those referenced far apart. 18 bytes per
/// page.
#[derive(Debug)]
pub struct Lirs {
    /// Ordered by the last reference; the oldest is always a near page, as others below it are
    /// dropped.
    stack: IndexList,
    queues: Lists<2>,
    near: Vec<bool>,
    near_len: u32,
    near_max: u32,
    far_max: u32,
    stack_max: u64,
    capacity: u32,
    /// In a [`Ranking`]: pages were evicted. From then on the capacity varies a little, and unknown
    /// pages must not become near each time it rises.
    has_evicted: bool,
}

impl Lirs {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let mut cache = Self {
            stack: IndexList::new(page_count),
            queues: Lists::new(page_count),
            near: vec![false; page_count],
            near_len: 0,
            near_max: 0,
            far_max: 0,
            stack_max: 0,
            capacity: 0,
            has_evicted: false,
        };
        cache.divide(capacity);
        cache
    }

    /// Creates a cache for [`Ranking`]: the queue of far pages takes all that the near ones leave.
    pub(crate) fn open() -> Self {
        Self { far_max: u32::MAX, ..Self::new(0, 1) }
    }

    fn divide(&mut self, capacity: u32) {
        self.far_max = percent(capacity, LIRS_FAR_PERCENT);
        self.near_max = capacity - self.far_max;
        self.stack_max = u64::from(capacity) * u64::from(LIRS_STACK_TIMES);
        self.capacity = capacity;
    }

    fn divide_open(&mut self, capacity: u32) {
        self.divide(capacity);
        self.far_max = u32::MAX;
    }

    /// Drops pages from the bottom of the stack until a near one is there.
    fn prune(&mut self, forgot: &mut impl FnMut(u32)) {
        while self.stack.len() > 1
            && let Some(bottom) = self.stack.back()
            && !self.near[bottom as usize]
        {
            self.stack.remove(bottom);
            if self.queues.place(bottom) == GHOST {
                self.queues.remove(bottom);
                forgot(bottom);
            }
        }
    }

    /// Makes the near page with the oldest last reference a far one.
    fn demote(&mut self, left: &mut impl FnMut(u32), forgot: &mut impl FnMut(u32)) {
        self.prune(forgot);
        let Some(page) = self.stack.back().filter(|page| self.near[*page as usize]) else {
            return;
        };
        self.stack.remove(page);
        self.near[page as usize] = false;
        self.near_len -= 1;
        self.make_far_room(left);
        self.queues.push_front(FAR, page);
        self.prune(forgot);
    }

    fn make_far_room(&mut self, left: &mut impl FnMut(u32)) {
        while self.queues.len(FAR) >= self.far_max {
            let Some(victim) = self.queues.pop_back(FAR) else { return };
            if self.stack.contains(victim) {
                self.queues.push_front(GHOST, victim);
            }
            left(victim);
        }
    }

    fn make_near_room(&mut self, left: &mut impl FnMut(u32)) {
        if self.near_len == self.near_max {
            self.demote(left, &mut |_| {});
        }
    }

    /// In a [`Ranking`], makes surplus near pages far ones; none leaves.
    fn cool(&mut self, near_max: u32, forgotten: &mut Vec<u32>) {
        while self.near_len > near_max {
            let near_len = self.near_len;
            let mut forgot = |ghost| forgotten.push(ghost);
            self.demote(&mut |_| unreachable!("the queue of far pages takes all"), &mut forgot);
            assert_eq!(self.near_len, near_len - 1, "every near page is in the stack");
        }
    }

    fn become_near(&mut self, page: u32) {
        self.near[page as usize] = true;
        self.near_len += 1;
    }

    fn hit_far(&mut self, page: u32, left: &mut impl FnMut(u32)) {
        let was_in_stack = self.stack.move_to_front(page);
        if was_in_stack && self.near_max > 0 {
            self.queues.remove(page);
            self.make_near_room(left);
            self.become_near(page);
            return;
        }
        self.queues.move_to_front(FAR, page);
        if !was_in_stack {
            // Its next reference may show it to be near: room is made for that now, unless this
            // very page would have to leave for it.
            if self.far_max > 1 {
                self.make_near_room(left);
            }
            self.stack.push_front(page);
        }
    }

    fn miss(&mut self, page: u32, left: &mut impl FnMut(u32)) {
        if self.queues.place(page) == GHOST && self.near_max > 0 {
            self.stack.move_to_front(page);
            self.make_near_room(left);
            self.queues.remove(page);
            self.become_near(page);
            return;
        }
        self.queues.remove(page);
        self.stack.remove(page);
        if self.near_len < self.near_max {
            self.become_near(page);
        } else {
            self.make_far_room(left);
            self.queues.push_front(FAR, page);
        }
        self.stack.push_front(page);
    }

    fn limit_stack(&mut self, forgot: &mut impl FnMut(u32)) {
        while u64::from(self.stack.len()) > self.stack_max
            && let Some(forgotten) = self.queues.pop_back(GHOST)
        {
            self.stack.remove(forgotten);
            forgot(forgotten);
        }
    }
}

impl PageCache for Lirs {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        let hit = PageCache::contains(self, page);
        if self.near[page as usize] {
            self.stack.move_to_front(page);
            self.prune(&mut |_| {});
        } else if hit {
            self.hit_far(page, left);
        } else {
            self.miss(page, left);
        }
        self.limit_stack(&mut |_| {});
        hit
    }

    fn contains(&self, page: u32) -> bool {
        self.near[page as usize] || self.queues.place(page) == FAR
    }

    fn remove(&mut self, page: u32) -> bool {
        let was = PageCache::contains(self, page);
        let near = std::mem::take(&mut self.near[page as usize]);
        self.near_len -= u32::from(near);
        if self.queues.remove(page) != NOWHERE || near {
            self.stack.remove(page);
            self.prune(&mut |_| {});
        }
        was
    }

    fn len(&self) -> usize {
        (self.near_len + self.queues.len(FAR)) as usize
    }
}

impl Renumber for Lirs {
    fn rename(&mut self, from: u32, to: u32) {
        self.stack.rename(from, to);
        self.queues.rename(from, to);
        self.near[to as usize] = std::mem::take(&mut self.near[from as usize]);
    }

    fn resize(&mut self, page_count: usize) {
        self.stack.resize(page_count);
        self.queues.resize(page_count);
        resize_exactly(&mut self.near, page_count, false);
    }

    fn bytes(&self) -> usize {
        self.stack.bytes() + self.queues.bytes() + table_bytes(&self.near)
    }
}

impl Ranking for Lirs {
    fn insert(&mut self, page: u32, _: u32, forgotten: &mut Vec<u32>) {
        let len = self.near_len + self.queues.len(FAR) + 1;
        if len > self.capacity {
            self.divide_open(len);
        }
        let came_back = self.queues.remove(page) == GHOST;
        self.stack.remove(page);
        self.stack.push_front(page);
        let may_be_near = came_back || !self.has_evicted && self.near_len < self.near_max;
        if may_be_near && self.near_max > 0 {
            self.cool(self.near_max - 1, forgotten);
            self.become_near(page);
        } else {
            self.queues.push_front(FAR, page);
        }
        self.limit_stack(&mut |ghost| forgotten.push(ghost));
    }

    fn touch(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool {
        if self.near[page as usize] {
            self.stack.move_to_front(page);
            self.prune(&mut |ghost| forgotten.push(ghost));
            return true;
        }
        if self.queues.place(page) != FAR {
            return false;
        }
        let was_in_stack = self.stack.move_to_front(page);
        if was_in_stack && self.near_max > 0 {
            self.queues.remove(page);
            self.cool(self.near_max - 1, forgotten);
            self.become_near(page);
        } else {
            self.queues.move_to_front(FAR, page);
            if !was_in_stack {
                self.stack.push_front(page);
            }
        }
        self.limit_stack(&mut |ghost| forgotten.push(ghost));
        true
    }

    fn victim(&mut self, forgotten: &mut Vec<u32>) -> Option<u32> {
        self.has_evicted = true;
        if self.queues.len(FAR) == 0 {
            self.cool(self.near_len.saturating_sub(1), forgotten);
        }
        let victim = self.queues.pop_back(FAR)?;
        if self.stack.contains(victim) {
            self.queues.push_front(GHOST, victim);
        }
        Some(victim)
    }

    fn remove(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool {
        let was = PageCache::contains(self, page);
        let near = std::mem::take(&mut self.near[page as usize]);
        self.near_len -= u32::from(near);
        if self.queues.remove(page) != NOWHERE || near {
            self.stack.remove(page);
            self.prune(&mut |ghost| forgotten.push(ghost));
        }
        was
    }

    fn set_capacity(&mut self, capacity: u32, forgotten: &mut Vec<u32>) {
        let len = self.near_len + self.queues.len(FAR);
        self.divide_open(capacity.max(len).max(1));
        self.cool(self.near_max, forgotten);
        self.limit_stack(&mut |ghost| forgotten.push(ghost));
    }

    fn contains(&self, page: u32) -> bool {
        PageCache::contains(self, page)
    }

    fn knows(&self, page: u32) -> bool {
        self.near[page as usize] || self.queues.place(page) != NOWHERE
    }

    fn len(&self) -> usize {
        PageCache::len(self)
    }
}
