//! One userfaultfd descriptor and its operations.

use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use farpool_units::{PAGE_BYTES, at_most, exactly};

use crate::abi::{self, Api, Fill, Message, Range, Register, Transfer, WriteProtect};

/// End of the addresses that a process can have on x86-64 unless it asks for more: 2^47 minus a
/// page.
const USER_END: usize = (1 << 47) - PAGE_BYTES;
/// vm.mmap_min_addr is at most this (usually 64 KiB); beyond, [`Uffd::wake_all`] fails.
const HIGHEST_MIN_ADDR: usize = 1 << 30;
/// The lowest address that can be mapped: the default of vm.mmap_min_addr.
const LOWEST_ADDRESS: usize = 1 << 16;
/// Memory at this height (the stack, if addresses are not randomised) is never registered. An
/// address below vm.mmap_min_addr would not do: most kernels refuse it before they check whether
/// the address space exists.
const PROBED_ADDRESS: usize = USER_END - 2 * PAGE_BYTES;

/// Why a userfaultfd could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "neither /dev/userfaultfd ({device}) nor userfaultfd(2) ({call}) can be opened; run as \
         root, let a group of the user's open it (chgrp GROUP /dev/userfaultfd && chmod 660 \
         /dev/userfaultfd), or set vm.unprivileged_userfaultfd=1"
    )]
    Denied { device: Error, call: Error },
    #[error(
        "the kernel's userfaultfd lacks {missing}; Linux 6.8 or newer has all that Farpool needs"
    )]
    Lacks { missing: String },
    #[error("the userfaultfd handshake failed: {0}")]
    Handshake(Error),
}

/// How far a batch got: bytes done, and the errno at which it stopped, if it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub done_bytes: usize,
    pub errno: Option<i32>,
}

/// A page fault the kernel reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Address of the page (aligned down), or None for an event that is not a page fault.
    pub page_address: Option<usize>,
    pub is_write: bool,
    /// The page is present, and protected by [`Uffd::write_protect`].
    pub is_protected: bool,
    /// Kernel thread id of the faulting thread (0 without `THREAD_ID`).
    pub thread: u32,
}

/// A change of the program's address space. The thread that made it waits until the event is read,
/// and no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The process forked: the descriptor is the child's userfaultfd, and from now on the reader's
    /// own.
    Forked { descriptor: RawFd },
    /// A mapping has moved (mremap).
    Moved { from: usize, to: usize, bytes: usize },
    /// The pages of the range are about to be dropped (madvise), and may still be present for a
    /// while.
    Removed { start: usize, end: usize },
    /// The range is not mapped any more.
    Unmapped { start: usize, end: usize },
}

impl Change {
    /// Whether it moves another mapping to this address.
    pub fn moves_to(&self, address: usize) -> bool {
        matches!(self, Change::Moved { to, bytes, .. } if (*to..to + bytes).contains(&address))
    }
}

/// An open userfaultfd of this process.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: u64,
}

/// Asks the kernel which userfaultfd features it has, without keeping the descriptor.
pub fn probe_features() -> Result<u64, OpenError> {
    Ok(Uffd::open(0, false)?.features)
}

impl Uffd {
    /// Opens a userfaultfd that also serves faults from within system calls.
    ///
    /// `/dev/userfaultfd` is tried first: file permissions are a finer grant than `CAP_SYS_PTRACE`.
    /// `USER_MODE_ONLY` is never used: read(2) into a far page would fail with EFAULT.
    pub fn open(wanted_features: u64, nonblocking: bool) -> Result<Uffd, OpenError> {
        let fd = open_descriptor(nonblocking)?;
        if wanted_features != 0 {
            // The kernel accepts one handshake per descriptor, so a probe needs its own.
            let probe = Uffd::open(0, false)?;
            let missing = wanted_features & !probe.features;
            if missing != 0 {
                return Err(OpenError::Lacks { missing: feature_names(missing) });
            }
        }
        Uffd::shake_hands(fd, wanted_features)
    }

    /// Agrees with the kernel on the features of a descriptor that was just made, by this process
    /// or by another. The calling process needs `CAP_SYS_PTRACE` for `EVENT_FORK`; the process that
    /// owns the memory needs nothing.
    pub fn shake_hands(fd: OwnedFd, features: u64) -> Result<Uffd, OpenError> {
        let mut api = Api { api: abi::UFFD_API, features, ioctls: 0 };
        ioctl(fd.as_raw_fd(), abi::UFFDIO_API, &mut api).map_err(OpenError::Handshake)?;
        // The kernel answers with all features that it has, requested or not.
        Ok(Uffd { fd, features: if features == 0 { api.features } else { features } })
    }

    /// Makes a userfaultfd for the calling process's memory from an open /dev/userfaultfd, before
    /// the handshake.
    pub fn make(device: BorrowedFd<'_>, nonblocking: bool) -> Result<OwnedFd, Error> {
        make_from_device(device, libc::O_CLOEXEC | if nonblocking { libc::O_NONBLOCK } else { 0 })
    }

    /// Adopts a descriptor of a userfaultfd after its handshake. Its features are unknown.
    pub fn adopt(fd: OwnedFd) -> Uffd {
        Uffd { fd, features: 0 }
    }

    /// As [`Uffd::adopt`], with the features on which another process has agreed with the kernel.
    pub fn adopt_with(fd: OwnedFd, features: u64) -> Uffd {
        Uffd { fd, features }
    }

    /// The descriptor alone.
    pub fn into_descriptor(self) -> OwnedFd {
        self.fd
    }

    /// The features that were agreed with the kernel; all of the kernel's, if none were requested.
    pub fn features(&self) -> u64 {
        self.features
    }

    pub fn register(&self, start: usize, len: usize, mode: u64) -> Result<(), Error> {
        let mut argument = Register { range: range(start, len), mode, ioctls: 0 };
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_REGISTER, &mut argument)
    }

    pub fn unregister(&self, start: usize, len: usize) -> Result<(), Error> {
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_UNREGISTER, &mut range(start, len))
    }

    /// Makes every thread that waits for a page of the range try again.
    pub fn wake(&self, start: usize, len: usize) -> Result<(), Error> {
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_WAKE, &mut range(start, len))
    }

    /// Makes every thread that waits for any page try again, including those whose fault was
    /// already read.
    pub fn wake_all(&self) -> Result<(), Error> {
        // The kernel accepts no range that begins below vm.mmap_min_addr, and nothing is mapped
        // there.
        let mut start = 0;
        loop {
            match self.wake(start, USER_END - start) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EINVAL) && start < HIGHEST_MIN_ADDR =>
                {
                    start = (start * 2).max(PAGE_BYTES);
                }
                result => return result,
            }
        }
    }

    /// Fills missing pages with a copy of local memory.
    pub fn copy(&self, dst: usize, src: usize, len: usize, wake: bool) -> Outcome {
        self.transfer(abi::UFFDIO_COPY, dst, src, len, wake_mode(wake))
    }

    /// Moves whole pages within this process without copying. Missing source pages are skipped when
    /// `holes` is set. Destination pages must be missing and registered.
    pub fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
        holes: bool,
    ) -> Outcome {
        let holes = if holes { abi::MOVE_MODE_ALLOW_SRC_HOLES } else { 0 };
        self.transfer(abi::UFFDIO_MOVE, dst, src, len, wake_mode(wake) | holes)
    }

    /// Whether its address space is gone: the process has ended, or runs another image.
    pub fn is_gone(&self) -> bool {
        self.probe() == Some(libc::ESRCH)
    }

    /// Whether the process is changing its address space, and that event is not read yet.
    pub fn is_changing(&self) -> bool {
        self.probe() == Some(libc::EAGAIN)
    }

    /// The kernel's answer to filling a page where none can be registered.
    fn probe(&self) -> Option<i32> {
        self.zero(PROBED_ADDRESS, PAGE_BYTES, false).errno
    }

    /// Whether the userfaultfd belongs to the calling process's address space. None: the owning
    /// process is changing its address space, ask again. Nothing is changed.
    pub fn is_of_caller(&self) -> Option<bool> {
        // For another address space the kernel says EINVAL before it checks addresses, for this one
        // ENOENT if nothing is mapped at one of the two. Hardly any program has mapped the lowest
        // possible address, and none of those the highest, too.
        let moved = self.move_pages(LOWEST_ADDRESS, PROBED_ADDRESS, PAGE_BYTES, false, false);
        match moved.errno {
            Some(libc::EAGAIN) => None,
            errno => Some(errno == Some(libc::ENOENT)),
        }
    }

    /// Maps the shared zero page.
    pub fn zero(&self, start: usize, len: usize, wake: bool) -> Outcome {
        self.fill(abi::UFFDIO_ZEROPAGE, start, len, wake_mode(wake))
    }

    /// Makes writes to the present pages of a range, which must be registered with mode `WP`,
    /// fault; or ends that and makes waiting threads try again.
    pub fn write_protect(&self, start: usize, len: usize, protected: bool) -> Result<(), Error> {
        let mode = if protected { abi::WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { range: range(start, len), mode };
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_WRITEPROTECT, &mut argument)
    }

    /// Makes every later touch of the missing pages a SIGBUS: the answer for lost data.
    pub fn poison(&self, start: usize, len: usize) -> Outcome {
        self.fill(abi::UFFDIO_POISON, start, len, 0)
    }

    /// Reads waiting messages (faults and changes). Blocks unless the descriptor was opened
    /// non-blocking.
    pub fn read<'a>(&self, buffer: &'a mut [Message]) -> Result<&'a [Message], Error> {
        // SAFETY: the pointer and byte length describe `buffer`, and Message is plain data for
        // which any bit pattern is valid.
        let bytes = unsafe {
            libc::read(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), size_of_val(buffer))
        };
        let bytes = usize::try_from(bytes).map_err(|_| Error::last_os_error())?;
        Ok(&buffer[..bytes / size_of::<Message>()])
    }

    fn transfer(&self, request: u64, dst: usize, src: usize, len: usize, mode: u64) -> Outcome {
        let mut argument =
            Transfer { dst: dst as u64, src: src as u64, len: len as u64, mode, done: 0 };
        let result = ioctl(self.fd.as_raw_fd(), request, &mut argument);
        outcome(result, argument.done)
    }

    fn fill(&self, request: u64, start: usize, len: usize, mode: u64) -> Outcome {
        let mut argument = Fill { range: range(start, len), mode, done: 0 };
        let result = ioctl(self.fd.as_raw_fd(), request, &mut argument);
        outcome(result, argument.done)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Message {
    /// The event that the message reports.
    pub fn event(&self) -> Event {
        let is_fault = self.event == abi::EVENT_PAGEFAULT;
        let address = exactly::<usize, _>(self.address) & !(PAGE_BYTES - 1);
        Event {
            page_address: is_fault.then_some(address),
            is_write: self.flags & abi::PAGEFAULT_FLAG_WRITE != 0,
            is_protected: self.flags & abi::PAGEFAULT_FLAG_WP != 0,
            // The kernel stores the thread id in the low half of the word.
            thread: exactly(self.thread & u64::from(u32::MAX)),
        }
    }
}

impl Message {
    /// The change of the address space that the message reports, if any.
    pub fn change(&self) -> Option<Change> {
        // Addresses: usize is 64 bits wide (asserted in `pagemap`).
        #[allow(clippy::cast_possible_truncation)]
        let word = |word: u64| word as usize;
        // The three words of the kernel's union.
        let (first, second, third) = (self.flags, word(self.address), word(self.thread));
        match self.event {
            abi::EVENT_FORK => {
                // The kernel stores the descriptor in the low half of the first word.
                let descriptor = exactly(first & u64::from(u32::MAX));
                Some(Change::Forked { descriptor })
            }
            abi::EVENT_REMAP => Some(Change::Moved { from: word(first), to: second, bytes: third }),
            abi::EVENT_REMOVE => Some(Change::Removed { start: word(first), end: second }),
            abi::EVENT_UNMAP => Some(Change::Unmapped { start: word(first), end: second }),
            _ => None,
        }
    }
}

fn feature_names(bits: u64) -> String {
    let names: Vec<&str> = abi::features::NAMES
        .iter()
        .filter(|(bit, _)| bits & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    names.join(", ")
}

fn wake_mode(wake: bool) -> u64 {
    if wake { 0 } else { abi::MODE_DONTWAKE }
}

fn range(start: usize, len: usize) -> Range {
    Range { start: start as u64, len: len as u64 }
}

fn outcome(result: Result<(), Error>, done: i64) -> Outcome {
    // A failure without any progress is also reported here, as the error's negative number.
    let done_bytes = at_most(done);
    match result {
        Ok(()) => Outcome { done_bytes, errno: None },
        Err(error) => {
            Outcome { done_bytes, errno: Some(error.raw_os_error().unwrap_or(libc::EIO)) }
        }
    }
}

fn open_descriptor(nonblocking: bool) -> Result<OwnedFd, OpenError> {
    let flags = libc::O_CLOEXEC | if nonblocking { libc::O_NONBLOCK } else { 0 };
    let device = match open_through_device(flags) {
        Ok(fd) => return Ok(fd),
        Err(error) => error,
    };
    // SAFETY: a system call that takes flags only; the result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    match RawFd::try_from(fd) {
        // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(OpenError::Denied { device, call: Error::last_os_error() }),
    }
}

fn open_through_device(flags: i32) -> Result<OwnedFd, Error> {
    use rustix::fs::{Mode, OFlags};
    let device =
        rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    make_from_device(device.as_fd(), flags)
}

fn make_from_device(device: BorrowedFd<'_>, flags: i32) -> Result<OwnedFd, Error> {
    // SAFETY: USERFAULTFD_IOC_NEW takes its flags by value and returns a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), abi::USERFAULTFD_IOC_NEW, flags) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes one ioctl on a struct whose size is part of the request number.
pub(crate) fn ioctl<T>(fd: RawFd, request: u64, argument: &mut T) -> Result<(), Error> {
    // SAFETY: every request of this crate carries the size of T in its number, and `argument` is a
    // live, exclusive reference to such a T.
    let result = unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) };
    if result < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}
