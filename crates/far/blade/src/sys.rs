//! The blade's unsafe code: mapped memory, and system calls that take its raw pointers.
//!
//! Mapped memory is shared with other processes and with other connections of the same client, so
//! it is never seen as `&mut [u8]`; the kernel copies into it and out of it by pointer. A client
//! that writes a page while reading it merely gets a checksum that does not match.

#![allow(unsafe_code)]

use farpool_kernel::MappedMemory;
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, exactly};
use farpool_wire::PagesChecksum;
use rustix::mm::Advice;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Most entries the kernel takes in one vectored call (UIO_MAXIOV).
pub(crate) const IOVECS_LIMIT: usize = 1024;

/// Size of the usual huge page (x86-64, and aarch64 with 4 KiB pages).
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory mapped for reading and writing, until dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
    /// All of it, and what alignment left over.
    _mapped: MappedMemory,
}

// SAFETY: the mapping is owned memory that is only reached through `Slice`s, whose users pass them
// to the kernel or take checksums; no reference into it outlives a call.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent access is by the kernel's copies, never by Rust references to data.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private zero memory, allocated as it is touched, in huge pages where the system has them. It
    /// ends with up to `HUGE_PAGE_BYTES` that are never touched, so that it can begin at a multiple
    /// of that.
    pub(crate) fn anonymous(bytes: usize) -> io::Result<Mapping> {
        let mapped = MappedMemory::anonymous(bytes + HUGE_PAGE_BYTES)?;
        let first = mapped.start().as_ptr();
        let left_over = first.align_offset(HUGE_PAGE_BYTES);
        // SAFETY: nobody refers to memory just mapped. Without huge pages it is as good, but
        // slower.
        let _ = unsafe { mapped.advise(left_over..left_over + bytes, Advice::LinuxHugepage) };
        Ok(Mapping { start: first.wrapping_add(left_over), bytes, _mapped: mapped })
    }

    /// Private zero memory, allocated page by page as it is touched.
    pub(crate) fn of_small_pages(bytes: usize) -> io::Result<Mapping> {
        let mapped = MappedMemory::anonymous(bytes)?;
        // SAFETY: nobody refers to memory just mapped. Where the kernel has no huge pages it
        // refuses the advice, and there is no need for it.
        let _ = unsafe { mapped.advise(0..bytes, Advice::LinuxNoHugepage) };
        Ok(Mapping { start: mapped.start().as_ptr(), bytes, _mapped: mapped })
    }

    /// The first `bytes` of a file, shared.
    pub(crate) fn shared(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Mapping> {
        let mapped = MappedMemory::shared(file, 0, bytes)?;
        Ok(Mapping { start: mapped.start().as_ptr(), bytes, _mapped: mapped })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes from `offset` on. Valid as long as the mapping lives.
    pub(crate) fn slice(&self, offset: usize, bytes: usize) -> Slice {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "a slice must lie in its mapping");
        Slice { start: self.start.wrapping_add(offset), bytes }
    }

    /// Drops private anonymous memory's content; it reads as zero afterwards.
    pub(crate) fn drop_content(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let slice = self.slice(offset, bytes);
        // SAFETY: the range lies in this mapping, and no Rust reference to its bytes exists.
        unsafe {
            rustix::mm::madvise(slice.start.cast(), slice.bytes, Advice::LinuxDontNeed)?;
        }
        Ok(())
    }

    /// Counts the bytes of a superpage that are in memory. The kernel takes 2 µs for one in huge
    /// pages, and 10 µs for one in small pages.
    ///
    /// # Errors
    /// The system's; it names none for memory that is mapped.
    pub(crate) fn resident_bytes(&self, superpage_offset: usize) -> io::Result<u64> {
        let mut is_resident = [0u8; PAGES_PER_SUPERPAGE as usize];
        let slice = self.slice(superpage_offset, is_resident.len() * PAGE_BYTES);
        // SAFETY: mincore reads no memory of the range, and writes one byte for each page of it.
        let done =
            unsafe { libc::mincore(slice.start.cast(), slice.bytes, is_resident.as_mut_ptr()) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let pages = is_resident.iter().filter(|byte| **byte & 1 != 0).count();
        Ok((pages * PAGE_BYTES) as u64)
    }

    /// Overwrites with zeros.
    pub(crate) fn zero(&self, offset: usize, bytes: usize) {
        let slice = self.slice(offset, bytes);
        // SAFETY: the range lies in this writable mapping, and no Rust reference to it exists.
        unsafe { std::ptr::write_bytes(slice.start, 0, slice.bytes) }
    }
}

/// A place in mapped memory. Whoever keeps one keeps its [`Mapping`] alive beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a slice is an address; see `Mapping`.
unsafe impl Send for Slice {}

impl Slice {
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// The slice without its first `count` bytes.
    pub(crate) fn skip(self, count: usize) -> Slice {
        assert!(count <= self.bytes, "cannot skip more than there is");
        Slice { start: self.start.wrapping_add(count), bytes: self.bytes - count }
    }

    /// The first `count` bytes of the slice.
    pub(crate) fn front(self, count: usize) -> Slice {
        assert!(count <= self.bytes, "cannot take more than there is");
        Slice { start: self.start, bytes: count }
    }

    /// Adds the bytes to a checksum.
    pub(crate) fn checksum(self, checksum: &mut PagesChecksum) {
        // SAFETY: the bytes are mapped (see `Slice`) and initialised by the kernel. Another process
        // may change them meanwhile; then the checksum is of no use to the client that did so.
        checksum.update(unsafe { std::slice::from_raw_parts(self.start, self.bytes) });
    }

    /// Gives the bytes to `take`, which copies what it needs.
    pub(crate) fn read<R>(self, take: impl FnOnce(&[u8]) -> R) -> R {
        // SAFETY: as in `checksum`; what another process changes meanwhile does not fit the
        // checksum that was sent before.
        take(unsafe { std::slice::from_raw_parts(self.start, self.bytes) })
    }

    /// Copies `source` to the front of the slice.
    pub(crate) fn fill(self, source: &[u8]) {
        assert!(source.len() <= self.bytes, "the source must fit");
        // SAFETY: the target is mapped and writable for at least `source.len()` bytes, and a Rust
        // buffer never overlaps with a blade's mapping.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), self.start, source.len()) }
    }
}

/// Bytes that are made to be sent. Whoever keeps a slice of them keeps the buffer beside it, and
/// nobody can write to it any more.
#[derive(Debug)]
pub(crate) struct Buffer(Box<[u8]>);

impl Buffer {
    /// So many zeros.
    pub(crate) fn new(bytes: usize) -> Buffer {
        Buffer(vec![0; bytes].into_boxed_slice())
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// All of it, to be read.
    pub(crate) fn slice(&self) -> Slice {
        Slice { start: self.0.as_ptr().cast_mut(), bytes: self.0.len() }
    }
}

/// Ranges for one vectored system call.
#[derive(Debug, Default)]
pub(crate) struct Iovecs(Vec<libc::iovec>);

// SAFETY: between calls the list is empty or stale; it is filled and used within one borrow.
unsafe impl Send for Iovecs {}

impl Iovecs {
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn is_full(&self) -> bool {
        self.0.len() >= IOVECS_LIMIT
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn push_slice(&mut self, slice: Slice) {
        self.0.push(libc::iovec { iov_base: slice.start.cast(), iov_len: slice.bytes });
    }

    /// For sending only: the kernel does not write through it.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        self.0.push(libc::iovec { iov_base, iov_len: bytes.len() });
    }

    pub(crate) fn push_buffer(&mut self, buffer: &mut [u8]) {
        self.0.push(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
    }
}

/// Receives into the ranges of `iovecs`, in order. 0 is the end of the stream.
///
/// # Safety
/// Every range must be alive, and not written by other Rust code, during the call.
pub(crate) unsafe fn receive(socket: BorrowedFd<'_>, iovecs: &Iovecs) -> io::Result<usize> {
    let count = iovecs_count(iovecs);
    // SAFETY: the caller vouches for the ranges; the list itself is a valid array of `count`.
    let received = unsafe { libc::readv(socket.as_raw_fd(), iovecs.0.as_ptr(), count) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Sends the bytes of the ranges of `iovecs`, in order, and never raises SIGPIPE.
///
/// # Safety
/// Every range must be alive and readable during the call.
pub(crate) unsafe fn send(
    socket: BorrowedFd<'_>,
    iovecs: &mut Iovecs,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<usize> {
    // SAFETY: all zero is a valid msghdr: no name, no places, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.0.as_mut_ptr();
    message.msg_iovlen = iovecs.0.len();
    let mut control = ControlBuffer([0; CONTROL_BYTES]);
    if let Some(descriptor) = descriptor {
        attach_descriptor(&mut message, &mut control, descriptor);
    }
    // SAFETY: the caller vouches for the ranges; list and control buffer outlive the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Room for one descriptor: CMSG_SPACE(4) is 24 on 64-bit machines.
const CONTROL_BYTES: usize = 32;

/// Control data has the alignment of its header.
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_BYTES]);

fn attach_descriptor(
    message: &mut libc::msghdr,
    control: &mut ControlBuffer,
    descriptor: BorrowedFd<'_>,
) {
    const DESCRIPTOR_BYTES: u32 = 4;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE, CMSG_LEN only compute; CMSG_FIRSTHDR and CMSG_DATA give addresses within
    // the control buffer, which is aligned for cmsghdr and long enough (asserted) for one number.
    unsafe {
        let space = libc::CMSG_SPACE(DESCRIPTOR_BYTES) as usize;
        assert!(space <= CONTROL_BYTES, "the control buffer holds one descriptor");
        message.msg_controllen = space;
        let header = libc::CMSG_FIRSTHDR(message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(DESCRIPTOR_BYTES) as usize;
        std::ptr::write_unaligned(libc::CMSG_DATA(header).cast(), descriptor.as_raw_fd());
    }
}

/// Marks the open file of a freshly opened descriptor: byte `holder` of the file counts as held
/// until the last copy of the descriptor (in any process) and the last mapping of it are gone. The
/// kernel's advisory locks of open file descriptions (F_OFD_SETLK) do just that.
pub(crate) fn mark_held(file: BorrowedFd<'_>, holder: u64) -> io::Result<()> {
    let mut lock = lock_of(libc::F_RDLCK, holder, Some(1))?;
    // SAFETY: an open descriptor, and a lock description that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if another open file holds any of the bytes `from` to `from + count - 1` (to the end of all
/// bytes for `None`).
pub(crate) fn is_held(file: BorrowedFd<'_>, from: u64, count: Option<u64>) -> io::Result<bool> {
    if count == Some(0) {
        return Ok(false);
    }
    let mut lock = lock_of(libc::F_WRLCK, from, count)?;
    // SAFETY: as above; the kernel writes the conflicting lock into it, or F_UNLCK.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

fn lock_of(kind: i32, from: u64, count: Option<u64>) -> io::Result<libc::flock> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: all zero is a valid flock; its l_pid must be zero.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).map_err(invalid)?;
    lock.l_whence = i16::try_from(libc::SEEK_SET).map_err(invalid)?;
    lock.l_start = i64::try_from(from).map_err(invalid)?;
    lock.l_len = i64::try_from(count.unwrap_or(0)).map_err(invalid)?; // 0: to the end
    Ok(lock)
}

fn iovecs_count(iovecs: &Iovecs) -> i32 {
    exactly(iovecs.0.len())
}

/// Shuts down both directions, so that the thread that owns the connection sees its end.
pub(crate) fn shut(socket: impl AsFd) {
    // An error means that it is closed already, as intended.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}
