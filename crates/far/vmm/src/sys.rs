//! The unsafe parts: pages that are lent to a lane, and what rustix does not have.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;

use farpool_kernel::MappedMemory;
use farpool_pool::{Completion, Lane, PageError, PageRead, PageWrite, SegmentPage};
use farpool_units::{PAGE_BYTES, exactly};
use rustix::io::Errno;

/// A lane and the local pages that it reads into and writes from, each known by its number.
#[derive(Debug)]
pub(crate) struct LentPages {
    /// Before the memory, so that it is dropped first: what is in flight ends with it.
    lane: Lane,
    memory: MappedMemory,
    is_lent: Vec<bool>,
    done: Vec<Completion>,
}

impl LentPages {
    /// Makes so many local pages for the lane.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn new(lane: Lane, count: usize) -> Result<LentPages, Errno> {
        let memory = MappedMemory::anonymous(count * PAGE_BYTES)?;
        Ok(LentPages { lane, memory, is_lent: vec![false; count], done: Vec::new() })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.is_lent.len()
    }

    /// Begins to read pages, each into a local page.
    ///
    /// # Panics
    /// One is lent already.
    pub(crate) fn read(&mut self, pages: &[(usize, SegmentPage)]) {
        let read = |&(number, at): &(usize, SegmentPage)| PageRead {
            at,
            into: self.lend(number),
            token: number as u64,
        };
        let reads: Vec<_> = pages.iter().map(read).collect();
        // SAFETY: each is a page of our mapping that `is_lent` keeps from everybody else until its
        // completion; the mapping is dropped after the lane.
        let _always_ok = unsafe { self.lane.read(&reads) };
    }

    /// Begins to write local pages, likewise.
    ///
    /// # Panics
    /// One is lent already.
    pub(crate) fn write(&mut self, pages: &[(usize, SegmentPage)]) {
        let write = |&(number, at): &(usize, SegmentPage)| PageWrite {
            at,
            from: self.lend(number).cast_const(),
            token: number as u64,
        };
        let writes: Vec<_> = pages.iter().map(write).collect();
        // SAFETY: as for reading.
        let _always_ok = unsafe { self.lane.write(&writes) };
    }

    fn lend(&mut self, number: usize) -> *mut u8 {
        assert!(!std::mem::replace(&mut self.is_lent[number], true), "page {number} is lent");
        self.memory.start().as_ptr().wrapping_add(number * PAGE_BYTES)
    }

    /// Appends the pages that are back, and how it went; blocks until there is one, or none is
    /// lent.
    pub(crate) fn wait(&mut self, back: &mut Vec<(usize, Result<(), PageError>)>) {
        self.lane.wait(&mut self.done);
        self.take_back(back);
    }

    /// The same without blocking. What is older than the deadline at `now` has failed.
    pub(crate) fn poll(&mut self, now: Instant, back: &mut Vec<(usize, Result<(), PageError>)>) {
        self.lane.poll(&mut self.done);
        self.lane.expire(now, &mut self.done);
        self.take_back(back);
    }

    fn take_back(&mut self, back: &mut Vec<(usize, Result<(), PageError>)>) {
        for Completion { token, result } in self.done.drain(..) {
            let number = exactly(token);
            self.is_lent[number] = false;
            back.push((number, result));
        }
    }

    /// The bytes of a local page.
    ///
    /// # Panics
    /// It is lent.
    pub(crate) fn bytes(&self, number: usize) -> &[u8] {
        assert!(!self.is_lent[number], "page {number} is lent");
        let start = self.memory.start().as_ptr().wrapping_add(number * PAGE_BYTES);
        // SAFETY: a page of our mapping; nobody writes there, as it is not lent and `self` is
        // borrowed.
        unsafe { std::slice::from_raw_parts(start, PAGE_BYTES) }
    }

    /// The bytes of a local page, to be changed.
    ///
    /// # Panics
    /// It is lent.
    pub(crate) fn bytes_mut(&mut self, number: usize) -> &mut [u8] {
        assert!(!self.is_lent[number], "page {number} is lent");
        let start = self.memory.start().as_ptr().wrapping_add(number * PAGE_BYTES);
        // SAFETY: a page of our mapping; nobody else uses it, as it is not lent and `self` is
        // borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(start, PAGE_BYTES) }
    }

    /// What becomes readable when pages come back; nothing for shared memory.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.lane.descriptors()
    }

    /// True if no page is lent.
    pub(crate) fn is_idle(&self) -> bool {
        self.lane.in_flight() == 0 && !self.is_lent.contains(&true)
    }

    /// The lane for another user, if no page is lent.
    pub(crate) fn into_lane(self) -> Option<Lane> {
        self.is_idle().then_some(self.lane)
    }
}

/// A handle on the process at the other end of a unix socket: the one that connected, or, for who
/// connected, the one that began to listen. It stays that process's when its number is used again.
///
/// # Errors
/// ESRCH or EINVAL if the process has ended; ENOPROTOOPT before Linux 6.5.
pub(crate) fn peer_process(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    const BYTES: libc::socklen_t = 4;
    const _: () = assert!(size_of::<RawFd>() == BYTES as usize);
    let (mut descriptor, mut bytes): (RawFd, _) = (-1, BYTES);
    // SAFETY: the kernel writes at most `bytes` bytes to `descriptor`, which has that size, and
    // their number to `bytes`.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut bytes,
        )
    };
    if done != 0 || descriptor < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Closes the userfaultfd of a child that a peer has born, which came with an event.
pub(crate) fn close_descriptor(descriptor: RawFd) {
    // SAFETY: the kernel made it for this process when the event was read.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
}
