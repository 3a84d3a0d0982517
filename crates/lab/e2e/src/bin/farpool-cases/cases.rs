//! The cases.

use crate::direct::fork_direct;
use crate::forks::{
    fork_at_gate, fork_no_access, fork_signals, fork_stdio, fork_thread_data, fork_unshared,
    fork_without_blade,
};
use crate::full::{fill_until_given_back, fill_until_refused};
use crate::memory::*;
use crate::merged::{merged, merged_unsplit};
use crate::programs;
use crate::rights::{rights_early, rights_kept};
use crate::unchanged::unchanged_pages;

/// Every case by its name.
pub const ALL: &[(&str, fn())] = &[
    ("mremap-resident-twice", mremap_resident_twice),
    ("mremap-read-only", mremap_read_only),
    ("mremap-no-access", mremap_no_access),
    ("mremap-several", mremap_several),
    ("munmap-refused", munmap_refused),
    ("mmap-fixed-refused", mmap_fixed_refused),
    ("madvise-refused", madvise_refused),
    ("discard-locked", discard_locked),
    ("free-at-once", free_at_once),
    ("many-mappings", many_mappings),
    ("fork-chain", fork_chain),
    ("fork-at-gate", fork_at_gate),
    ("fork-direct", fork_direct),
    ("fork-no-access", fork_no_access),
    ("fork-without-blade", fork_without_blade),
    ("fork-unshared", fork_unshared),
    ("fork-signals", fork_signals),
    ("fork-stdio", fork_stdio),
    ("fork-thread-data", fork_thread_data),
    ("vmsplice", vmsplice),
    ("unchanged-pages", unchanged_pages),
    ("merged", merged),
    ("merged-unsplit", merged_unsplit),
    ("fill-until-refused", fill_until_refused),
    ("fill-until-given-back", fill_until_given_back),
    ("rights-kept", rights_kept),
    ("rights-early", rights_early),
    ("environments", programs::environments),
    (programs::IS_HELD, programs::is_held),
];

const MIB: usize = 1 << 20;

/// Pages that a move leaves resident must be known to the next move.
fn mremap_resident_twice() {
    let _ballast = ballast();
    let mut region = Filled::new(4 * MIB, 1);
    for _ in 0..4 {
        let to = map(0, 64 * MIB, libc::PROT_NONE, 0) + 16 * MIB;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        region = region.moved_to(remap(region.start, region.bytes, region.bytes, flags, to));
    }
    region.check();
}

fn mremap_protected(protection: i32) {
    let (far, _ballast) = (Filled::new(16 * MIB, 1), ballast());
    let near = Filled::new(4 * MIB, 2);
    for region in [far, near] {
        protect(region.start, region.bytes, protection);
        let bytes = region.bytes * 2;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let to = map(0, bytes, libc::PROT_NONE, 0);
        let moved = region.moved_to(remap(region.start, region.bytes, bytes, flags, to));
        if protection == libc::PROT_NONE {
            // SAFETY: a plain system call; only the kernel uses the address.
            let result = unsafe { libc::write(1, moved.start as *const _, 1) };
            require(
                result == -1 && errno() == libc::EFAULT,
                "a moved mapping keeps its protection",
            );
        }
        protect(moved.start, bytes, READ_WRITE);
        moved.check();
        check_zeros(moved.start + region.bytes, region.bytes);
    }
}

fn mremap_read_only() {
    mremap_protected(libc::PROT_READ);
}

fn mremap_no_access() {
    mremap_protected(libc::PROT_NONE);
}

/// Several adjacent mappings, a small local one first, move together or not at all.
fn mremap_several() {
    let region = Filled::new(16 * MIB, 1);
    let small = map(region.start, 2 * PAGE, READ_WRITE, libc::MAP_FIXED);
    let _ballast = ballast();
    check_zeros(small, 2 * PAGE);
    let (flags, to) =
        (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, map(0, region.bytes, READ_WRITE, 0));
    // SAFETY: ranges of the case's own.
    let moved = unsafe {
        libc::mremap(
            region.start as *mut _,
            region.bytes,
            region.bytes,
            flags,
            to as *mut std::ffi::c_void,
        )
    };
    // Kernels before 6.17 refuse.
    let start = if moved == libc::MAP_FAILED { region.start } else { to };
    check_zeros(start, 2 * PAGE);
    let copy = slice(start, region.bytes);
    let whole = Filled::new(region.bytes, 1);
    require(
        copy[2 * PAGE..] == slice(whole.start, whole.bytes)[2 * PAGE..],
        "contents after mremap",
    );
}

/// A munmap that fails discards nothing.
fn munmap_refused() {
    let (far, _ballast) = (Filled::new(16 * MIB, 1), ballast());
    require(unmap(far.start + 1, far.bytes) == libc::EINVAL, "munmap of an odd address");
    far.check();
}

/// An mmap that fails discards nothing.
fn mmap_fixed_refused() {
    let (far, _ballast) = (Filled::new(16 * MIB, 1), ballast());
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: the call must fail: there is no such descriptor.
    let mapped = unsafe { libc::mmap(far.start as *mut _, far.bytes, READ_WRITE, flags, 9999, 0) };
    require(mapped == libc::MAP_FAILED && errno() == libc::EBADF, "mmap of no descriptor");
    far.check();
}

/// A madvise that fails discards nothing.
fn madvise_refused() {
    let (far, _ballast) = (Filled::new(16 * MIB, 1), ballast());
    require(advise(far.start + 1, PAGE, libc::MADV_DONTNEED) == libc::EINVAL, "an odd address");
    require(advise(far.start, far.bytes, libc::MADV_REMOVE) == libc::EINVAL, "MADV_REMOVE");
    far.check();
}

fn discard_locked() {
    const MADV_DONTNEED_LOCKED: i32 = 24;
    let (far, _ballast) = (Filled::new(16 * MIB, 1), ballast());
    require(advise(far.start, far.bytes, MADV_DONTNEED_LOCKED) == 0, "MADV_DONTNEED_LOCKED");
    check_zeros(far.start, far.bytes);
}

/// MADV_FREE discards at once, before the pager is active and after: the kernel must not drop pages
/// later that may have been moved out. Memory beside the range keeps its contents.
fn free_at_once() {
    let native = Filled::new(2 * MIB, 1);
    require(advise(native.start + MIB, MIB, libc::MADV_FREE) == 0, "MADV_FREE");
    check_zeros(native.start + MIB, MIB);
    let (far, _ballast) = (Filled::new(16 * MIB, 2), ballast());
    far.check();
    require(advise(far.start + 8 * MIB, 8 * MIB, libc::MADV_FREE) == 0, "MADV_FREE");
    check_zeros(far.start + 8 * MIB, 8 * MIB);
    Filled { bytes: 8 * MIB, ..far }.check();
    Filled { bytes: MIB, ..native }.check();
    let gone = map(0, 4 * PAGE, READ_WRITE, 0);
    require(unmap(gone + PAGE, PAGE) == 0, "munmap");
    require(advise(gone, 4 * PAGE, libc::MADV_FREE) == libc::ENOMEM, "a hole");
}

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("Anonymous:")).unwrap_or("");
    let kib = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    kib.unwrap_or(usize::MAX / 1024) * 1024
}

/// Waits until the process's resident memory is within the tests' limit, for at most 5 s.
fn require_limit(what: &str) {
    const LIMIT_BYTES: usize = 48 << 20;
    for _ in 0..100 {
        if resident_bytes() < LIMIT_BYTES {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    different(&format!("{} bytes are resident: {what}", resident_bytes()));
}

/// Many small mappings, adjacent ones with different access rights, so that no large range is one
/// mapping.
fn many_mappings() {
    let _ballast = ballast();
    let regions: Vec<Filled> = (0..1500)
        .map(|number| {
            let region = Filled::new(128 << 10, number);
            protect(region.start, PAGE, libc::PROT_READ);
            region
        })
        .collect();
    require_limit("many small mappings");
    regions.iter().for_each(Filled::check);
    require_limit("many small mappings that were read");
}

/// Each process forks the next one, so that a page may be many layers deep.
fn fork_chain() {
    let regions = [Filled::new(8 * MIB, 1), ballast()];
    descend(&regions, 1);
}

fn descend(regions: &[Filled], depth: usize) {
    const DEPTH: usize = 12;
    if depth == DEPTH {
        return regions[1].check();
    }
    let own = Filled::new(2 * MIB, depth);
    // SAFETY: the process has one thread; the child continues with its own copy.
    match unsafe { libc::fork() } {
        -1 => different("fork"),
        0 => {
            own.check();
            let part = &regions[0];
            let third = Filled::at(part.start + depth % 8 * MIB, MIB, depth + 100);
            descend(regions, depth + 1);
            third.check();
            let code = i32::from(depth > DEPTH);
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a live place for the status.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            require(status == 0, &format!("child at depth {depth} ended with {status:#x}"));
            own.check();
        }
    }
}

/// Pages in a pipe keep the contents they had when they were spliced.
fn vmsplice() {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    let pages = 12;
    let region = Filled { bytes: pages * PAGE, ..Filled::new(4 * MIB, 3) };
    let Ok((mut reader, writer)) = std::io::pipe() else { different("pipe") };
    let vector = libc::iovec { iov_base: region.start as *mut _, iov_len: region.bytes };
    // SAFETY: the memory stays mapped and unchanged until the pipe is read.
    let spliced = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const vector, 1, 0) };
    require(usize::try_from(spliced).ok() == Some(region.bytes), "vmsplice");
    let ballast = ballast();
    ballast.check();
    let mut copy = vec![0_u8; region.bytes];
    require(reader.read_exact(&mut copy).is_ok(), "reading the pipe");
    region.check_copy(&copy);
    region.check();
}
