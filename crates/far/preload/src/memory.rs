//! The mmap family.

use std::ffi::{c_int, c_void};

use farpool_pager::Pager;
use farpool_units::{PAGE_BYTES, at_most};

use crate::{guest, note_early_mapping, pager, set_errno, status};

/// Mappings with any of these flags stay local: shared, stacks, huge pages, locked from the start.
const LOCAL_FLAGS: c_int =
    libc::MAP_SHARED | libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;
/// Until the settings can be read, mappings of at least this size are noted as far.
const EARLY_THRESHOLD_BYTES: usize = 64 << 10;
/// End of the addresses that far memory can have.
const USER_END: usize = 1 << 47;
/// Advice values that the libc crate does not name.
const MADV_DONTNEED_LOCKED: c_int = 24;
const MADV_GUARD_INSTALL: c_int = 102;

fn page_up(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX & !(PAGE_BYTES - 1))
}

/// Whether the kernel would accept this as a range of the program's addresses; if not, its call
/// fails and must change nothing.
fn is_range(start: usize, bytes: usize) -> bool {
    let end = start.checked_add(bytes);
    bytes > 0 && start.is_multiple_of(PAGE_BYTES) && end.is_some_and(|end| end <= USER_END)
}

fn may_be_far(length: usize, protection: c_int, flags: c_int, threshold_bytes: usize) -> bool {
    let wanted = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    flags & wanted == wanted
        && flags & LOCAL_FLAGS == 0
        && protection & libc::PROT_EXEC == 0
        && length >= threshold_bytes
}

/// The plain system call; sets errno like the C library's function.
fn kernel_mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the program asked for exactly this call.
    let result = unsafe {
        libc::syscall(libc::SYS_mmap, address, length, protection, flags, descriptor, offset)
    };
    result as *mut c_void
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let Some(pager) = pager() else {
        let mapped = kernel_mmap(address, length, protection, flags, descriptor, offset);
        if mapped != libc::MAP_FAILED
            && may_be_far(length, protection, flags, EARLY_THRESHOLD_BYTES)
        {
            note_early_mapping(mapped as usize, mapped as usize + page_up(length));
        }
        return mapped;
    };
    if guest::is_memory(flags, descriptor, length, offset) {
        return map_guest(pager, address, length, protection, flags, descriptor);
    }
    let threshold_bytes = at_most(pager.settings().threshold_bytes);
    let far = may_be_far(length, protection, flags, threshold_bytes);
    if far && protection != libc::PROT_NONE && pager.must_refuse() {
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let (start, bytes) = (address as usize, page_up(length));
    let replaces = flags & libc::MAP_FIXED != 0 && flags & libc::MAP_FIXED_NOREPLACE == 0;
    if replaces && is_range(start, bytes) && pager.touches_far(start, start + bytes) {
        // A call that fails must remove nothing, but far pages would be gone by then: try it
        // elsewhere first.
        let none = std::ptr::null_mut();
        let trial_flags = flags & !(libc::MAP_FIXED | libc::MAP_POPULATE | libc::MAP_LOCKED);
        let trial = kernel_mmap(none, length, protection, trial_flags, descriptor, offset);
        if trial == libc::MAP_FAILED {
            return trial;
        }
        // SAFETY: the mapping that was made above.
        unsafe { libc::syscall(libc::SYS_munmap, trial, length) };
        pager.remove(start, start + bytes);
    }
    // Memory that can be far is populated when the pager knows it, which the kernel's mmap would
    // do before.
    let populates = far && flags & libc::MAP_POPULATE != 0 && protection & libc::PROT_WRITE != 0;
    let flags = if populates { flags & !libc::MAP_POPULATE } else { flags };
    let mapped = kernel_mmap(address, length, protection, flags, descriptor, offset);
    if far && mapped != libc::MAP_FAILED {
        pager.add(mapped as usize, mapped as usize + page_up(length));
        if populates {
            pager.before_populating(bytes);
            // SAFETY: the program asked for that memory; as with MAP_POPULATE, errors are nobody's.
            unsafe { libc::syscall(libc::SYS_madvise, mapped, length, libc::MADV_POPULATE_WRITE) };
        }
    }
    mapped
}

/// Maps the guest's memory, which the program takes for a file's.
fn map_guest(
    pager: &'static Pager,
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
) -> *mut c_void {
    let kept = flags & !(libc::MAP_TYPE | libc::MAP_POPULATE | libc::MAP_SYNC);
    let flags = kept | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the program asked for this memory, if from another source.
    let mapped = unsafe { mmap(address, length, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return mapped;
    }
    let (start, end) = (mapped as usize, mapped as usize + page_up(length));
    match guest::has_memory(pager, start, end, descriptor) {
        Ok(()) => mapped,
        Err(errno) => {
            // SAFETY: the mapping that was made above.
            unsafe { munmap(mapped, length) };
            set_errno(errno);
            libc::MAP_FAILED
        }
    }
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the same function.
    unsafe { mmap(address, length, protection, flags, descriptor, offset) }
}

/// # Safety
/// As munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    if let Some(pager) = pager()
        && is_range(address as usize, page_up(length))
    {
        pager.remove(address as usize, address as usize + page_up(length));
    }
    // SAFETY: the program asked for exactly this call.
    status(unsafe { libc::syscall(libc::SYS_munmap, address, length) })
}

/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let (start, end) = (address as usize, (address as usize).saturating_add(page_up(length)));
    let kernel = || {
        // SAFETY: the program asked for exactly this call.
        status(unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) })
    };
    if let Some(pager) = pager()
        && is_range(start, end - start)
    {
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED | MADV_GUARD_INSTALL => {
                if pager.is_active() {
                    return discard(pager, start, end, advice);
                }
                let result = match advice {
                    libc::MADV_FREE => free_natively(pager, start, end),
                    _ => kernel(),
                };
                // It may have become active during the kernel's call, which then did not see all
                // pages.
                return match result {
                    0 if pager.is_active() => discard(pager, start, end, advice),
                    result => result,
                };
            }
            libc::MADV_COLD | libc::MADV_PAGEOUT if pager.is_active() => {
                pager.retire(start, end);
                return 0;
            }
            // A child has no such mapping: it forgets its pages. Noted after the kernel has applied
            // it, and forgotten before (MADV_DOFORK): a child that is born in between ends, and
            // never reads what is not its own. ENOMEM: the range has holes, and the rest of it was
            // done.
            libc::MADV_DONTFORK => {
                let result = kernel();
                // SAFETY: errno of the calling thread.
                if result == 0 || unsafe { *libc::__errno_location() } == libc::ENOMEM {
                    pager.set_unshared(start, end, true);
                }
                return result;
            }
            libc::MADV_DOFORK => pager.set_unshared(start, end, false),
            libc::MADV_POPULATE_WRITE if pager.touches_far(start, end) => {
                pager.before_populating(end - start);
            }
            // A child must see these pages as zeros: the kernel does that, the far layers do not,
            // so the pages stay local.
            libc::MADV_WIPEONFORK => keep_local(pager, start, end),
            _ => {}
        }
    }
    kernel()
}

/// MADV_FREE while nothing is far yet. Memory that can be far is discarded at once: the kernel
/// drops such pages under pressure, later even from the victim buffer, without reporting it.
fn free_natively(pager: &'static Pager, start: usize, end: usize) -> c_int {
    let advise = |start: usize, end: usize, advice: c_int| {
        // SAFETY: the program gave up the contents of this range.
        status(unsafe { libc::syscall(libc::SYS_madvise, start, end - start, advice) })
    };
    let (mut from, mut result) = (start, 0);
    while let Some((far_start, far_end)) = pager.first_far(from, end) {
        if from < far_start {
            result |= advise(from, far_start, libc::MADV_FREE);
        }
        result |= advise(far_start, far_end, libc::MADV_DONTNEED);
        from = far_end;
    }
    if from < end {
        result |= advise(from, end, libc::MADV_FREE);
    }
    result
}

fn discard(pager: &'static Pager, start: usize, end: usize, advice: c_int) -> c_int {
    as_c_result(pager.discard(start, end, advice).unwrap_or(Ok(())))
}

/// # Safety
/// As posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(
    address: *mut c_void,
    length: usize,
    advice: c_int,
) -> c_int {
    // Like glibc: in POSIX DONTNEED may destroy nothing, so it is ignored.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: as madvise; the other advice values have the same numbers.
    let result = unsafe { madvise(address, length, advice) };
    if result == 0 {
        return 0;
    }
    // SAFETY: errno of the calling thread.
    unsafe { *libc::__errno_location() }
}

/// Brings in every page of the range and keeps the range local.
fn keep_local(pager: &'static Pager, start: usize, end: usize) {
    if !pager.touches_far(start, end) {
        return;
    }
    pager.pin(start, end, true);
    populate(start, end);
}

/// Touches every page of the range, so that it is resident.
fn populate(start: usize, end: usize) {
    // SAFETY: populating reads the program's own memory; errors (a hole, no permission) change
    // nothing.
    unsafe { libc::syscall(libc::SYS_madvise, start, end - start, libc::MADV_POPULATE_READ) };
}

/// # Safety
/// As mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let (start, end) = (old as usize, (old as usize).saturating_add(page_up(old_length)));
    let moving = Move { start, end, new_bytes: page_up(new_length), flags, fixed: new as usize };
    let kernel = || kernel_mremap(old, old_length, new_length, flags, new);
    let Some(pager) = pager() else {
        return kernel();
    };
    if old_length == 0
        || new_length == 0
        || !is_range(start, end - start)
        || !pager.touches_far(start, end)
    {
        if flags & libc::MREMAP_FIXED != 0 && is_range(moving.fixed, moving.new_bytes) {
            pager.remove(moving.fixed, moving.fixed + moving.new_bytes);
        }
        return kernel();
    }
    let mut mapped = libc::MAP_FAILED;
    let keeps = flags & libc::MREMAP_DONTUNMAP != 0;
    let native = pager.remap_natively((start, end), keeps, || {
        mapped = kernel();
        let moved = (mapped as usize, (mapped as usize).wrapping_add(moving.new_bytes));
        (mapped != libc::MAP_FAILED).then_some(moved)
    });
    if native.is_some() { mapped } else { moving.carry(pager) }
}

/// A far mapping whose size or place changes.
struct Move {
    start: usize,
    end: usize,
    new_bytes: usize,
    flags: c_int,
    fixed: usize,
}

impl Move {
    fn carry(&self, pager: &'static Pager) -> *mut c_void {
        let old_bytes = self.end - self.start;
        if self.flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) == 0 {
            if self.new_bytes <= old_bytes {
                return self.shrink(pager);
            }
            if self.grow_in_place(pager) {
                return self.start as *mut c_void;
            }
            if self.flags & libc::MREMAP_MAYMOVE == 0 {
                set_errno(libc::ENOMEM);
                return libc::MAP_FAILED;
            }
        }
        self.relocate(pager, old_bytes)
    }

    fn shrink(&self, pager: &'static Pager) -> *mut c_void {
        let keep = self.start + self.new_bytes;
        if keep < self.end {
            pager.remove(keep, self.end);
            // SAFETY: the tail that the program gives up.
            unsafe { libc::syscall(libc::SYS_munmap, keep, self.end - keep) };
        }
        self.start as *mut c_void
    }

    fn grow_in_place(&self, pager: &'static Pager) -> bool {
        let old_bytes = self.end - self.start;
        let old = self.start as *mut c_void;
        let grown = kernel_mremap(old, old_bytes, self.new_bytes, 0, std::ptr::null_mut());
        if grown == libc::MAP_FAILED {
            return false;
        }
        pager.add_to(self.end, self.start + self.new_bytes);
        true
    }

    /// Makes the pager move the mapping with its contents to a place that is reserved for it.
    fn relocate(&self, pager: &'static Pager, old_bytes: usize) -> *mut c_void {
        let keeps = self.flags & libc::MREMAP_DONTUNMAP != 0;
        let fixed = self.flags & libc::MREMAP_FIXED != 0;
        if fixed && !self.may_be_fixed(old_bytes) || keeps && self.new_bytes != old_bytes {
            set_errno(libc::EINVAL);
            return libc::MAP_FAILED;
        }
        let to = if fixed {
            pager.remove(self.fixed, self.fixed + self.new_bytes);
            self.fixed
        } else {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let none = std::ptr::null_mut();
            let place = kernel_mmap(none, self.new_bytes, libc::PROT_NONE, flags, -1, 0);
            if place == libc::MAP_FAILED {
                return place;
            }
            place as usize
        };
        if let Err(errno) = pager.carry(self.start, self.end, to, self.new_bytes, keeps) {
            if !fixed {
                // SAFETY: the place that was reserved.
                unsafe { libc::syscall(libc::SYS_munmap, to, self.new_bytes) };
            }
            set_errno(errno);
            return libc::MAP_FAILED;
        }
        to as *mut c_void
    }

    /// The kernel's condition: an aligned target that does not overlap the source.
    fn may_be_fixed(&self, old_bytes: usize) -> bool {
        let Some(end) = self.fixed.checked_add(self.new_bytes) else {
            return false;
        };
        is_range(self.fixed, self.new_bytes)
            && (end <= self.start || self.start + old_bytes <= self.fixed)
    }
}

fn kernel_mremap(
    old: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // SAFETY: the program asked for exactly this call.
    let result =
        unsafe { libc::syscall(libc::SYS_mremap, old, old_length, new_length, flags, new) };
    result as *mut c_void
}

/// # Safety
/// As mlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, length: usize) -> c_int {
    lock(address as usize, length, || {
        // SAFETY: the program asked for exactly this call.
        status(unsafe { libc::syscall(libc::SYS_mlock, address, length) })
    })
}

/// # Safety
/// As mlock2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, length: usize, flags: c_int) -> c_int {
    lock(address as usize, length, || {
        // SAFETY: the program asked for exactly this call.
        status(unsafe { libc::syscall(libc::SYS_mlock2, address, length, flags) })
    })
}

fn lock(address: usize, length: usize, kernel: impl FnOnce() -> c_int) -> c_int {
    let Some(pager) = pager() else {
        return kernel();
    };
    let start = address & !(PAGE_BYTES - 1);
    let end = page_up(address.saturating_add(length));
    if length > 0 {
        pager.pin(start, end, true);
    }
    let result = kernel();
    if result != 0 && length > 0 {
        pager.pin(start, end, false);
    }
    result
}

/// # Safety
/// As munlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(address: *const c_void, length: usize) -> c_int {
    // SAFETY: the program asked for exactly this call.
    let result = status(unsafe { libc::syscall(libc::SYS_munlock, address, length) });
    if let Some(pager) = pager()
        && result == 0
        && length > 0
    {
        let start = address as usize & !(PAGE_BYTES - 1);
        pager.pin(start, page_up((address as usize).saturating_add(length)), false);
    }
    result
}

/// Brings in everything far and keeps it. The kernel's own call is not made: it would also lock,
/// and populate, the pager's reserve.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    let Some(pager) = pager() else {
        // SAFETY: the program asked for exactly this call.
        return status(unsafe { libc::syscall(libc::SYS_mlockall, flags) });
    };
    if flags & !(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) != 0 || flags == 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    pager.pin(0, usize::MAX & !(PAGE_BYTES - 1), true);
    if flags & libc::MCL_CURRENT != 0 && flags & libc::MCL_ONFAULT == 0 {
        let mut from = 0;
        while let Some((start, end)) = pager.first_far(from, USER_END) {
            populate(start, end);
            from = end;
        }
    }
    0
}

/// Undoes [`mlockall`].
#[unsafe(no_mangle)]
pub extern "C" fn munlockall() -> c_int {
    if let Some(pager) = pager() {
        pager.pin(0, usize::MAX & !(PAGE_BYTES - 1), false);
    }
    // SAFETY: the program asked for exactly this call.
    status(unsafe { libc::syscall(libc::SYS_munlockall) })
}

fn as_c_result(result: Result<(), i32>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}
