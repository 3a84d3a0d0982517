//! Superpages of which only some pages have memory, and which of them are given out: what flash and
//! packing have in common. Each has a place of its own in one mapping of small pages, and comes
//! back when its last user drops it.

use super::room::Room;
use super::{Keep, Placed, offset_bytes, to_usize};
use crate::sys::{Mapping, Slice};
use farpool_kernel::lock;
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, SUPERPAGE_BYTES, exactly};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long a superpage that is asked for is waited for, if all have been given out and somebody
/// has one that was freed still in his hands, as its last requests to flash or a piece that is
/// being packed: longer than those take, and a moment for the thread's other clients. Then the
/// blade is full.
const FREED_WAIT: Duration = Duration::from_millis(50);

/// A superpage whose pages come and go.
pub(super) trait Paged: std::fmt::Debug + Send + Sync + 'static {
    /// Pages of the range that take memory if they are written to.
    fn count_absent(&self, range: Range<u32>) -> u32;
    /// Makes pages ready to be written to, and pins them. Returns how many have memory that had
    /// none.
    fn write(&self, range: Range<u32>) -> u32;
    /// Ends what has pinned pages.
    fn unpin(&self, range: &Range<u32>);
    /// Where its pages lie in memory.
    fn slice(&self, range: &Range<u32>) -> Slice;
}

/// Keeps pages in memory.
#[derive(Debug)]
struct Pin<T: Paged> {
    superpage: Arc<T>,
    range: Range<u32>,
}

impl<T: Paged> Drop for Pin<T> {
    fn drop(&mut self) {
        self.superpage.unpin(&self.range);
    }
}

/// What keeps pages that were pinned as they are, until it is dropped.
pub(super) fn pin<T: Paged>(superpage: &Arc<T>, range: &Range<u32>) -> Keep {
    Arc::new(Pin { superpage: Arc::clone(superpage), range: range.clone() })
}

/// Pages of a superpage that somebody wants to read or write.
pub(super) type Wanted<T> = (Arc<T>, Range<u32>);

/// Pages to be written to. They are in `slices`, and stay where they are as long as `keeps` live,
/// unless there is no memory for them now (see [`Room::take_or_wait`]).
///
/// # Errors
/// That of `refuses`, if there is no memory.
pub(super) fn write<T: Paged>(
    wanted: &[Wanted<T>],
    (room, thread): (&Room, usize),
    refuses: impl Fn() -> io::Result<()>,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let absent = |(superpage, range): &Wanted<T>| u64::from(superpage.count_absent(range.clone()));
    let expected: u64 = wanted.iter().map(absent).sum();
    if !room.take_or_wait(expected, thread, refuses)? {
        return Ok(Placed::Away);
    }
    let mut taken = 0;
    for (superpage, range) in wanted {
        taken += u64::from(superpage.write(range.clone()));
        slices.push(superpage.slice(range));
        keeps.push(pin(superpage, range));
    }
    // Pages may have come or gone meanwhile.
    if taken > expected {
        room.add(taken - expected);
    } else {
        room.give_back(expected - taken);
    }
    Ok(Placed::Here)
}

/// All superpages of a store, by number.
#[derive(Debug)]
pub(super) struct Given<T> {
    mapping: Mapping,
    numbers: Mutex<Numbers<T>>,
    freed: Condvar,
}

#[derive(Debug)]
struct Numbers<T> {
    given: Vec<Weak<T>>,
    free: Vec<u32>,
}

impl<T> Given<T> {
    /// # Errors
    /// The system's.
    pub(super) fn new(superpages: u32) -> io::Result<Given<T>> {
        let given = (0..superpages).map(|_| Weak::new()).collect();
        let free = (0..superpages).rev().collect();
        Ok(Given {
            mapping: Mapping::of_small_pages(to_usize(offset_bytes(superpages)))?,
            numbers: Mutex::new(Numbers { given, free }),
            freed: Condvar::new(),
        })
    }

    /// Gives out a superpage, which `make` makes of its number, and which is zero.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`]: all are given out.
    pub(super) fn take(&self, make: impl FnOnce(u32) -> T) -> io::Result<Arc<T>> {
        let numbers = lock(&self.numbers);
        let is_empty = |numbers: &mut Numbers<T>| numbers.free.is_empty();
        let waited = self.freed.wait_timeout_while(numbers, FREED_WAIT, is_empty);
        let (mut numbers, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let number = numbers.free.pop().ok_or(io::ErrorKind::StorageFull)?;
        let superpage = Arc::new(make(number));
        numbers.given[number as usize] = Arc::downgrade(&superpage);
        Ok(superpage)
    }

    /// Takes a superpage back: its last user drops it. Its memory is given back. False if the
    /// kernel refuses that: it is not given out again, as whoever had it next would see what is
    /// there.
    pub(super) fn take_back(&self, number: u32) -> bool {
        if let Err(error) = self.drop_pages(number, &(0..PAGES_PER_SUPERPAGE)) {
            tracing::error!(%error, "a superpage's memory cannot be given back; it is lent no more");
            return false;
        }
        lock(&self.numbers).free.push(number);
        self.freed.notify_one();
        true
    }

    /// The superpage of this number, if it is given out.
    pub(super) fn get(&self, number: u32) -> Option<Arc<T>> {
        lock(&self.numbers).given[number as usize].upgrade()
    }

    /// Superpages that there are.
    pub(super) fn count(&self) -> u32 {
        exactly(self.mapping.bytes() as u64 / SUPERPAGE_BYTES)
    }

    /// Where pages of a superpage lie in memory.
    pub(super) fn slice(&self, number: u32, range: &Range<u32>) -> Slice {
        self.mapping.slice(to_usize(page_offset_bytes(number, range.start)), bytes_of(range))
    }

    /// Gives the memory of pages back, which read as zero then. Returns how many they are.
    ///
    /// # Errors
    /// The system's. What they had may still be there.
    pub(super) fn drop_pages(&self, number: u32, range: &Range<u32>) -> io::Result<u64> {
        let offset = to_usize(page_offset_bytes(number, range.start));
        self.mapping.drop_content(offset, bytes_of(range))?;
        Ok(u64::from(range.end - range.start))
    }
}

/// Where a page lies among all.
pub(super) fn page_offset_bytes(number: u32, page: u32) -> u64 {
    offset_bytes(number) + u64::from(page) * PAGE_BYTES as u64
}

fn bytes_of(range: &Range<u32>) -> usize {
    to_usize(u64::from(range.end - range.start)) * PAGE_BYTES
}
