//! The pager's own memory, and what the kernel's files say of the program's.

use std::io::Error;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

use farpool_kernel::lock;
use farpool_units::{PAGE_BYTES, at_most};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::protection::Protection;
use crate::sys::program::{program_in_proc, sidecars_program};

/// Mappings of the pager that are included when its own memory is counted; later ones are not
/// (there is a new one for each 256 MiB of far memory).
const COUNTED_MAPPINGS: usize = 1024;
static MAPPINGS: [(AtomicUsize, AtomicUsize); COUNTED_MAPPINGS] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; COUNTED_MAPPINGS];
static MAPPING_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held while memory is mapped and noted, so that a sidecar's list of its own memory is complete.
static MAPPING: Mutex<()> = Mutex::new(());

/// Maps anonymous memory that stays local. Untouched parts cost nothing. A sidecar's mapping is not
/// inherited by the program's children.
pub fn map_local(bytes: usize) -> Result<usize, Error> {
    let is_sidecar = sidecars_program().is_some();
    // Elsewhere a lock could be inherited by a child of the program.
    let _mapping = is_sidecar.then(|| lock(&MAPPING));
    if is_sidecar && MAPPING_COUNT.load(Relaxed) >= COUNTED_MAPPINGS {
        // A mapping that is not noted would be taken for the program's.
        return Err(Error::from_raw_os_error(libc::ENOMEM));
    }
    let base = map_uncounted(bytes)?;
    let index = MAPPING_COUNT.fetch_add(1, Relaxed);
    if let Some((start, length)) = MAPPINGS.get(index) {
        start.store(base, Relaxed);
        length.store(bytes, Relaxed);
    }
    if is_sidecar {
        keep_from_children(base, bytes)?;
    }
    Ok(base)
}

/// The pager's own mappings as (start, bytes): all that exist when this is called.
pub fn all_own_mappings() -> Vec<(usize, usize)> {
    let _mapping = lock(&MAPPING);
    own_mappings().collect()
}

/// As [`map_local`], for memory that does not count as the pager's own: the victim buffer.
pub fn map_uncounted(bytes: usize) -> Result<usize, Error> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let wish = super::apart::address(bytes) as *mut _;
    // SAFETY: a fresh mapping, at an address where nothing is.
    let base = unsafe { rustix::mm::mmap_anonymous(wish, bytes, protection, flags) };
    Ok(base? as usize)
}

/// A counter, at 0, that this process shares with its children. Never unmapped. A sidecar shares it
/// with no process: the program's children are not the sidecar's.
pub fn map_shared_counter() -> Result<&'static AtomicU32, Error> {
    if sidecars_program().is_some() {
        return Ok(Box::leak(Box::default()));
    }
    let flags = MapFlags::SHARED;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice; zeroed and aligned, which is a
    // valid counter.
    unsafe {
        let base = rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, protection, flags)?;
        Ok(&*base.cast::<AtomicU32>())
    }
}

/// The pager's own mappings as (start, bytes).
pub fn own_mappings() -> impl Iterator<Item = (usize, usize)> {
    let count = MAPPING_COUNT.load(Relaxed).min(COUNTED_MAPPINGS);
    MAPPINGS[..count].iter().map(|(start, length)| (start.load(Relaxed), length.load(Relaxed)))
}

/// Applies kernel advice to the pager's own or the program's memory, on the program's behalf.
pub fn advise(start: usize, bytes: usize, advice: i32) -> Result<(), Error> {
    // SAFETY: the caller owns the range, or the program asked for exactly this call; madvise checks
    // the range itself.
    let result = unsafe { libc::syscall(libc::SYS_madvise, start, bytes, advice) };
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Changes the rights of memory.
pub fn protect(start: usize, bytes: usize, rights: Protection) -> Result<(), Error> {
    let of = |is_given, flag| if is_given { flag } else { libc::PROT_NONE };
    let flags = of(rights.can_read, libc::PROT_READ)
        | of(rights.can_write, libc::PROT_WRITE)
        | of(rights.can_execute, libc::PROT_EXEC);
    // SAFETY: the caller owns the range, or the program stands still and gets its rights back
    // before it continues.
    let result = unsafe { libc::mprotect(start as *mut _, bytes, flags) };
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Whether the program has forbidden all executable memory that can be written to, or made so later
/// (PR_SET_MDWE).
pub fn denies_execution() -> bool {
    const PR_GET_MDWE: libc::c_int = 66;
    // SAFETY: plain numbers. Kernels before 6.3 refuse, and have no such denial.
    unsafe { libc::prctl(PR_GET_MDWE, 0, 0, 0, 0) > 0 }
}

/// The program's memory as a file: pages are read through it whatever rights the program has to
/// them.
pub fn open_memory() -> Result<OwnedFd, Error> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/mem", flags, rustix::fs::Mode::empty())?)
}

/// Opens the kernel's list of this address space's mappings.
pub fn open_maps() -> Result<OwnedFd, Error> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self/maps", flags, rustix::fs::Mode::empty())?)
}

/// Reads a small file of /proc.
pub fn read_file(path: &str) -> Result<String, Error> {
    use rustix::fs::{Mode, OFlags};
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    read_whole(&file)
}

/// The kernel's version, as major and minor number.
pub fn kernel_version() -> Option<(u32, u32)> {
    parse_version(&read_file("/proc/sys/kernel/osrelease").ok()?)
}

fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The capacity reserved for a piece of a file of /proc: what the kernel returns with one read, or
/// more.
const PIECE_BYTES: usize = 4 << 10;
/// The capacity reserved for the first pieces.
const FIRST_BYTES: usize = 16 << 10;

/// Reads a file of /proc from its beginning to its end.
pub fn read_whole(file: &OwnedFd) -> Result<String, Error> {
    // Not filled with zeros first: capacity that is not read into takes no memory, which counts
    // against the limit.
    let mut text = Vec::with_capacity(FIRST_BYTES);
    loop {
        text.reserve(PIECE_BYTES);
        let at = text.len() as u64;
        if rustix::io::pread(file, rustix::buffer::spare_capacity(&mut text), at)? == 0 {
            let lossy = |error: std::string::FromUtf8Error| {
                String::from_utf8_lossy(error.as_bytes()).into_owned()
            };
            return Ok(String::from_utf8(text).unwrap_or_else(lossy));
        }
    }
}

/// The numbers of an open statm, in pages: mapped, resident, shared, text, 0, data and stack, 0.
pub fn read_numbers(statm: &OwnedFd) -> Option<[u64; 7]> {
    let mut buffer = [0_u8; 160];
    let length = rustix::io::pread(statm, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..length]).ok()?;
    let mut numbers = [0; 7];
    for (number, word) in numbers.iter_mut().zip(text.split_ascii_whitespace()) {
        *number = word.parse().ok()?;
    }
    Some(numbers)
}

/// Opens the directory of the program's threads.
pub fn open_own_tasks() -> Result<OwnedFd, Error> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = format!("/proc/{}/task", program_in_proc());
    Ok(rustix::fs::open(path.as_str(), flags, Mode::empty())?)
}

/// How many threads such a directory has: one for each link beyond the two that every directory
/// has.
pub fn count_tasks(tasks: &OwnedFd) -> u64 {
    #[allow(clippy::useless_conversion)] // It has 32 bits on aarch64.
    rustix::fs::fstat(tasks).map_or(1, |stat| u64::from(stat.st_nlink).saturating_sub(2))
}

/// Copies pages of the program to `to`. Returns how many it copied. The program's threads may take
/// away the right to read them at any time, so the pager never reads them directly.
pub fn read_program(memory: &OwnedFd, from: usize, to: usize, pages: usize) -> usize {
    let Ok(offset) = libc::off_t::try_from(from) else { return 0 };
    // SAFETY: the caller owns `pages` pages at `to`; the kernel checks the other side.
    let read = unsafe { libc::pread(memory.as_raw_fd(), to as *mut _, pages * PAGE_BYTES, offset) };
    // An error, which is negative, reads no page.
    at_most::<usize, _>(read) / PAGE_BYTES
}

/// EAGAIN says that the kernel temporarily lacks something, slabs or thread ids: what the pager
/// needs for itself is tried this many times, with a pause each time, before the program has to
/// end.
const TRIES: u32 = 200;
const TRY_PAUSE: Duration = Duration::from_millis(5);

/// Repeats an operation that fails with EAGAIN, for a second at most.
pub(super) fn until_available<T>(
    mut operation: impl FnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let mut tries = 1;
    loop {
        match operation() {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && tries < TRIES => {
                tries += 1;
                std::thread::sleep(TRY_PAUSE);
            }
            result => return result,
        }
    }
}

/// As [`map_local`], for memory that a forked child has no use for.
pub fn map_local_without_children(bytes: usize) -> Result<usize, Error> {
    let start = until_available(|| map_local(bytes))?;
    keep_from_children(start, bytes)?;
    Ok(start)
}

/// Makes forked children not inherit this memory of the pager's.
pub fn keep_from_children(start: usize, bytes: usize) -> Result<(), Error> {
    until_available(|| advise(start, bytes, libc::MADV_DONTFORK))
}

/// Moves a mapping of the program to `to`, on the program's behalf (mremap with a fixed address).
pub fn remap(start: usize, old: usize, new: usize, flags: i32, to: usize) -> Result<(), i32> {
    let flags = flags | libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the program asked for exactly this call, and waits for it.
    let result = unsafe { libc::syscall(libc::SYS_mremap, start, old, new, flags, to) };
    if result == -1 {
        Err(Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
    } else {
        Ok(())
    }
}

/// Unmaps the pager's own memory.
pub fn unmap(start: usize, bytes: usize) {
    // SAFETY: only called with ranges that `map_local` returned and that nothing refers to any
    // more.
    let _ = unsafe { rustix::mm::munmap(start as *mut _, bytes) };
}

/// Returns the frames of the pager's own pages to the kernel, which refuses it for locked memory
/// (EINVAL).
pub fn release(start: usize, bytes: usize) -> Result<(), Error> {
    // SAFETY: only called on pages of the frame pool that hold nothing any more.
    Ok(unsafe { rustix::mm::madvise(start as *mut _, bytes, Advice::LinuxDontNeed) }?)
}

/// Removes a lock (mlock) from the pager's own memory.
pub fn unlock(start: usize, bytes: usize) -> Result<(), Error> {
    // SAFETY: the lock affects only what the kernel may do with pages, not what they hold.
    let result = unsafe { libc::munlock(start as *const _, bytes) };
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// The locked memory of this address space, in bytes (VmLck of proc_pid_status(5)); None if the
/// kernel does not say.
pub fn locked_bytes() -> Option<u64> {
    let status = read_file("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix("VmLck:"))?;
    Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Makes present pages writable and this process's own (ends copy-on-write sharing), without
/// touching them from user space.
pub fn unshare(start: usize, bytes: usize) -> Result<(), Error> {
    advise(start, bytes, libc::MADV_POPULATE_WRITE)
}

/// Whether the program has a mapping at a page's address.
pub fn is_mapped(address: usize) -> bool {
    let mut is_there = 0_u8;
    // SAFETY: mincore reads no memory of the range, and writes one byte for one page.
    unsafe { libc::mincore(address as *mut _, PAGE_BYTES, &raw mut is_there) == 0 }
}

/// Fills pages of the pager's own memory with zeros.
pub fn zero_pages(address: usize, pages: usize) {
    // SAFETY: the caller owns these mapped pages of the frame pool.
    unsafe { std::ptr::write_bytes(address as *mut u8, 0, pages * PAGE_BYTES) }
}

/// Copies a page of the pager's own memory.
pub fn copy_page(from: usize, to: usize) {
    // SAFETY: the caller owns both mapped pages, which are distinct.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, PAGE_BYTES) }
}

/// Checks that the calling thread's process may open `count` more files: if not, EMFILE.
pub fn find_room_for_files(count: usize) -> Result<(), std::io::Error> {
    use rustix::event::{EventfdFlags, eventfd};
    let files: Result<Vec<_>, _> = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    files.map(drop).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_kernels_release_begins_with_its_version() {
        assert_eq!(super::parse_version("6.18.44-fc-v595\n"), Some((6, 18)));
        assert_eq!(super::parse_version("7.0-rc1\n"), Some((7, 0)));
        assert_eq!(super::parse_version("unknown"), None);
    }

    #[test]
    fn what_is_lacking_for_a_moment_is_waited_for() {
        let mut left = 3;
        let result = super::until_available(|| {
            left -= 1;
            let lacking = super::Error::from_raw_os_error(libc::EAGAIN);
            if left > 0 { Err(lacking) } else { Ok(left) }
        });
        assert_eq!(result.ok(), Some(0));
        let refused = super::until_available(|| {
            left += 1;
            Err::<(), _>(super::Error::from_raw_os_error(libc::EPERM))
        });
        assert_eq!(
            (refused.err().and_then(|error| error.raw_os_error()), left),
            (Some(libc::EPERM), 1)
        );
    }
}
