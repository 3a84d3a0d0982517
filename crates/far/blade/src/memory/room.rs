//! Memory of which there is less than is lent: how much is taken, who waits for some, and who is to
//! make some free.
//!
//! Invariant: no more is taken than there is. Writes leave a part of it
//! ([`Room::take_to_write`]): whoever makes memory free needs some itself.

use farpool_kernel::lock;
use farpool_units::PAGE_BYTES;
use farpool_wire::PAGES_PER_FRAME_LIMIT;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// Threads of a blade that ask for memory at most; it starts no more. `farpool blade --threads`
/// allows as many, and by default there is one for each processor.
pub(crate) const THREADS_LIMIT: usize = 256;
/// The parts of the memory that are kept free: with less than the first the sweep begins, and it
/// ends at the second.
const LOW_PART: u64 = 16;
const HIGH_PART: u64 = 8;
/// The part that writes leave to what makes memory free, and to reads of flash: whoever waits for
/// one is not to wait for memory that others take meanwhile.
const KEPT_PART: u64 = 32;
/// The least memory: what is kept free has room for the largest request, and so has what writes
/// leave.
pub(super) const LEAST_BYTES: u64 = KEPT_PART * PAGES_PER_FRAME_LIMIT as u64 * PAGE_BYTES as u64;
const _: () = assert!(KEPT_PART == 2 * LOW_PART && LOW_PART > HIGH_PART);

/// A set of the blade's threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Threads([u64; THREADS_LIMIT / 64]);

impl Threads {
    pub(super) fn insert(&mut self, thread: usize) {
        self.0[thread / 64] |= 1 << (thread % 64);
    }

    /// The others.
    pub(super) fn without(mut self, thread: usize) -> Threads {
        self.0[thread / 64] &= !(1 << (thread % 64));
        self
    }

    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        (0..THREADS_LIMIT).filter(move |thread| self.0[thread / 64] >> (thread % 64) & 1 == 1)
    }
}

/// The pages that may be in memory, and those that are or will be.
#[derive(Debug)]
pub(super) struct Room {
    limit_pages: u64,
    taken_pages: AtomicU64,
    /// Who waits for memory to become free.
    waiting: Mutex<Threads>,
    /// Wakes the blade's threads.
    threads: OnceLock<Vec<OwnedFd>>,
    /// Wakes who makes memory free.
    bell: OwnedFd,
    /// It is at work, and needs no bell for that.
    is_sweeping: AtomicBool,
}

impl Room {
    /// # Errors
    /// `memory_bytes` are fewer than [`LEAST_BYTES`]; the system's: too few descriptors.
    pub(super) fn new(memory_bytes: u64) -> io::Result<Room> {
        if memory_bytes < LEAST_BYTES {
            let least_mib = LEAST_BYTES >> 20;
            let why = format!("with --flash or --pack a blade needs {least_mib} MiB of memory");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Room {
            limit_pages: memory_bytes / PAGE_BYTES as u64,
            taken_pages: AtomicU64::new(0),
            waiting: Mutex::default(),
            threads: OnceLock::new(),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            is_sweeping: AtomicBool::new(false),
        })
    }

    /// Names the descriptors that wake the blade's threads, by their numbers.
    pub(super) fn wakes(&self, threads: Vec<OwnedFd>) {
        assert!(threads.len() <= THREADS_LIMIT, "{} threads are too many", threads.len());
        assert!(self.threads.set(threads).is_ok(), "a blade has its threads once");
    }

    pub(super) fn wake(&self, threads: Threads) {
        let Some(descriptors) = self.threads.get() else { return };
        threads.iter().filter_map(|thread| descriptors.get(thread)).for_each(ring);
    }

    /// Wakes who waits for memory to become free.
    pub(super) fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        self.wake(waiting);
    }

    /// Takes so many pages for a read of flash, or none.
    pub(super) fn take_to_read(&self, pages: u64) -> bool {
        self.take_up_to(pages, self.limit_pages)
    }

    /// Takes so many pages for a write, or none.
    fn take_to_write(&self, pages: u64) -> bool {
        self.take_up_to(pages, self.limit_pages - self.limit_pages / KEPT_PART)
    }

    /// Takes so many pages for a write; false if there are none now, and the thread is woken when
    /// there may be some.
    ///
    /// # Errors
    /// That of `refuses`: there are none, and none are to be expected.
    pub(super) fn take_or_wait(
        &self,
        pages: u64,
        thread: usize,
        refuses: impl Fn() -> io::Result<()>,
    ) -> io::Result<bool> {
        let mut has_room = self.take_to_write(pages);
        if !has_room {
            refuses()?;
            has_room = self.wait(thread, || self.take_to_write(pages));
        }
        self.sweep_if_short();
        Ok(has_room)
    }

    fn take_up_to(&self, pages: u64, limit_pages: u64) -> bool {
        let more = |taken: u64| Some(taken + pages).filter(|taken| *taken <= limit_pages);
        self.taken_pages.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).is_ok()
    }

    /// Takes pages that are in memory already.
    pub(super) fn add(&self, pages: u64) {
        self.taken_pages.fetch_add(pages, Ordering::AcqRel);
    }

    /// Gives back pages that were taken, and wakes who waits for them.
    pub(super) fn give_back(&self, pages: u64) {
        if pages > 0 {
            let before = self.taken_pages.fetch_sub(pages, Ordering::AcqRel);
            assert!(before >= pages, "{pages} pages are given back, of {before}");
            self.wake_waiting();
        }
    }

    /// Has the thread woken when memory becomes free. True if `take` succeeds now: some may have
    /// become free before the thread was there to be woken.
    pub(super) fn wait(&self, thread: usize, take: impl FnOnce() -> bool) -> bool {
        lock(&self.waiting).insert(thread);
        let has_room = take();
        self.ring();
        has_room
    }

    /// Whether a thread waits for memory to become free.
    pub(super) fn has_waiting(&self) -> bool {
        *lock(&self.waiting) != Threads::default()
    }

    pub(super) fn taken_pages(&self) -> u64 {
        self.taken_pages.load(Ordering::Acquire)
    }

    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_pages * PAGE_BYTES as u64
    }

    pub(super) fn taken_bytes(&self) -> u64 {
        self.taken_pages() * PAGE_BYTES as u64
    }

    /// Pages to be made free before the sweep may end; 0 if it need not begin.
    pub(super) fn wanted_pages(&self) -> u64 {
        self.wanted_beyond(if self.is_sweeping() { HIGH_PART } else { LOW_PART })
    }

    fn wanted_beyond(&self, part: u64) -> u64 {
        (self.taken_pages() + self.limit_pages / part).saturating_sub(self.limit_pages)
    }

    /// Begins the sweep if little is free.
    pub(super) fn sweep_if_short(&self) {
        if self.wanted_beyond(LOW_PART) > 0 && !self.is_sweeping.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }

    pub(super) fn is_sweeping(&self) -> bool {
        self.is_sweeping.load(Ordering::Acquire)
    }

    /// Ends the sweep. False if it has to go on: somebody may have taken room just before.
    pub(super) fn end_sweep(&self) -> bool {
        self.is_sweeping.store(false, Ordering::Release);
        let is_over = self.wanted_beyond(LOW_PART) == 0;
        if !is_over {
            self.is_sweeping.store(true, Ordering::Release);
        }
        is_over
    }

    /// Wakes who makes memory free.
    pub(super) fn ring(&self) {
        ring(&self.bell);
    }

    /// Waits until [`Self::ring`], until there is something to read from `other`, or for `limit`.
    pub(super) fn wait_for_bell(&self, other: Option<BorrowedFd<'_>>, limit: Duration) {
        let bell = self.bell.as_fd();
        let of = |it| PollFd::from_borrowed_fd(it, PollFlags::IN);
        let mut fds = [of(bell), of(other.unwrap_or(bell))];
        // Interrupted or not, what is there is looked at.
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(limit).ok().as_ref());
        let mut rung = [0; 8];
        // An empty counter makes no difference.
        let _ = rustix::io::read(bell, &mut rung);
    }
}

fn ring(descriptor: &OwnedFd) {
    // It fails only if the counter is full, and then it is rung.
    let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
}
