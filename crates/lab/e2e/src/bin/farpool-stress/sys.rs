//! System calls of the stress program, made through the C library as in any program.
//!
//! Almost all `unsafe` of the program is here. A call that fails in a way that no program would
//! expect ends the process with a message: that is a finding, too.

use std::ffi::{CString, c_void};
use std::io::Error;

/// Protection of ordinary memory.
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// Exit code after a system call that must not fail.
const UNEXPECTED: i32 = 8;

/// Ends the process at once.
pub fn exit(code: i32) -> ! {
    // SAFETY: takes a plain number.
    unsafe { libc::_exit(code) }
}

/// Writes to standard error without allocating or locking.
pub fn say(text: &str) {
    // SAFETY: the pointer and length describe `text`.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Ends the process: `what` failed and must not fail.
#[cold]
pub fn unexpected(what: &str) -> ! {
    let error = Error::last_os_error();
    say(&format!("UNEXPECTED: {what}: {error} (pid {})\n", std::process::id()));
    exit(UNEXPECTED)
}

/// Maps anonymous private memory.
pub fn map(at: usize, bytes: usize, protection: i32, flags: i32) -> usize {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: maps fresh memory, or over a range that the caller owns.
    let mapped = unsafe { libc::mmap(at as *mut c_void, bytes, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        unexpected("mmap");
    }
    mapped as usize
}

/// Unmaps a range that is no longer referenced.
pub fn unmap(start: usize, bytes: usize) {
    // SAFETY: the caller owns the range and gives it up.
    if unsafe { libc::munmap(start as *mut c_void, bytes) } != 0 {
        unexpected("munmap");
    }
}

/// Resizes or moves a mapping. Returns None if the kernel has no room for it there.
pub fn remap(start: usize, old: usize, new: usize, flags: i32, to: usize) -> Option<usize> {
    // SAFETY: the caller owns the range and uses only the result from now on.
    let mapped = unsafe { libc::mremap(start as *mut c_void, old, new, flags, to as *mut c_void) };
    if mapped != libc::MAP_FAILED {
        return Some(mapped as usize);
    }
    // EFAULT: the range has become several mappings, which older kernels do not move together, nor
    // newer ones if a userfaultfd is registered with one of them.
    if !matches!(Error::last_os_error().raw_os_error(), Some(libc::ENOMEM | libc::EFAULT)) {
        unexpected("mremap");
    }
    None
}

/// Returns how many pages from `start` on may be written to, at most `pages`.
pub fn writable_pages(start: usize, pages: usize) -> usize {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        unexpected("/proc/self/maps")
    };
    let mut end = start;
    for line in maps.lines() {
        let mut words = line.split([' ', '-']);
        let mut address = || usize::from_str_radix(words.next().unwrap_or_default(), 16);
        let (Ok(from), Ok(to)) = (address(), address()) else { unexpected("/proc/self/maps") };
        if from <= end && end < to && words.next().is_some_and(|rights| rights.starts_with("rw")) {
            end = to;
        }
    }
    ((end - start) / PAGE).min(pages)
}

/// Advises the kernel on a range. A refused advice is a finding only if it discards pages.
pub fn advise(start: usize, bytes: usize, advice: i32) {
    // SAFETY: the caller owns the range and has noted what the advice does to it.
    let result = unsafe { libc::madvise(start as *mut c_void, bytes, advice) };
    if result != 0 && matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE) {
        unexpected("madvise");
    }
}

/// Changes the protection of a range.
pub fn protect(start: usize, bytes: usize, protection: i32) {
    // SAFETY: the caller owns the range and touches it accordingly.
    if unsafe { libc::mprotect(start as *mut c_void, bytes, protection) } != 0 {
        unexpected("mprotect");
    }
}

/// The words at an address of a region.
pub fn words(address: usize, count: usize) -> &'static mut [u64] {
    // SAFETY: regions hand out addresses of their own mapped pages, each region belongs to one
    // thread, and no reference outlives the operation that asked for it.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u64, count) }
}

/// The bytes of pages of a region.
pub fn bytes(address: usize, pages: usize) -> &'static mut [u8] {
    // SAFETY: as `words`.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, pages * PAGE) }
}

/// Forks. `child` runs in the child, which then ends. Returns the child's process id.
pub fn fork(child: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `child`, which uses only what belongs to the forking thread, and
    // exits.
    match unsafe { libc::fork() } {
        -1 => unexpected("fork"),
        0 => {
            child();
            exit(0)
        }
        pid => pid,
    }
}

/// Waits for a child. Ends this process, too, if the child failed.
pub fn wait_for(pid: i32, what: &str) {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a live place for the result.
        let got = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        if got == pid {
            break;
        }
        if Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            unexpected("waitpid");
        }
    }
    if status != 0 {
        say(&format!("CHILD {pid} of {what} ended with status {status:#x}\n"));
        exit(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { UNEXPECTED });
    }
}

/// Runs /bin/true by posix_spawn(3) with the program's environment.
pub fn spawn_true() {
    unsafe extern "C" {
        static environ: *const *mut libc::c_char;
    }
    let path = CString::new("/bin/true").unwrap_or_default();
    let arguments = [path.as_ptr().cast_mut(), std::ptr::null_mut()];
    let mut pid = 0;
    // SAFETY: all pointers are live for the call and arrays end with null.
    let result = unsafe {
        libc::posix_spawn(
            &raw mut pid,
            path.as_ptr(),
            std::ptr::null(),
            std::ptr::null(),
            arguments.as_ptr(),
            environ,
        )
    };
    if result != 0 {
        unexpected("posix_spawn");
    }
    wait_for(pid, "posix_spawn");
}

/// A vector in memory that is never far.
#[derive(Debug)]
pub struct LocalVec<T> {
    start: usize,
    capacity: usize,
    length: usize,
    kind: std::marker::PhantomData<T>,
}

impl<T: Copy> LocalVec<T> {
    /// An empty vector.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1).next_power_of_two();
        let bytes = (capacity * size_of::<T>()).next_multiple_of(PAGE);
        let start = map(0, bytes, READ_WRITE, libc::MAP_STACK);
        LocalVec { start, capacity, length: 0, kind: std::marker::PhantomData }
    }

    /// A copy of a slice.
    pub fn from_slice(values: &[T]) -> Self {
        let mut copy = LocalVec::new(values.len());
        copy.length = values.len();
        copy.as_mut_slice().copy_from_slice(values);
        copy
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `length` values at `start` were initialised.
        unsafe { std::slice::from_raw_parts(self.start as *const T, self.length) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start as *mut T, self.length) }
    }

    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    pub fn resize(&mut self, length: usize, value: T) {
        if length > self.capacity {
            let mut larger = LocalVec::new(length);
            larger.length = self.length;
            larger.as_mut_slice().copy_from_slice(self.as_slice());
            *self = larger;
        }
        let old = self.length;
        // SAFETY: `length` fits the capacity; the new values are initialised before they can be
        // read.
        unsafe {
            for index in old..length {
                (self.start as *mut T).add(index).write(value);
            }
        }
        self.length = length;
    }
}

impl<T> Drop for LocalVec<T> {
    fn drop(&mut self) {
        let bytes = (self.capacity * size_of::<T>()).next_multiple_of(PAGE);
        unmap(self.start, bytes);
    }
}

/// Bytes of a page.
pub const PAGE: usize = 4096;
