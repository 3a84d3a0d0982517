//! Superpages whose cold pages are on flash: what the blade's threads do with them. They never wait
//! for flash or for memory: they are woken when it is worth another try.
//!
//! Locks: a superpage's `residence` is held for bookkeeping, for the copy of a page that arrived,
//! and while memory is given back. No other is taken inside it but those of [`Room`] and [`Given`].

use super::counters::{FlashCounters, FlashStat};
use super::fetch::Fetcher;
use super::file::FlashFile;
use super::residence::{Found, OnWay, PIECE_PAGES, Residence};
use crate::memory::given::{self, Given, Paged, Wanted, page_offset_bytes, pin};
use crate::memory::room::Room;
use crate::memory::{Keep, Placed};
use crate::sys::Slice;
use farpool_kernel::{LogRate, lock};
use farpool_seal::{PageVersion, SealKey};
use farpool_units::PAGE_BYTES;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Memory for the hot pages of all superpages, and the place of each superpage on flash.
#[derive(Debug)]
pub(in crate::memory) struct Tier {
    pub(super) superpages: Given<TieredSuperpage>,
    pub(in crate::memory) room: Room,
    pub(super) flash: FlashFile,
    pub(super) counters: FlashCounters,
    /// The last write to flash failed: nothing that needs room is let in.
    pub(super) is_failing: AtomicBool,
    pub(super) is_ending: AtomicBool,
    pub(super) log: LogRate,
    pub(super) started: Instant,
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

impl Tier {
    pub(super) fn new(flash: FlashFile, room: Room, superpages: u32) -> io::Result<Tier> {
        Ok(Tier {
            superpages: Given::new(superpages)?,
            room,
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
        let residence = Mutex::default();
        let tier = Arc::clone(self);
        self.superpages.take(|number| TieredSuperpage { tier, number, key, residence })
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
}

impl TieredSuperpage {
    pub(super) fn key(&self) -> &SealKey {
        &self.key
    }

    pub(super) fn residence(&self) -> std::sync::MutexGuard<'_, Residence> {
        lock(&self.residence)
    }

    /// Where a page lies on flash.
    pub(super) fn offset_bytes(&self, page: u32) -> u64 {
        page_offset_bytes(self.number, page)
    }

    /// Gives the memory of pages back, which their residence has let go; it must be locked until
    /// then. Returns how many they are, which the caller gives back to the room.
    ///
    /// # Errors
    /// The system's. What they had may still be there.
    pub(super) fn drop_memory(&self, runs: &[Range<u32>]) -> io::Result<u64> {
        runs.iter().map(|run| self.tier.superpages.drop_pages(self.number, run)).sum()
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

impl Paged for TieredSuperpage {
    fn count_absent(&self, range: Range<u32>) -> u32 {
        self.residence().count_absent(range)
    }

    fn write(&self, range: Range<u32>) -> u32 {
        self.residence().write(range)
    }

    fn unpin(&self, range: &Range<u32>) {
        self.residence().unpin(range);
    }

    fn slice(&self, range: &Range<u32>) -> Slice {
        self.tier.superpages.slice(self.number, range)
    }
}

impl Drop for TieredSuperpage {
    fn drop(&mut self) {
        let pages = self.residence().count_in_memory();
        if self.tier.superpages.take_back(self.number) {
            self.tier.room.give_back(u64::from(pages));
        }
    }
}

/// Pages to be sent. They are in `slices`, and stay where they are as long as `keeps` live, unless
/// some are away; then the thread is woken when they are worth another try.
///
/// # Errors
/// Flash does not return what was written.
pub(in crate::memory) fn read(
    wanted: &[Wanted<TieredSuperpage>],
    fetcher: &mut Fetcher,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let (mut pins, mut is_away, mut has_failed) = (Vec::new(), false, false);
    for (superpage, range) in wanted {
        let found = superpage.residence().read(range.clone(), fetcher.thread());
        match found {
            Found::Here => pins.push(pin(superpage, range)),
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

/// Pages to be written to; see [`given::write`].
///
/// # Errors
/// There is no memory for them, and flash takes no writes.
pub(in crate::memory) fn write(
    wanted: &[Wanted<TieredSuperpage>],
    thread: usize,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let Some((first, _)) = wanted.first() else { return Ok(Placed::Here) };
    let tier = &first.tier;
    let refuses = || match tier.is_failing.load(Ordering::Acquire) {
        true => Err(flash_error()),
        false => Ok(()),
    };
    given::write(wanted, (&tier.room, thread), refuses, slices, keeps)
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
