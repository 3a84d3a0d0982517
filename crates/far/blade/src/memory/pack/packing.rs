//! Superpages whose cold pages are packed: what the blade's threads do with them. They wait for
//! memory only, and then they are woken when it is worth another try.
//!
//! Locks: a superpage's `pages` is held for bookkeeping, while packed pages of it are unpacked, and
//! while memory is given back; `frames` inside it for reading only, and without it for changes.
//! Those of [`Room`] and [`Given`] are taken inside any, and none inside them.

use super::codec::fill;
use super::counters::{PackCounters, PackStat};
use super::frames::{Domain, FrameId, Frames};
use super::pages::{Packed, Pages, Unpacked};
use crate::memory::given::{self, Given, Paged, Wanted, pin};
use crate::memory::room::Room;
use crate::memory::{Keep, Placed, to_usize};
use crate::sys::{Buffer, Slice};
use farpool_kernel::{LogRate, fill_random, lock, read_lock, write_lock};
use farpool_units::PAGE_BYTES;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Instant;

/// Memory for the pages of all superpages, packed or not.
#[derive(Debug)]
pub(in crate::memory) struct Packing {
    pub(super) superpages: Given<PackedSuperpage>,
    pub(in crate::memory) room: Room,
    frames: RwLock<Frames>,
    pub(super) counters: PackCounters,
    /// Nothing more can be packed, and memory is short: who needs some is refused.
    pub(super) is_full: AtomicBool,
    pub(super) is_ending: AtomicBool,
    pub(super) log: LogRate,
    pub(super) started: Instant,
}

/// One superpage. When its last user drops it, its memory and its frames are given back.
#[derive(Debug)]
pub(in crate::memory) struct PackedSuperpage {
    packing: Arc<Packing>,
    number: u32,
    domain: Domain,
    pages: Mutex<Pages>,
}

impl Packing {
    /// # Errors
    /// There is too little memory, or the system's.
    pub(super) fn new(superpages: u32, memory_bytes: u64) -> io::Result<Packing> {
        let mut seed = [0; 8];
        fill_random(&mut seed)?;
        Ok(Packing {
            room: Room::new(memory_bytes)?,
            superpages: Given::new(superpages)?,
            frames: RwLock::new(Frames::new(memory_bytes, u64::from_ne_bytes(seed))?),
            counters: PackCounters::default(),
            is_full: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            log: LogRate::default(),
            started: Instant::now(),
        })
    }

    /// Takes a superpage, which is zero. Its pages are shared with those of its domain.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`]: all are taken, or memory is.
    pub(in crate::memory) fn take(
        self: &Arc<Self>,
        domain: Domain,
    ) -> io::Result<Arc<PackedSuperpage>> {
        self.refuses()?;
        let (packing, pages) = (Arc::clone(self), Mutex::default());
        self.superpages.take(|number| PackedSuperpage { packing, number, domain, pages })
    }

    /// # Errors
    /// Memory is full.
    fn refuses(&self) -> io::Result<()> {
        if self.is_full.load(Ordering::Acquire) {
            // There may be some by now.
            self.room.ring();
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    pub(in crate::memory) fn stat(&self) -> PackStat {
        let frames = read_lock(&self.frames);
        let frames = (frames.bytes(), frames.count());
        self.counters.stat(&self.room, frames)
    }

    /// Ends the packer.
    pub(in crate::memory) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.room.ring();
    }

    pub(super) fn digest_of(&self, page: &[u8; PAGE_BYTES]) -> u64 {
        read_lock(&self.frames).digest_of(page)
    }

    /// Changes the frames. What memory they take then is taken, or given back.
    pub(super) fn change_frames<R>(&self, change: impl FnOnce(&mut Frames) -> R) -> R {
        let mut frames = write_lock(&self.frames);
        let before = frames.bytes();
        let result = change(&mut frames);
        // Before anybody else changes them: what is given back was taken before.
        self.account(before, frames.bytes());
        result
    }

    /// Memory that is in use changed from so many bytes to so many others.
    fn account(&self, before_bytes: u64, after_bytes: u64) {
        let pages = |bytes: u64| bytes.div_ceil(PAGE_BYTES as u64);
        let (before, after) = (pages(before_bytes), pages(after_bytes));
        if after > before {
            self.room.add(after - before);
        } else {
            self.room.give_back(before - after);
        }
    }

    /// Releases what was packed and is no more.
    fn release(&self, unpacked: Unpacked) {
        let Unpacked { frames, filled } = unpacked;
        self.counters.pages_filled.fetch_sub(filled, Ordering::Relaxed);
        self.counters.pages_in_frames.fetch_sub(frames.len() as u64, Ordering::Relaxed);
        self.release_frames(frames);
    }

    /// Releases references to frames.
    pub(super) fn release_frames(&self, frames: Vec<FrameId>) {
        if !frames.is_empty() {
            self.change_frames(|all| frames.into_iter().for_each(|id| all.release(id)));
        }
    }
}

impl PackedSuperpage {
    pub(super) fn domain(&self) -> Domain {
        self.domain
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        lock(&self.pages)
    }

    /// Changes what its pages are. What memory their table takes then is taken, or given back.
    pub(super) fn change_pages<R>(&self, change: impl FnOnce(&mut Pages) -> R) -> R {
        let mut pages = self.pages();
        let before = pages.table_bytes();
        let result = change(&mut pages);
        // As for frames.
        self.packing.account(before, pages.table_bytes());
        result
    }

    /// Gives the memory of pages back, which are in memory no more; they must be locked until then.
    /// Returns how many they are, which the caller gives back to the room.
    pub(super) fn drop_memory(&self, runs: &[Range<u32>]) -> u64 {
        let drop_run = |run: &Range<u32>| match self.packing.superpages.drop_pages(self.number, run)
        {
            Ok(pages) => pages,
            Err(error) => {
                // Their room stays taken, as their memory does; what is there must read as zero.
                tracing::error!(%error, "memory cannot be given back; it is zeroed");
                let zero = [0; PAGE_BYTES];
                run.clone().for_each(|page| self.slice(&(page..page + 1)).fill(&zero));
                0
            }
        };
        runs.iter().map(drop_run).sum()
    }

    /// Drops the content of pages.
    pub(in crate::memory) fn discard(&self, range: Range<u32>) {
        let (pages, unpacked) = self.change_pages(|pages| {
            let (dropped, unpacked) = pages.discard(range);
            (self.drop_memory(&dropped), unpacked)
        });
        self.packing.room.give_back(pages);
        self.packing.release(unpacked);
    }

    /// Bytes that it has in memory, without what is packed.
    pub(in crate::memory) fn backed_bytes(&self) -> u64 {
        u64::from(self.pages().count_in_memory()) * PAGE_BYTES as u64
    }

    /// Copies pages of which some are packed.
    fn unpack(&self, pages: &Pages, range: &Range<u32>) -> io::Result<Buffer> {
        let mut buffer = Buffer::new(to_usize(u64::from(range.end - range.start)) * PAGE_BYTES);
        let (copies, _) = buffer.bytes_mut().as_chunks_mut::<PAGE_BYTES>();
        let frames = read_lock(&self.packing.frames);
        let mut unpacked = 0;
        for (page, copy) in range.clone().zip(copies) {
            match pages.packed(page) {
                Packed::Not => {
                    self.slice(&(page..page + 1)).read(|bytes| copy.copy_from_slice(bytes));
                    continue;
                }
                Packed::Filled(word) => fill(word, copy),
                Packed::Frame(id) if frames.read(id, copy) => {}
                Packed::Frame(_) => return Err(self.packing.lost(page)),
            }
            unpacked += 1;
        }
        self.packing.counters.pages_unpacked.fetch_add(unpacked, Ordering::Relaxed);
        Ok(buffer)
    }
}

impl Packing {
    /// A packed page is not what was packed.
    fn lost(&self, page: u32) -> io::Error {
        self.counters.pages_failed.fetch_add(1, Ordering::Relaxed);
        if self.log.may_write(self.started.elapsed()) {
            tracing::error!(
                page,
                "a packed page is not what was packed; this machine's memory may be at fault: who \
                 asks for it is told that it is lost"
            );
        }
        Errno::IO.into()
    }
}

impl Paged for PackedSuperpage {
    fn count_absent(&self, range: Range<u32>) -> u32 {
        self.pages().count_absent(range)
    }

    fn write(&self, range: Range<u32>) -> u32 {
        let (taken, unpacked) = self.change_pages(|pages| pages.write(range));
        self.packing.release(unpacked);
        taken
    }

    fn unpin(&self, range: &Range<u32>) {
        self.pages().unpin(range);
    }

    fn slice(&self, range: &Range<u32>) -> Slice {
        self.packing.superpages.slice(self.number, range)
    }
}

impl Drop for PackedSuperpage {
    fn drop(&mut self) {
        let (pages, unpacked) = self.change_pages(|pages| (pages.count_in_memory(), pages.clear()));
        self.packing.release(unpacked);
        if self.packing.superpages.take_back(self.number) {
            self.packing.room.give_back(u64::from(pages));
        }
    }
}

/// Pages to be sent. They are in `slices`, and stay as they are as long as `keeps` live.
///
/// # Errors
/// A packed page is not what was packed.
pub(in crate::memory) fn read(
    wanted: &[Wanted<PackedSuperpage>],
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<()> {
    for (superpage, range) in wanted {
        let mut pages = superpage.pages();
        if pages.read(range.clone()) {
            drop(pages);
            slices.push(superpage.slice(range));
            keeps.push(pin(superpage, range));
        } else {
            let buffer = superpage.unpack(&pages, range)?;
            drop(pages);
            slices.push(buffer.slice());
            keeps.push(Arc::new(buffer) as Keep);
        }
    }
    Ok(())
}

/// Pages to be written to; see [`given::write`].
///
/// # Errors
/// There is no memory for them, and nothing left that could be packed.
pub(in crate::memory) fn write(
    wanted: &[Wanted<PackedSuperpage>],
    thread: usize,
    slices: &mut Vec<Slice>,
    keeps: &mut Vec<Keep>,
) -> io::Result<Placed> {
    let Some((first, _)) = wanted.first() else { return Ok(Placed::Here) };
    let packing = &first.packing;
    given::write(wanted, (&packing.room, thread), || packing.refuses(), slices, keeps)
}
