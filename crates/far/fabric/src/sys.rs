//! The system calls of this crate: vectored reads and writes on lent memory, sockets.
//!
//! All go straight to the kernel (rustix without libc), so that nothing interposed by the program
//! gets in between, and nothing here allocates after a [`Vector`] has grown to its
//! working size.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use farpool_units::at_most;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

/// Most parts of one vectored system call (the kernel's `UIO_MAXIOV`).
pub(crate) const VECTOR_LIMIT_PARTS: usize = 1024;

/// One range of memory, laid out as the kernel's `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Part {
    base: *mut u8,
    len: usize,
}

// Rust promises that IoSlice and IoSliceMut have the layout of iovec on Unix.
const _: () = assert!(size_of::<Part>() == size_of::<IoSliceMut<'_>>());
const _: () = assert!(align_of::<Part>() == align_of::<IoSliceMut<'_>>());
const _: () = assert!(size_of::<Part>() == 16);

/// A list of memory to scatter to or gather from, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Vector {
    parts: Vec<Part>,
    first: usize,
    bytes: usize,
}

// SAFETY: plain addresses; whether they may be used is the caller's promise at each call.
unsafe impl Send for Vector {}

impl Vector {
    pub(crate) fn with_capacity(parts: usize) -> Self {
        Vector { parts: Vec::with_capacity(parts), first: 0, bytes: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.parts.clear();
        self.first = 0;
        self.bytes = 0;
    }

    /// Bytes not yet moved.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Parts not yet moved.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len() - self.first
    }

    pub(crate) fn push(&mut self, base: *mut u8, len: usize) {
        self.bytes += len;
        match self.parts[self.first..].last_mut() {
            Some(last) if std::ptr::eq(last.base.wrapping_add(last.len), base) => last.len += len,
            _ if len > 0 => self.parts.push(Part { base, len }),
            _ => {}
        }
    }

    /// Adds memory that is only read.
    pub(crate) fn push_const(&mut self, base: *const u8, len: usize) {
        self.push(base.cast_mut(), len);
    }

    /// Drops the first `bytes`, which have been moved.
    pub(crate) fn advance(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.bytes);
        let mut left = bytes.min(self.bytes);
        self.bytes -= left;
        while let Some(part) = self.parts.get_mut(self.first)
            && left > 0
        {
            let step = left.min(part.len);
            part.base = part.base.wrapping_add(step);
            part.len -= step;
            left -= step;
            self.first += usize::from(part.len == 0);
        }
    }

    fn batch(&self) -> std::ops::Range<usize> {
        self.first..self.parts.len().min(self.first + VECTOR_LIMIT_PARTS)
    }

    /// # Safety
    /// Every part must be readable while the slices are used.
    unsafe fn slices(&self) -> &[IoSlice<'_>] {
        let parts = &self.parts[self.batch()];
        // SAFETY: same layout (checked above); readable as promised.
        unsafe { std::slice::from_raw_parts(parts.as_ptr().cast(), parts.len()) }
    }

    /// # Safety
    /// Every part must be writable, and not used by others, while the slices are used.
    unsafe fn slices_mut(&mut self) -> &mut [IoSliceMut<'_>] {
        let batch = self.batch();
        let parts = &mut self.parts[batch];
        // SAFETY: same layout (checked above); writable as promised.
        unsafe { std::slice::from_raw_parts_mut(parts.as_mut_ptr().cast(), parts.len()) }
    }
}

fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// Fills the whole vector from the file.
///
/// # Safety
/// Every part of the vector must be writable, and not used by others, during the call.
pub(crate) unsafe fn read_all_at(
    fd: BorrowedFd<'_>,
    into: &mut Vector,
    offset: u64,
) -> Result<(), Errno> {
    let mut at = offset;
    while into.bytes() > 0 {
        // SAFETY: as promised by the caller.
        let slices = unsafe { into.slices_mut() };
        // The plain call for the common single page saves the kernel from copying a list in.
        let got = match slices {
            [only] => again(|| rustix::io::pread(fd, &mut **only, at))?,
            many => again(|| rustix::io::preadv(fd, many, at))?,
        };
        if got == 0 {
            return Err(Errno::NXIO); // beyond the end of the file: not the promised memory
        }
        into.advance(got);
        at += got as u64;
    }
    Ok(())
}

/// Stores the whole vector in the file.
///
/// # Safety
/// Every part of the vector must be readable during the call.
pub(crate) unsafe fn write_all_at(
    fd: BorrowedFd<'_>,
    from: &mut Vector,
    offset: u64,
) -> Result<(), Errno> {
    let mut at = offset;
    while from.bytes() > 0 {
        // SAFETY: as promised by the caller.
        let slices = unsafe { from.slices() };
        let put = match slices {
            [only] => again(|| rustix::io::pwrite(fd, only, at))?,
            many => again(|| rustix::io::pwritev(fd, many, at))?,
        };
        if put == 0 {
            return Err(Errno::NXIO);
        }
        from.advance(put);
        at += put as u64;
    }
    Ok(())
}

/// Whether a receive may wait for the first byte (until the socket's own time limit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Return at once.
    None,
    /// Wait, at most [`WAIT_STEP`].
    Step,
}

impl Patience {
    pub(crate) fn flags(self) -> RecvFlags {
        match self {
            Patience::None => RecvFlags::DONTWAIT,
            Patience::Step => RecvFlags::empty(),
        }
    }
}

/// Longest that a patient receive waits before its caller checks the deadlines.
pub(crate) const WAIT_STEP: Duration = Duration::from_millis(20);

/// Receives what is there, up to the vector's size. 0 means that the peer closed.
///
/// # Safety
/// Every part of the vector must be writable, and not used by others, during the call.
pub(crate) unsafe fn receive(
    fd: BorrowedFd<'_>,
    into: &mut Vector,
    patience: Patience,
) -> Result<usize, Errno> {
    debug_assert!(into.bytes() > 0);
    let flags = patience.flags();
    let mut none = RecvAncillaryBuffer::default();
    // SAFETY: as promised by the caller.
    let slices = unsafe { into.slices_mut() };
    let got = rustix::net::recvmsg(fd, slices, &mut none, flags)?;
    Ok(got.bytes)
}

/// Makes a connected socket wait in patient receives.
pub(crate) fn make_patient(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_timeout(
        fd,
        rustix::net::sockopt::Timeout::Recv,
        Some(WAIT_STEP),
    )?;
    rustix::io::ioctl_fionbio(fd, false)
}

/// Sends what the socket takes now.
///
/// # Safety
/// Every part of the vector must be readable during the call.
pub(crate) unsafe fn send(fd: BorrowedFd<'_>, from: &Vector) -> Result<usize, Errno> {
    let mut none = SendAncillaryBuffer::default();
    // SAFETY: as promised by the caller.
    let slices = unsafe { from.slices() };
    again(|| rustix::net::sendmsg(fd, slices, &mut none, SendFlags::NOSIGNAL | SendFlags::DONTWAIT))
}

/// Hands the parts' bytes to `take`, in order, until it takes less than a part has. Returns how
/// many bytes were taken.
///
/// # Safety
/// Every part of the vector must be readable during the call.
pub(crate) unsafe fn gather<E>(
    from: &Vector,
    mut take: impl FnMut(&[u8]) -> Result<usize, E>,
) -> Result<usize, E> {
    let mut all = 0;
    // SAFETY: as promised by the caller.
    for part in unsafe { from.slices() } {
        let taken = take(part)?;
        all += taken;
        if taken < part.len() {
            break;
        }
    }
    Ok(all)
}

/// Copies bytes to the front of the vector, as many as it has room for, and drops those parts.
/// Returns their number.
///
/// # Safety
/// Every part of the vector must be writable, and not used by others, during the call.
pub(crate) unsafe fn scatter(into: &mut Vector, bytes: &[u8]) -> usize {
    let mut left = bytes;
    while !left.is_empty() && into.bytes() > 0 {
        let mut filled = 0;
        // SAFETY: as promised by the caller.
        for part in unsafe { into.slices_mut() } {
            let (now, later) = left.split_at(left.len().min(part.len()));
            part[..now.len()].copy_from_slice(now);
            filled += now.len();
            left = later;
            if left.is_empty() {
                break;
            }
        }
        into.advance(filled);
    }
    bytes.len() - left.len()
}

/// Asks for the bytes in a socket's queue of output (linux/sockios.h, asm-generic/ioctls.h).
const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;

/// Returns the bytes given to a socket that its peer has not acknowledged (TCP) or not received.
pub(crate) fn unacknowledged_bytes(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    // SAFETY: the kernel stores an int for this operation.
    let bytes: i32 =
        unsafe { rustix::ioctl::ioctl(socket, rustix::ioctl::Getter::<SIOCOUTQ, i32>::new())? };
    Ok(u64::from(bytes.max(0).unsigned_abs()))
}

/// Receives bytes and any descriptors that came with them.
pub(crate) fn receive_with_descriptors(
    fd: BorrowedFd<'_>,
    into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    again(|| {
        let take = |descriptor| descriptors.push(descriptor);
        farpool_kernel::receive_with_descriptors(fd, into, RecvFlags::DONTWAIT, take)
    })
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: at_most(time.as_secs()), tv_nsec: i64::from(time.subsec_nanos()) }
}

/// Time between two attempts to connect to a listener that is busy or cannot be reached.
pub(crate) const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// A connected unix socket. A listener with a full queue gives [`Errno::AGAIN`].
pub(crate) fn connect_unix(path: &Path) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = stream_socket(AddressFamily::UNIX)?;
    again(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

/// A TCP socket with no delay, still connecting: see [`connected`].
pub(crate) fn connect_tcp(to: &std::net::SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = stream_socket(family)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    match rustix::net::connect(&socket, to) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error),
    }
}

fn stream_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// True if the descriptor is ready now.
fn is_ready(fd: BorrowedFd<'_>, what: PollFlags) -> Result<bool, Errno> {
    let mut set = [PollFd::from_borrowed_fd(fd, what)];
    again(|| rustix::event::poll(&mut set, Some(&timespec(Duration::ZERO)))).map(|count| count > 0)
}

/// True if the attempt to connect has ended, which may be an error.
pub(crate) fn connected(socket: BorrowedFd<'_>) -> Result<bool, Errno> {
    if !is_ready(socket, PollFlags::OUT)? {
        return Ok(false);
    }
    rustix::net::sockopt::socket_error(socket)??;
    Ok(true)
}

/// A timer that becomes readable.
pub(crate) fn timer() -> Result<OwnedFd, Errno> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
}

/// Lets the timer be readable from this time on, as [`farpool_kernel::monotonic_ns`] counts, and
/// not before.
pub(crate) fn set_timer(timer: BorrowedFd<'_>, at_ns: u64) -> Result<(), Errno> {
    let at = Itimerspec {
        it_interval: timespec(Duration::ZERO),
        it_value: timespec(Duration::from_nanos(at_ns.max(1))),
    };
    rustix::time::timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &at).map(drop)
}
