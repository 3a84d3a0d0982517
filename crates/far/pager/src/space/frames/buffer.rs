//! The buffer: its trays, their addresses, and the waiting for free frames.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicI64, AtomicU32};
use std::time::Duration;

use farpool_kernel::lock;
use farpool_units::PAGE_BYTES;

use crate::space::frames::queues::Queues;
use crate::space::frames::slots::FrameSlot;
use crate::space::frames::trays::{self, Tray};
use crate::space::frames::zones::{self, TRAY_BYTES, Zone};
use crate::space::superpage::Page;
use crate::space::units::CHUNK_PAGES;
use crate::sys;

/// The buffer.
#[derive(Debug)]
pub struct Frames {
    pub(super) base: usize,
    /// All trays of the buffer.
    pub(super) trays: &'static [Tray],
    pub(super) can_execute: bool,
    pub(super) queues: Mutex<Queues>,
    pub(super) free: AtomicI64,
    /// Changes when frames become free; threads that need one wait on it.
    pub(super) version: AtomicU32,
    pub(super) recycles: bool,
    /// Missing frames that threads of the program wait for, see [`Frames::note_touched`].
    pub(super) touched: Mutex<Vec<usize>>,
}

impl Frames {
    /// Reserves the addresses. The caller registers them with userfaultfd. `recycles`: see
    /// [`Frames::recycles`]; all frames are readable and writable then. `executes`: some are to be
    /// executable.
    pub fn new(recycles: bool, executes: bool) -> Result<Frames, std::io::Error> {
        let (base, zones) = zones::map(recycles, executes)?;
        let last = zones[zones.len() - 1];
        let count = last.first_tray() + last.trays();
        // A forked child makes a buffer of its own; sharing this one would only copy its frames.
        sys::keep_from_children(base, count * TRAY_BYTES)?;
        sys::advise(base, count * TRAY_BYTES, libc::MADV_NOHUGEPAGE).ok();
        let queues = Mutex::new(Queues::new(zones));
        let can_execute = zones.contains(&Zone::ReadWriteExecute);
        let (free, version) = (AtomicI64::new(0), AtomicU32::new(0));
        Ok(Frames {
            base,
            trays: trays::table(count)?,
            can_execute,
            queues,
            free,
            version,
            recycles,
            touched: Mutex::default(),
        })
    }

    /// The addresses of the whole buffer.
    pub fn range(&self) -> (usize, usize) {
        (self.base, self.trays.len() * TRAY_BYTES)
    }

    /// Whether there are executable frames.
    pub fn can_execute(&self) -> bool {
        self.can_execute
    }

    /// Whether an address lies in the buffer.
    pub fn contains(&self, address: usize) -> bool {
        (self.base..self.base + self.trays.len() * TRAY_BYTES).contains(&address)
    }

    /// Where a frame is mapped.
    pub fn address(&self, slot: FrameSlot) -> usize {
        self.tray_address(slot.tray) + usize::from(slot.index) * PAGE_BYTES
    }

    /// Where a tray begins.
    pub fn tray_address(&self, tray: u16) -> usize {
        self.base + usize::from(tray) * TRAY_BYTES
    }

    /// Describes the frame at an address, for a message.
    pub fn describe(&self, address: usize) -> String {
        let offset = (address - self.base) / PAGE_BYTES;
        let (tray, index) = (offset / CHUNK_PAGES, offset % CHUNK_PAGES);
        let entry = &self.trays[tray];
        let [filled, valid, writing, busy] =
            [&entry.filled, &entry.valid, &entry.writing, &entry.busy].map(|it| it.load(SeqCst));
        let page = self.page_of(entry, index).map(|page| page.cell().load());
        format!(
            "frame {index} of tray {tray}, filled {filled:#x}, valid {valid:#x}, writing \
             {writing:#x}, busy {busy:#x}, page {page:?}"
        )
    }

    /// The approximate number of frames that can be handed out.
    pub fn free(&self) -> i64 {
        self.free.load(Relaxed)
    }

    /// Whether frames are handed out for other pages. Not where the program's calls are not seen:
    /// it may have given a page to a pipe or a socket (vmsplice, MSG_ZEROCOPY), which hold on to
    /// the frame, not to the page, and would send the frame's next contents. UFFDIO_MOVE refuses
    /// pinned pages, but takes these.
    pub fn recycles(&self) -> bool {
        self.recycles
    }

    /// Notes a missing frame that a thread of the program waits for. True if it is the first one
    /// since the last take.
    pub fn note_touched(&self, address: usize) -> bool {
        let mut touched = lock(&self.touched);
        touched.push(address);
        touched.len() == 1
    }

    /// Takes the frames noted by [`Frames::note_touched`].
    pub fn take_touched(&self) -> Vec<usize> {
        std::mem::take(&mut *lock(&self.touched))
    }

    /// Waits until frames became free since `version` was read, at most for `timeout`.
    pub fn wait(&self, version: u32, timeout: Duration) {
        sys::wait(&self.version, version, Some(timeout));
    }

    pub fn version(&self) -> u32 {
        self.version.load(SeqCst)
    }

    /// Wakes all threads that wait for a frame.
    pub fn announce(&self) {
        self.version.fetch_add(1, SeqCst);
        sys::wake(&self.version);
    }

    pub(super) fn page_of(&self, entry: &Tray, index: usize) -> Option<Page> {
        // SAFETY: `fill` stored a reference to a superpage, and superpages live for ever.
        let superpage = unsafe { entry.superpage.load(Acquire).as_ref()? };
        let index = entry.chunk.load(Relaxed) as usize * CHUNK_PAGES + index;
        Some(Page { superpage, index })
    }
}
