//! System calls made without the C library: for the functions that the C library itself builds on,
//! and which therefore may touch neither errno nor thread-local storage.
//!
//! Invariant: what is mapped here is in [`OWN`], and a fork of the program does not inherit it.

use std::ffi::CStr;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use farpool_pager::sys::apart;
use farpool_units::{PAGE_BYTES, exactly};

use crate::lock::Lock;
use crate::spans::{Span, Table};

/// Everything that the sidecar has mapped, with its image and first stack.
pub static OWN: Lock<Table> = Lock::new(Table::new());

/// An error number of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// The largest error number; results from -4095 to -1 are errors.
const MAX_ERRNO: isize = 4095;

#[cfg(target_arch = "x86_64")]
fn call(number: libc::c_long, a: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: callers of this private function name calls that touch no memory of Rust objects
    // except as they say themselves (a fixed mapping replaces what its caller owns); the clobbers
    // are those of the kernel's ABI.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number => answer, in("rdi") a[0],
            in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer
}

#[cfg(target_arch = "aarch64")]
fn call(number: libc::c_long, a: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: as for x86-64.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a[0] => answer, in("x1") a[1],
            in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5], options(nostack));
    }
    answer
}

fn checked(answer: isize) -> Result<usize, Errno> {
    match usize::try_from(answer) {
        Ok(value) => Ok(value),
        Err(_) if answer >= -MAX_ERRNO => Err(Errno(exactly(-answer))),
        Err(_) => Ok(answer.cast_unsigned()),
    }
}

fn pages_up(bytes: usize) -> usize {
    bytes.saturating_add(PAGE_BYTES - 1) & !(PAGE_BYTES - 1)
}

fn flags(value: i32) -> usize {
    value.cast_unsigned() as usize
}

/// The parameters of a mapping: mmap's own arguments.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub at: usize,
    pub bytes: usize,
    pub protection: i32,
    pub flags: i32,
    pub fd: i32,
    pub offset: i64,
}

impl Wish {
    /// Private zeroed memory that can be read and written.
    pub const fn anonymous(bytes: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        Self { at: 0, bytes, protection, flags, fd: -1, offset: 0 }
    }
}

fn mmap(wish: Wish) -> isize {
    let (protection, how, fd) = (flags(wish.protection), flags(wish.flags), flags(wish.fd));
    let Ok(offset) = usize::try_from(wish.offset) else { return -(libc::EINVAL as isize) };
    call(libc::SYS_mmap, [wish.at, wish.bytes, protection, how, fd, offset])
}

/// munmap without updating [`OWN`].
fn give_up(start: usize, bytes: usize) -> Result<(), Errno> {
    checked(call(libc::SYS_munmap, [start, bytes, 0, 0, 0, 0])).map(drop)
}

/// Addresses from the image on that are left to the image itself and its first stack.
const IMAGE_ROOM_BYTES: usize = 64 << 20;

/// Maps memory, hides it from forks and enters it in [`OWN`]. Unless the caller names an address,
/// it is placed apart from the program's memory.
pub fn map(mut wish: Wish) -> Result<usize, Errno> {
    if wish.at == 0 {
        apart::begin(pages_up(std::ptr::from_ref(&OWN) as usize) + IMAGE_ROOM_BYTES);
        wish.at = apart::address(wish.bytes);
    }
    let start = checked(mmap(wish))?;
    let span = Span { start, end: start.saturating_add(pages_up(wish.bytes)) };
    keep(span).inspect_err(|_| {
        let _ = give_up(start, wish.bytes);
    })?;
    Ok(start)
}

/// Enters a mapping in [`OWN`] and hides it from forks of the program. MADV_DONTDUMP is not used: a
/// core of the program is worth more with the pager's tables in it.
fn keep(span: Span) -> Result<(), Errno> {
    OWN.with(|own| own.add(span)).map_err(|_| Errno(libc::ENOMEM))?;
    let dont_fork = flags(libc::MADV_DONTFORK);
    // An old kernel may refuse, or a mapping without pages: the child then has a copy it never
    // uses.
    let _ = call(libc::SYS_madvise, [span.start, span.end - span.start, dont_fork, 0, 0, 0]);
    Ok(())
}

/// Removes memory from [`OWN`], then unmaps it, so that what the program maps at the same place a
/// moment later is not taken for the sidecar's.
pub fn unmap(start: usize, bytes: usize) -> Result<(), Errno> {
    let span = Span { start, end: start.saturating_add(pages_up(bytes)) };
    OWN.with(|own| own.remove(span)).map_err(|_| Errno(libc::ENOMEM))?;
    give_up(start, bytes)
}

/// mremap that updates [`OWN`].
pub fn remap(at: usize, old: usize, new: usize, how: i32, to: usize) -> Result<usize, Errno> {
    let moved = checked(call(libc::SYS_mremap, [at, old, new, flags(how), to, 0]))?;
    let from = Span { start: at, end: at.saturating_add(pages_up(old)) };
    OWN.with(|own| own.remove(from)).map_err(|_| Errno(libc::ENOMEM))?;
    keep(Span { start: moved, end: moved.saturating_add(pages_up(new)) })?;
    Ok(moved)
}

/// Takes a descriptor that the injector placed at a known number.
pub fn placed_descriptor(number: RawFd) -> OwnedFd {
    // SAFETY: the injector opened this number for this program before its first instruction, and
    // main takes each number once.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// A descriptor that stays open for as long as this process lives.
pub fn held_descriptor(number: RawFd) -> BorrowedFd<'static> {
    // SAFETY: the injector opened this number, and it is never closed.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Names the calling thread.
pub fn set_name(name: &'static CStr) {
    let set_name = flags(libc::PR_SET_NAME);
    let _ = call(libc::SYS_prctl, [set_name, name.as_ptr() as usize, 0, 0, 0, 0]);
}

/// Waits for one of these events, an error or a hang-up on a descriptor.
pub fn await_event(fd: RawFd, events: i16) {
    let mut asked = libc::pollfd { fd, events, revents: 0 };
    while asked.revents == 0 {
        // A task that blocks all signals gets none; after an error the call is repeated.
        let _ = call(libc::SYS_ppoll, [&raw mut asked as usize, 1, 0, 0, 0, 0]);
    }
}

/// Shuts down sending: the other end of the socket sees an end, and may go on sending.
pub fn tell_no_more(socket: RawFd) {
    let _ = call(libc::SYS_shutdown, [flags(socket), flags(libc::SHUT_WR), 0, 0, 0, 0]);
}

/// A stack for a task, with an inaccessible page below. Returns the address of its end, or 0 if
/// there is no memory.
pub fn new_stack(bytes: usize) -> usize {
    let wish = Wish::anonymous(bytes + PAGE_BYTES);
    let Ok(start) = map(wish) else { return 0 };
    let nothing = flags(libc::PROT_NONE);
    let _ = call(libc::SYS_mprotect, [start, PAGE_BYTES, nothing, 0, 0, 0]);
    start + PAGE_BYTES + bytes
}

/// Clones a process with the same memory and the same descriptor table. It blocks all signals,
/// sends none at its end, and has the thread-local storage of the calling thread.
pub fn share_descriptors(
    life: extern "C" fn(*mut libc::c_void) -> libc::c_int,
    stack: usize,
) -> Result<i32, std::io::Error> {
    let (all, mut before) = (u64::MAX, 0_u64);
    let mask = |how: i32, new: *const u64, old: *mut u64| {
        call(libc::SYS_rt_sigprocmask, [flags(how), new as usize, old as usize, 8, 0, 0])
    };
    mask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    let shared = libc::CLONE_VM | libc::CLONE_FILES;
    let nothing = std::ptr::null_mut();
    // SAFETY: the stack belongs to the new task alone, for ever, and `life` uses nothing of this
    // thread's.
    let pid = unsafe { libc::clone(life, stack as *mut libc::c_void, shared, nothing) };
    let error = std::io::Error::last_os_error();
    mask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    if pid < 0 { Err(error) } else { Ok(pid) }
}

/// Reaps a process that was cloned here. False if it has not ended.
pub fn reap(pid: i32) -> bool {
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) == pid }
}

/// Kills a process that was cloned here, and reaps it.
pub fn end_child(pid: i32) {
    // SAFETY: the number is the child's until it is reaped, which is done here; no status is
    // written.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL);
    }
}

/// Reads 8 bytes at `address` of the process `pid`; the kernel requires no right when that process
/// shares this address space.
pub fn read_word_of(pid: i32, address: usize) -> Result<u64, std::io::Error> {
    let mut word = 0u64;
    let here = libc::iovec { iov_base: std::ptr::from_mut(&mut word).cast(), iov_len: 8 };
    let there = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: 8 };
    // SAFETY: `here` spans the word above; `there` is an address of the other process, which the
    // kernel checks.
    match unsafe { libc::process_vm_readv(pid, &raw const here, 1, &raw const there, 1, 0) } {
        8 => Ok(word),
        -1 => Err(std::io::Error::last_os_error()),
        _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// USERFAULTFD_IOC_NEW of linux/userfaultfd.h: _IO(0xAA, 0).
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;

/// Makes a userfaultfd of this address space from an open /dev/userfaultfd.
pub fn new_userfaultfd(device: &OwnedFd) -> Result<OwnedFd, std::io::Error> {
    use std::os::fd::AsRawFd;
    let how = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the argument of this request is a number, no pointer.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, how) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has rustix read the auxiliary vector that the injector wrote, which names no vDSO. By itself it
/// would ask the kernel for the program's, and read memory that the program may have unmapped.
#[cfg(feature = "injected")]
pub fn read_vector(environment: *mut *mut u8) {
    // SAFETY: main's own environment, on the stack that the injector made, with the vector behind
    // it; nothing of rustix was called before.
    unsafe { rustix::param::init(environment) };
}

/// Ends the sidecar at once, without the C library's clean-up of memory that it shares.
pub fn leave(code: i32) -> ! {
    // SAFETY: _exit has no conditions.
    unsafe { libc::_exit(code) }
}
