//! Reads and writes of whole pages through io_uring, and the memory lent to the kernel meanwhile.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use farpool_units::{PAGE_BYTES, exactly};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::pages::Pages;

/// Capacity of the ring: more requests than are under way at a time.
const RING_ENTRIES: u32 = 1024;
/// Requests to a regular file that run at the same time: enough to keep a fast disk busy. Others
/// wait their turn.
const KERNEL_THREADS: u32 = 64;
/// How long a dropped ring waits for requests under way; then their memory is leaked.
const DROP_WAIT: Duration = Duration::from_secs(2);

/// A completed request: the memory that was lent, and whether it succeeded.
#[derive(Debug)]
pub struct Ended {
    /// The request's name.
    pub token: u64,
    /// The memory.
    pub pages: Pages,
    /// All bytes were read or written.
    pub is_ok: bool,
}

#[derive(Debug)]
struct Lent {
    pages: Pages,
    bytes: u32,
    since: Option<Instant>,
}

/// One thread's access to a file or device.
pub struct Ring {
    ring: IoUring,
    file: OwnedFd,
    /// Flags of each request: whether the kernel runs it in a thread of its own.
    flags: squeue::Flags,
    /// Becomes readable when a request has completed.
    bell: OwnedFd,
    lent: HashMap<u64, Lent>,
    /// Pushed, but not yet submitted to the kernel.
    unsubmitted: usize,
    /// Requests that the ring did not accept; they complete as failed.
    refused: Vec<u64>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("lent", &self.lent.len()).finish_non_exhaustive()
    }
}

impl Ring {
    /// `is_regular`: the file is not a device. Its file system may block the submitter on a disk
    /// that hangs: a writer for the journal, a reader for a place in the disk's queue. So kernel
    /// threads run its requests.
    ///
    /// # Errors
    /// The system has no io_uring, or too little memory or descriptors.
    pub fn new(file: OwnedFd, is_regular: bool) -> std::io::Result<Self> {
        let ring = IoUring::new(RING_ENTRIES)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        ring.submitter().register_eventfd(bell.as_raw_fd())?;
        let flags = if is_regular { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // If it cannot be set there are fewer threads: then requests wait for one another.
        let _ = ring.submitter().register_iowq_max_workers(&mut [KERNEL_THREADS, 0]);
        let lent = HashMap::new();
        Ok(Self { ring, file, flags, bell, lent, unsubmitted: 0, refused: Vec::new() })
    }

    /// The descriptor that becomes readable when a request has completed.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Reads the first `count` pages at `offset` of the file.
    pub fn read(&mut self, pages: Pages, offset: u64, count: usize, token: u64) {
        self.read_with(self.flags, (pages, offset, count), token);
    }

    /// As [`Self::read`], by the submitter itself also if the file is regular: sooner, as long as
    /// the disk is not so slow that the file system has its callers wait.
    pub fn read_at_once(&mut self, pages: Pages, offset: u64, count: usize, token: u64) {
        self.read_with(squeue::Flags::empty(), (pages, offset, count), token);
    }

    fn read_with(
        &mut self,
        flags: squeue::Flags,
        (mut pages, offset, count): (Pages, u64, usize),
        token: u64,
    ) {
        assert!(count <= pages.count(), "the memory has room for what is read");
        let bytes = exactly(count * PAGE_BYTES);
        let file = types::Fd(self.file.as_raw_fd());
        let entry = opcode::Read::new(file, pages.start_mut(), bytes).offset(offset).build();
        self.push(entry.flags(flags), (pages, bytes), token);
    }

    /// Writes the first `count` pages at `offset` of the file.
    pub fn write(&mut self, pages: Pages, offset: u64, count: usize, token: u64) {
        assert!(count <= pages.count(), "the memory has what is written");
        let bytes = exactly(count * PAGE_BYTES);
        let file = types::Fd(self.file.as_raw_fd());
        let entry = opcode::Write::new(file, pages.start(), bytes).offset(offset).build();
        self.push(entry.flags(self.flags), (pages, bytes), token);
    }

    fn push(&mut self, entry: squeue::Entry, (pages, bytes): (Pages, u32), token: u64) {
        let before = self.lent.insert(token, Lent { pages, bytes, since: None });
        // Its memory would be freed while the kernel may still write there.
        assert!(before.is_none(), "a token names one request");
        let entry = entry.user_data(token);
        if self.ring.submission().is_full() {
            self.submit();
        }
        // SAFETY: the entry points into a mapping that `lent` owns and shows for reading at most
        // until its completion has arrived; a ring dropped before that leaks it (see `Drop`). The
        // file stays open as long.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.refused.push(token);
        } else {
            self.unsubmitted += 1;
        }
    }

    /// Submits pushed requests to the kernel.
    pub fn submit(&mut self) {
        if self.unsubmitted > 0 {
            match self.ring.submit() {
                Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
                // Out of memory or interrupted: it stays pushed, and is submitted next time.
                Err(error) => tracing::debug!(%error, "the flash device's ring is busy"),
            }
        }
    }

    /// The memory of a request that is under way.
    pub fn lent(&self, token: u64) -> Option<&[u8]> {
        self.lent.get(&token).map(|lent| lent.pages.bytes())
    }

    /// Takes completed requests.
    pub fn poll(&mut self, ended: &mut Vec<Ended>) {
        self.submit();
        let mut rung = [0; 8];
        // An empty counter makes no difference: completions are checked anyway.
        let _ = rustix::io::read(&self.bell, &mut rung);
        for token in self.refused.drain(..) {
            if let Some(Lent { pages, .. }) = self.lent.remove(&token) {
                ended.push(Ended { token, pages, is_ok: false });
            }
        }
        for completion in self.ring.completion() {
            let token = completion.user_data();
            if let Some(Lent { pages, bytes, .. }) = self.lent.remove(&token) {
                let is_ok = u32::try_from(completion.result()) == Ok(bytes);
                if !is_ok {
                    let errno = -completion.result();
                    tracing::debug!(errno, "a request to the flash device failed");
                }
                ended.push(Ended { token, pages, is_ok });
            }
        }
    }

    /// The age of the oldest request under way, as far as earlier calls have seen it.
    pub fn oldest(&mut self, now: Instant) -> Duration {
        let ages = self.lent.values_mut().map(|lent| now - *lent.since.get_or_insert(now));
        ages.max().unwrap_or_default()
    }

    /// Sleeps until a request has completed, for at most `limit`.
    pub fn wait(&self, limit: Duration) {
        let mut fds = [PollFd::new(&self.bell, PollFlags::IN)];
        // Interrupted or not, completions are checked.
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(limit).ok().as_ref());
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut ended = Vec::new();
        self.poll(&mut ended);
        while !self.lent.is_empty() && start.elapsed() < DROP_WAIT {
            self.wait(Duration::from_millis(10));
            self.poll(&mut ended);
        }
        // The device may still write here: a leak is better than reuse.
        for (_, lent) in self.lent.drain() {
            std::mem::forget(lent.pages);
        }
    }
}
