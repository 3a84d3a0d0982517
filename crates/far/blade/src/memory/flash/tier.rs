//! Superpages whose cold pages are on flash: what the blade's threads do with them. They never wait
//! for flash or for memory: they are woken when it is worth another try.
//!
//! Locks: a superpage's `residence` is held for bookkeeping, for the copy of a page that arrived,
//! and while memory is given back; `without_room` and `superpages` for a moment. Never two of them.

use super::counters::{FlashCounters, FlashStat};
use super::fetch::Fetcher;
use super::file::FlashFile;
use super::residence::{Found, OnWay, PIECE_PAGES, Residence};
use crate::memory::room::Room;
use crate::memory::{Keep, Placed, offset_bytes, to_usize};
use crate::sys::{Mapping, Slice};
use farpool_kernel::{LogRate, lock};
use farpool_seal::{PageVersion, SealKey};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES, exactly};
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a superpage that is asked for is waited for, if all have been given out and the last
/// requests to flash of one that was freed are under way: longer than flash takes, and a moment for
/// the thread's other clients. Then the blade is full.
const FREED_WAIT: Duration = Duration::from_millis(50);
/// Memory for the hot pages of all superpages, and the place of each superpage on flash.
#[derive(Debug)]
pub(in crate::memory) struct Tier {
    mapping: Mapping,
    pub(in crate::memory) room: Room,
    superpages: Mutex<Superpages>,
    freed: Condvar,
    pub(super) flash: FlashFile,
    pub(super) counters: FlashCounters,
    /// The last write to flash failed: nothing that needs room is let in.
    pub(super) is_failing: AtomicBool,
    pub(super) is_ending: AtomicBool,
    pub(super) log: LogRate,
    pub(super) started: Instant,
}

#[derive(Debug)]
struct Superpages {
    given: Vec<Weak<TieredSuperpage>>,
    free: Vec<u32>,
}

/// Neighbouring pages whose bytes are on their way.
#[derive(Debug)]
pub(super) struct OnRing {
    pub(super) superpage: Arc<TieredSuperpage>,
    pub(super) pages: Vec<OnWay>,
}

/// One superpage. When its last user drops it, its memory is given back, and what is on flash
/// cannot be read any more: its key is gone.
#[derive(Debug)]
pub(in crate::memory) struct TieredSuperpage {
    tier: Arc<Tier>,
    number: u32,
    key: SealKey,
    residence: Mutex<Residence>,
}

/// Keeps pages in memory.
#[derive(Debug)]
struct Pin {
    superpage: Arc<TieredSuperpage>,
    range: Range<u32>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        lock(&self.superpage.residence).unpin(&self.range);
    }
}

impl Tier {
    pub(super) fn new(flash: FlashFile, room: Room, superpages: u32) -> io::Result<Tier> {
        let given = (0..superpages).map(|_| Weak::new()).collect();
        let free = (0..superpages).rev().collect();
        Ok(Tier {
            mapping: Mapping::of_small_pages(to_usize(offset_bytes(superpages)))?,
            room,
            superpages: Mutex::new(Superpages { given, free }),
            freed: Condvar::new(),
            flash,
            counters: FlashCounters::default(),
            is_failing: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            log: LogRate::default(),
            started: Instant::now(),
        })
    }

    /// Takes a superpage, which is zero.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`]: all are taken. The system's: flash takes no writes, or there
    /// are no random numbers for a key.
    pub(in crate::memory) fn take(self: &Arc<Self>) -> io::Result<Arc<TieredSuperpage>> {
        if self.is_failing.load(Ordering::Acquire) {
            return Err(flash_error());
        }
        let key = SealKey::fresh().map_err(io::Error::other)?;
        let superpages = lock(&self.superpages);
        let is_empty = |superpages: &mut Superpages| superpages.free.is_empty();
        let waited = self.freed.wait_timeout_while(superpages, FREED_WAIT, is_empty);
        let (mut superpages, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        let number = superpages.free.pop().ok_or(io::ErrorKind::StorageFull)?;
        let residence = Mutex::default();
        let superpage =
            Arc::new(TieredSuperpage { tier: Arc::clone(self), number, key, residence });
        superpages.given[number as usize] = Arc::downgrade(&superpage);
        Ok(superpage)
    }

    /// The superpage of this number, if it is given out.
    pub(super) fn superpage(&self, number: u32) -> Option<Arc<TieredSuperpage>> {
        lock(&self.superpages).given[number as usize].upgrade()
    }

    /// Superpages that there are.
    pub(super) fn count(&self) -> u32 {
        exactly(self.mapping.bytes() as u64 / SUPERPAGE_BYTES)
    }

    pub(in crate::memory) fn stat(&self) -> FlashStat {
        self.counters.stat(self.room.taken_bytes())
    }

    /// Ends the engine.
    pub(in crate::memory) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.room.ring();
    }

    /// Says that clients are told that pages are lost.
    pub(super) fn say_failed(&self, pages: u64, was_read: bool) {
        if self.log.may_write(self.started.elapsed()) {
            let why = if was_read { "flash returned other bytes" } else { "flash cannot be read" };
            tracing::error!(pages, "{why}: who asks for these pages is told that they are lost");
        }
    }

    /// Takes memory for pages that are to be read from flash; if there is none, the thread is woken
    /// when there may be.
    pub(super) fn take_room_to_read(&self, pages: u64, thread: usize) -> bool {
        let has_room = self.room.take_to_read(pages)
            || self.room.wait(thread, || self.room.take_to_read(pages));
        self.room.sweep_if_short();
        has_room
    }

    /// Takes memory for pages that are to be written to.
    fn take_room(&self, pages: u64, thread: usize) -> io::Result<bool> {
        let mut has_room = self.room.take_to_write(pages);
        if !has_room {
            if self.is_failing.load(Ordering::Acquire) {
                return Err(flash_error());
            }
            has_room = self.room.wait(thread, || self.room.take_to_write(pages));
        }
        self.room.sweep_if_short();
        Ok(has_room)
    }
}

impl TieredSuperpage {
    pub(super) fn key(&self) -> &SealKey {
        &self.key
    }

    pub(super) fn residence(&self) -> std::sync::MutexGuard<'_, Residence> {
        lock(&self.residence)
    }

    /// Where its pages lie in memory.
    pub(super) fn slice(&self, range: &Range<u32>) -> Slice {
        let pages = to_usize(u64::from(range.end - range.start));
        let offset = offset_bytes(self.number) + u64::from(range.start) * PAGE_BYTES as u64;
        self.tier.mapping.slice(to_usize(offset), pages * PAGE_BYTES)
    }

    /// Where a page lies on flash, and among all memory.
    pub(super) fn offset_bytes(&self, page: u32) -> u64 {
        offset_bytes(self.number) + u64::from(page) * PAGE_BYTES as u64
    }

    /// Gives the memory of pages back, which their residence has let go; it must be locked until
    /// then. Returns how many they are, which the caller gives back to the room.
    ///
    /// # Errors
    /// The system's. What they had may still be there.
    pub(super) fn drop_memory(&self, runs: &[Range<u32>]) -> io::Result<u64> {
        let mut pages = 0;
        for run in runs {
            let offset = self.offset_bytes(run.start);
            let count = u64::from(run.end - run.start);
            self.tier.mapping.drop_content(to_usize(offset), to_usize(count) * PAGE_BYTES)?;
            pages += count;
        }
        Ok(pages)
    }

    /// Bytes that it has in memory.
    pub(in crate::memory) fn backed_bytes(&self) -> u64 {
        u64::from(self.residence().count_in_memory()) * PAGE_BYTES as u64
    }

    /// Drops the content of pages.
    ///
    /// # Errors
    /// The system's.
    pub(in crate::memory) fn discard(&self, range: Range<u32>) -> io::Result<()> {
        let mut residence = self.residence();
        let dropped = residence.discard(range);
        let pages = self.drop_memory(&dropped)?;
        drop(residence);
        self.tier.room.give_back(pages);
        Ok(())
    }
}

impl Drop for TieredSuperpage {
    fn drop(&mut self) {
        let pages = self.residence().count_in_memory();
        let all = self
            .tier
            .mapping
            .drop_content(to_usize(offset_bytes(self.number)), to_usize(SUPERPAGE_BYTES));
        if let Err(error) = all {
            // Whoever had it next would see what is there.
            tracing::error!(%error, "a superpage's memory cannot be given back; it is lent no more");
            return;
        }
        self.tier.room.give_back(u64::from(pages));
        lock(&self.tier.superpages).free.push(self.number);
        self.tier.freed.notify_one();
    }
}

/// Pages of a superpage that somebody wants to read or write.
pub(in crate::memory) type Wanted = (Arc<TieredSuperpage>, Range<u32>);

/// Pages to be sent. They are in `slices`, and stay where they are as long as `keeps` live, unless
/// some are away; then the thread is woken when they are worth another try.
///
/// # Errors
/// Flash does not return what was written.
pub(in crate::memory) fn read(
    wanted: &[Wanted],
    fetcher: &mut Fetcher,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let (mut pins, mut is_away, mut has_failed) = (Vec::new(), false, false);
    for (superpage, range) in wanted {
        let found = superpage.residence().read(range.clone(), fetcher.thread());
        match found {
            Found::Here => {
                let pin = Pin { superpage: Arc::clone(superpage), range: range.clone() };
                pins.push(Arc::new(pin) as Keep);
            }
            Found::Away(pages) => {
                is_away = true;
                if !pages.is_empty() && !fetcher.fetch(superpage, &pages) {
                    break;
                }
            }
            Found::Failed => has_failed = true,
        }
    }
    fetcher.submit();
    if has_failed {
        return Err(flash_error());
    }
    if is_away {
        return Ok(Placed::Away);
    }
    slices.extend(wanted.iter().map(|(superpage, range)| superpage.slice(range)));
    keeps.append(&mut pins);
    Ok(Placed::Here)
}

/// Pages to be written to, as [`read`]; they are away if there is no memory for them now.
///
/// # Errors
/// There is no memory for them, and flash takes no writes.
pub(in crate::memory) fn write(
    wanted: &[Wanted],
    thread: usize,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let Some((first, _)) = wanted.first() else { return Ok(Placed::Here) };
    let tier = &first.tier;
    let absent =
        |(superpage, range): &Wanted| u64::from(superpage.residence().count_absent(range.clone()));
    let expected: u64 = wanted.iter().map(absent).sum();
    if !tier.take_room(expected, thread)? {
        return Ok(Placed::Away);
    }
    let mut taken = 0;
    for (superpage, range) in wanted {
        taken += u64::from(superpage.residence().write(range.clone()));
        slices.push(superpage.slice(range));
        let pin = Pin { superpage: Arc::clone(superpage), range: range.clone() };
        keeps.push(Arc::new(pin) as Keep);
    }
    // Pages may have come or gone meanwhile.
    if taken > expected {
        tier.room.add(taken - expected);
    } else {
        tier.room.give_back(expected - taken);
    }
    Ok(Placed::Here)
}

/// What a client is told where flash fails.
fn flash_error() -> io::Error {
    Errno::IO.into()
}

/// Splits pages into runs of neighbours, each at most as long as a piece.
pub(super) fn neighbours(pages: &[OnWay]) -> impl Iterator<Item = &[OnWay]> {
    pages
        .chunk_by(|one, next| one.page + 1 == next.page)
        .flat_map(|run| run.chunks(PIECE_PAGES as usize))
}

/// The page at an index of what was read or is to be written.
pub(super) fn page_of(bytes: &mut [u8], index: usize) -> Option<&mut [u8; PAGE_BYTES]> {
    bytes[index * PAGE_BYTES..].first_chunk_mut()
}

/// What a page's seal is bound to, besides its superpage's key.
pub(super) fn version_of(it: &OnWay) -> PageVersion {
    PageVersion { page: it.page, version: u64::from(it.version) }
}
