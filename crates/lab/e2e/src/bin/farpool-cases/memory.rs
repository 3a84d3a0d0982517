//! Mappings filled with a pattern, and checks against it.

use std::ffi::c_void;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Protection of ordinary memory.
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// Exit code after wrong data was read.
const WRONG_DATA: i32 = 9;
/// Exit code after any other difference.
const DIFFERENT: i32 = 8;
/// Memory touched so that older memory becomes far: well above the limit of the tests.
const BALLAST_BYTES: usize = 96 << 20;

/// A mapping, filled with a pattern of its own.
#[derive(Clone, Copy, Debug)]
pub struct Filled {
    pub start: usize,
    pub bytes: usize,
    pub seed: usize,
}

/// Ends the program: something differs from a run without Farpool.
pub fn different(what: &str) -> ! {
    eprintln!("DIFFERENT: {what} ({})", std::io::Error::last_os_error());
    std::process::exit(DIFFERENT)
}

/// Ends the program: it read data that it did not write.
pub fn wrong_data(what: &str) -> ! {
    eprintln!("WRONG DATA: {what}");
    std::process::exit(WRONG_DATA)
}

/// Ends the program unless `condition` holds.
pub fn require(condition: bool, what: &str) {
    if !condition {
        different(what);
    }
}

/// The errno of the last call.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Maps anonymous memory.
pub fn map(at: usize, bytes: usize, protection: i32, flags: i32) -> usize {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: fresh memory, or over a range of the case's own.
    let mapped = unsafe { libc::mmap(at as *mut c_void, bytes, protection, flags, -1, 0) };
    require(mapped != libc::MAP_FAILED, "mmap");
    mapped as usize
}

/// Moves a mapping.
pub fn remap(start: usize, old: usize, new: usize, flags: i32, to: usize) -> usize {
    // SAFETY: ranges of the case's own.
    let mapped = unsafe { libc::mremap(start as *mut c_void, old, new, flags, to as *mut c_void) };
    require(mapped != libc::MAP_FAILED, "mremap");
    mapped as usize
}

/// Calls madvise(2). Returns the errno, or 0.
pub fn advise(start: usize, bytes: usize, advice: i32) -> i32 {
    // SAFETY: a range of the case's own.
    let result = unsafe { libc::madvise(start as *mut c_void, bytes, advice) };
    if result == 0 { 0 } else { errno() }
}

/// Calls munmap(2). Returns the errno, or 0.
pub fn unmap(start: usize, bytes: usize) -> i32 {
    // SAFETY: a range of the case's own.
    let result = unsafe { libc::munmap(start as *mut c_void, bytes) };
    if result == 0 { 0 } else { errno() }
}

/// Calls mprotect(2), which must succeed.
pub fn protect(start: usize, bytes: usize, protection: i32) {
    // SAFETY: a range of the case's own.
    let result = unsafe { libc::mprotect(start as *mut c_void, bytes, protection) };
    require(result == 0, "mprotect");
}

/// The bytes of a mapping.
pub fn slice(start: usize, bytes: usize) -> &'static mut [u8] {
    // SAFETY: a mapped range of the case's own; cases are careful not to keep two.
    unsafe { std::slice::from_raw_parts_mut(start as *mut u8, bytes) }
}

fn word(seed: usize, index: usize) -> u64 {
    let word = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64;
    word.wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1
}

impl Filled {
    /// Maps and fills memory.
    pub fn new(bytes: usize, seed: usize) -> Filled {
        Filled::at(map(0, bytes, READ_WRITE, 0), bytes, seed)
    }

    /// Fills memory that is mapped at `start`.
    pub fn at(start: usize, bytes: usize, seed: usize) -> Filled {
        for (index, bytes) in slice(start, bytes).chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(seed, index).to_ne_bytes());
        }
        Filled { start, bytes, seed }
    }

    /// Describes the same contents at another address.
    pub fn moved_to(self, start: usize) -> Filled {
        Filled { start, ..self }
    }

    /// Ends the program unless `copy` equals the beginning of the pattern.
    pub fn check_copy(&self, copy: &[u8]) {
        for (index, bytes) in copy.chunks_exact(8).enumerate() {
            if bytes != word(self.seed, index).to_ne_bytes() {
                eprintln!(
                    "WRONG DATA at byte {} of {} (page at {:#x}): {bytes:x?}",
                    index * 8,
                    copy.len(),
                    copy.as_ptr() as usize + index * 8,
                );
                std::process::exit(WRONG_DATA);
            }
        }
    }

    /// Ends the program unless the range still holds the pattern.
    pub fn check(&self) {
        self.check_copy(slice(self.start, self.bytes));
    }
}

/// Ends the program unless the range holds zeros.
pub fn check_zeros(start: usize, bytes: usize) {
    if let Some(at) = slice(start, bytes).iter().position(|byte| *byte != 0) {
        eprintln!("WRONG DATA at {:#x}: not zero", start + at);
        std::process::exit(WRONG_DATA);
    }
}

/// Touches more memory than the limit, so that memory filled before becomes far.
pub fn ballast() -> Filled {
    let filled = Filled::new(BALLAST_BYTES, 999);
    filled.check();
    filled
}
