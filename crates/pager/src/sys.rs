//! The pager's own memory, futexes and threads: everything that must not go through the program's
//! interposed functions.
//!
//! `unsafe` of this crate lives here, in [`crate::space`], in [`crate::frames`] and in [`crate::rights`].

use std::cell::Cell;
use std::io::Error;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use farpool_uffd::PAGE_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;

/// The process whose memory is paged; 0: the calling one. A sidecar is a process of its own in the program's memory.
static PROGRAM: AtomicU32 = AtomicU32::new(0);

/// The pager's threads are a sidecar's, and the program is this process.
pub fn set_program(pid: u32) {
    PROGRAM.store(pid, SeqCst);
}

/// The process whose memory is paged, if it is not the calling one.
pub fn sidecars_program() -> Option<u32> {
    let pid = PROGRAM.load(SeqCst);
    (pid != 0).then_some(pid)
}

/// Process id of the program.
pub fn program_pid() -> u32 {
    sidecars_program().unwrap_or_else(std::process::id)
}

/// Ends the program at once: whatever it waits for will not come, and it must not go on without.
pub fn end_program() -> ! {
    kill_program();
    std::process::abort();
}

/// Ends the program of a sidecar, and not the sidecar: a child of the program may wait for pages of it.
pub fn kill_program() {
    let program = sidecars_program().and_then(|pid| i32::try_from(pid).ok());
    if let Some(program) = program.and_then(rustix::process::Pid::from_raw) {
        // Not SIGABRT: the program may catch it, and its handler may need a page that never comes.
        let _ = rustix::process::kill_process(program, rustix::process::Signal::KILL);
    }
}

/// Stack of a pager thread: deep enough for connecting to a blade, small enough to forget.
const STACK_BYTES: usize = 256 << 10;

/// Mappings of the pager that are looked at when its own memory is counted; later ones are not (one
/// comes for each 256 MiB of far memory).
const COUNTED_MAPPINGS: usize = 1024;
static MAPPINGS: [(AtomicUsize, AtomicUsize); COUNTED_MAPPINGS] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; COUNTED_MAPPINGS];
static MAPPING_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Held while memory is mapped and noted, so that a sidecar's list of its own memory is whole.
static MAPPING: Mutex<()> = Mutex::new(());

/// Maps anonymous memory that stays local. Untouched parts cost nothing. A sidecar's is not inherited by the program's
/// children.
pub fn map_local(bytes: usize) -> Result<usize, Error> {
    let is_sidecar = sidecars_program().is_some();
    // Elsewhere a lock could be inherited by a child of the program.
    let _mapping = is_sidecar.then(|| MAPPING.lock().unwrap_or_else(PoisonError::into_inner));
    if is_sidecar && MAPPING_COUNT.load(Relaxed) >= COUNTED_MAPPINGS {
        // What is not noted would be taken for the program's.
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

/// The pager's own mappings as (start, bytes), each that there is when this is called.
pub fn all_own_mappings() -> Vec<(usize, usize)> {
    let _mapping = MAPPING.lock().unwrap_or_else(PoisonError::into_inner);
    own_mappings().collect()
}

/// As [`map_local`], for memory that does not count as the pager's own: the victim buffer.
pub fn map_uncounted(bytes: usize) -> Result<usize, Error> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let wish = crate::apart::address(bytes) as *mut _;
    // SAFETY: a fresh mapping, at an address where nothing is.
    let base = unsafe { rustix::mm::mmap_anonymous(wish, bytes, protection, flags) };
    Ok(base? as usize)
}

/// A counter, at 0, that this process shares with its children. Never unmapped. The program's children are none of a
/// sidecar's.
pub fn map_shared_counter() -> Result<&'static AtomicU32, Error> {
    if sidecars_program().is_some() {
        return Ok(Box::leak(Box::default()));
    }
    let flags = MapFlags::SHARED;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice; zeroed and aligned, which is a valid counter.
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

/// The processor time that the calling thread has used.
pub fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Applies kernel advice to the pager's own or the program's memory, on the program's behalf.
pub fn advise(start: usize, bytes: usize, advice: i32) -> Result<(), Error> {
    // SAFETY: the caller owns the range, or the program asked for exactly this call; madvise checks
    // the range itself.
    let result = unsafe { libc::syscall(libc::SYS_madvise, start, bytes, advice) };
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// The program's memory as a file: pages are read through it whatever rights the program has to them.
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
    read_whole(&file, FILE_STEP_BYTES)
}

/// Files of /proc are read in pieces of this size.
const FILE_STEP_BYTES: usize = 64 << 10;

/// Reads a file of /proc from its beginning to its end.
pub fn read_whole(file: &OwnedFd, step_bytes: usize) -> Result<String, Error> {
    let mut text = Vec::new();
    loop {
        let at = text.len();
        text.resize(at + step_bytes, 0);
        let length = rustix::io::pread(file, &mut text[at..], at as u64)?;
        text.truncate(at + length);
        if length == 0 {
            return Ok(String::from_utf8_lossy(&text).into_owned());
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

/// Opens the folder of the program's threads.
pub fn open_own_tasks() -> Result<OwnedFd, Error> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = format!("/proc/{}/task", program_pid());
    Ok(rustix::fs::open(path.as_str(), flags, Mode::empty())?)
}

/// How many threads there are in such a folder: each is a link more than the two that every folder has.
pub fn count_tasks(tasks: &OwnedFd) -> u64 {
    rustix::fs::fstat(tasks).map_or(1, |stat| stat.st_nlink.saturating_sub(2))
}

/// Copies pages of the program to `to`; returns how many. Its threads may take the right to read them away at any
/// time, so the pager never reads them itself.
pub fn read_program(memory: &OwnedFd, from: usize, to: usize, pages: usize) -> usize {
    let Ok(offset) = libc::off_t::try_from(from) else { return 0 };
    // SAFETY: the caller owns `pages` pages at `to`; the kernel checks the other side.
    let read = unsafe { libc::pread(memory.as_raw_fd(), to as *mut _, pages * PAGE_BYTES, offset) };
    usize::try_from(read).unwrap_or(0) / PAGE_BYTES
}

/// EAGAIN says that the kernel lacks something for the moment, slabs or thread ids: what the pager needs for itself
/// is tried so often, with a pause each time, before the program has to end for it.
const TRIES: u32 = 200;
const TRY_PAUSE: Duration = Duration::from_millis(5);

/// Repeats an operation that fails with EAGAIN, for a second at most.
fn until_available<T>(mut operation: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
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

/// A forked child does not get this memory of the pager's.
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
    // SAFETY: only called with ranges that `map_local` returned and that nobody refers to any more.
    let _ = unsafe { rustix::mm::munmap(start as *mut _, bytes) };
}

/// Gives the frames of the pager's own pages back to the kernel.
pub fn release(start: usize, bytes: usize) {
    // SAFETY: only called on pages of the frame pool that hold nothing any more.
    let _ = unsafe { rustix::mm::madvise(start as *mut _, bytes, Advice::LinuxDontNeed) };
}

/// Makes a present page writable and this process's own (ends copy-on-write sharing), without
/// touching it from user space.
pub fn unshare(start: usize, bytes: usize) -> Result<(), Error> {
    advise(start, bytes, libc::MADV_POPULATE_WRITE)
}

/// Fills pages of the pager's own memory with zeros.
pub fn zero_pages(address: usize, pages: usize) {
    // SAFETY: the caller owns these mapped pages of the frame pool.
    unsafe { std::ptr::write_bytes(address as *mut u8, 0, pages * PAGE_BYTES) }
}

/// Copies a page of the pager's own memory.
pub fn copy_page(from: usize, to: usize) {
    // SAFETY: the caller owns both mapped pages, which are different ones.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, PAGE_BYTES) }
}

/// Waits while `word` holds `expected`, at most for `timeout`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let timeout = timeout.and_then(|time| futex::Timespec::try_from(time).ok());
    // An error is a wake-up like any other: the caller looks again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref());
}

/// Wakes all threads that wait on `word`.
pub fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Kernel id of the calling thread.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Name of the calling thread.
pub fn thread_name() -> String {
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

/// Gives the calling thread a descriptor table of its own, empty.
///
/// The program may close every descriptor it can name, and none of the pager's is among them; nor
/// does the pager hold the program's pipes open. Threads started from here on share the new table.
pub fn leave_descriptor_table() -> Result<(), Error> {
    // SAFETY: closes descriptors of the calling thread's private copy of the table only.
    let result = unsafe {
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
    };
    if result == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Binds the calling thread to one CPU; a refusal costs speed only.
pub fn pin_to(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Lets a thread of this process run on these CPUs only, without one; a refusal costs speed only.
pub fn confine(thread: u32, cpus: &[usize], without: usize) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|cpu| **cpu != without).for_each(|cpu| set.set(*cpu));
    let pid = i32::try_from(thread).ok().and_then(rustix::process::Pid::from_raw);
    if let (Some(_), false) = (pid, cpus.is_empty()) {
        let _ = rustix::thread::sched_setaffinity(pid, &set);
    }
}

/// Puts a thread under SCHED_IDLE (or back under SCHED_OTHER); says whether the kernel let us.
pub fn set_idle_policy(thread: u32, idle: bool) -> bool {
    if let (Some(ask), false) = (BROKER.get(), idle) {
        // The way back is a privilege.
        ask(thread, false);
        return true;
    }
    let policy = if idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: a thread id and a pointer to a live sched_param.
    let result = unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &raw const parameter)
    };
    result == 0
}

/// The calling thread's turn on a CPU when it asks for none too long ones.
const PROMPT_SLICE_NS: u64 = 100_000;

/// Who asks for a thread's real-time priority where this process may not give it itself: a sidecar's keeper. Told the
/// thread, and whether it shall have it.
static BROKER: OnceLock<fn(u32, bool)> = OnceLock::new();

/// Has priorities asked for by `broker`. The first call counts.
pub fn set_broker(broker: fn(u32, bool)) {
    let _ = BROKER.set(broker);
}

/// Has the calling thread run at once when it wakes, however many of the program's threads want the CPUs, or
/// like any other thread again. The lowest real-time priority needs a privilege (CAP_SYS_NICE or RLIMIT_RTPRIO);
/// without it short turns are asked for, which the kernel grants soon (from Linux 6.12 on; before, it does not
/// know them).
pub fn be_prompt(prompt: bool) {
    let priority = i32::from(prompt);
    let policy = if prompt { libc::SCHED_FIFO } else { libc::SCHED_OTHER };
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: pointers to live values; 0 is the calling thread.
    unsafe {
        let changed = libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const parameter);
        if let (Some(ask), true) = (BROKER.get(), changed != 0 || !prompt) {
            ask(thread_id(), prompt);
        }
        if prompt && changed == 0 {
            return;
        }
        let size = u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0);
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) == 0 {
            attributes.sched_runtime = if prompt { PROMPT_SLICE_NS } else { 0 };
            let _ = libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}

/// Whether threads can be put under SCHED_IDLE and be taken out of it again: the way back is a privilege
/// (CAP_SYS_NICE, or RLIMIT_NICE of 20), so it cannot be tried.
pub fn may_change_policy() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    const NICE_0: u64 = 20;
    if BROKER.get().is_some() {
        return true;
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nice);
    let has_right =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE));
    has_right || limit.current.is_none_or(|current| current >= NICE_0)
}

/// The CPU a thread of this process ran on last.
pub fn cpu_of(thread: u32) -> Option<usize> {
    let mut buffer = [0_u8; THREAD_STAT_BYTES];
    // Field 39 of its stat.
    std::str::from_utf8(thread_stat(thread, &mut buffer)?.nth(36)?).ok()?.parse().ok()
}

/// Whether a thread of this process runs or waits for a CPU, and does not sleep.
pub fn is_runnable(thread: u32) -> bool {
    let mut buffer = [0_u8; THREAD_STAT_BYTES];
    thread_stat(thread, &mut buffer).and_then(|mut fields| fields.next()) == Some(b"R")
}

/// More than a thread's stat has.
const THREAD_STAT_BYTES: usize = 1024;

/// The fields of a thread's stat (proc(5)) from the third, its state, on.
fn thread_stat(thread: u32, buffer: &mut [u8]) -> Option<impl Iterator<Item = &[u8]>> {
    use rustix::fs::{Mode, OFlags};
    use std::io::Write;
    let mut path = [0_u8; 64];
    // The last byte stays 0, which ends the path. Any thread's name leads to its process, also to another one.
    write!(&mut path[..63], "/proc/{thread}/task/{thread}/stat").ok()?;
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let length = rustix::io::read(&file, &mut *buffer).ok()?;
    let text = buffer.get(..length)?;
    // Fields are counted after the name's closing parenthesis and a space.
    let after_name = text.iter().rposition(|byte| *byte == b')')? + 2;
    Some(text.get(after_name..)?.split(|byte| *byte == b' '))
}

/// CPU time that the process has used, with all its threads.
pub fn process_cpu_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(used.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(used.tv_nsec).unwrap_or(0))
}

/// Milliseconds of a clock that all processes of the machine share; wraps.
pub fn shared_clock_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // It wraps.
    let wrapped = ms as u32;
    wrapped
}

/// Nanoseconds of a clock that all processes of the machine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
    ns.unsigned_abs()
}

/// Sleeps for a moment, so that a thread under SCHED_IDLE gets to what it is waited for.
pub fn pause() {
    std::thread::sleep(Duration::from_micros(20));
}

/// CPUs the process may use.
pub fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return vec![0];
    };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// The thread that is just starting a pager thread; 0 = none. What the C library allocates for it
/// meanwhile (thread-local storage) must be local memory.
static STARTING_THREAD: AtomicU32 = AtomicU32::new(0);

/// Whether an allocation of the calling thread is for a pager thread and must be local.
#[inline]
pub fn is_internal_allocation() -> bool {
    let starting = STARTING_THREAD.load(Relaxed);
    starting != 0 && starting == thread_id()
}

thread_local! {
    /// This is one of the pager's threads. Plain and without a destructor, so that the C library has nothing to do
    /// for it.
    static IS_PAGER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is one of the pager's.
pub fn is_pager_thread() -> bool {
    IS_PAGER.get()
}

/// Work of a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// Starts a detached thread with all signals blocked, so that no handler of the program ever runs on it.
///
/// Not `std::thread`: that one allocates thread-local state through destructors of the C library,
/// whose memory is the program's and may be far.
///
/// The latch it returns opens when the thread's body begins. The C library's own beginning of a thread reads the
/// locale, which may be far: a thread that is to serve faults must be past that before memory is registered.
///
/// `prompt`: it runs at once, see [`be_prompt`], if the process may have that; else it waits for its turn on a CPU
/// like any other.
pub fn spawn(name: &'static std::ffi::CStr, prompt: bool, body: Body) -> Result<Arc<Latch>, Error> {
    let begun = Arc::<Latch>::default();
    let argument = Box::into_raw(Box::new(Start { name, body, begun: begun.clone() }));
    // SAFETY: plain pthread calls on locals; `argument` is handed to exactly one `entry`, or taken
    // back when no thread was made.
    unsafe {
        let mut blocked = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut blocked);
        let mut attributes = std::mem::zeroed::<libc::pthread_attr_t>();
        libc::pthread_attr_init(&raw mut attributes);
        if sidecars_program().is_some() {
            // The C library's own stacks would be found among the program's mappings, and be far.
            let stack = map_local_without_children(STACK_BYTES)?;
            libc::pthread_attr_setstack(&raw mut attributes, stack as *mut _, STACK_BYTES);
        } else {
            libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES);
        }
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        if prompt {
            let parameter = libc::sched_param { sched_priority: 1 };
            libc::pthread_attr_setschedpolicy(&raw mut attributes, libc::SCHED_FIFO);
            libc::pthread_attr_setschedparam(&raw mut attributes, &raw const parameter);
            libc::pthread_attr_setinheritsched(&raw mut attributes, libc::PTHREAD_EXPLICIT_SCHED);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, &raw mut before);
        STARTING_THREAD.store(thread_id(), SeqCst);
        let mut thread = std::mem::zeroed::<libc::pthread_t>();
        let created = until_available(|| {
            let pointer = &raw const attributes;
            let mut errno = libc::pthread_create(&raw mut thread, pointer, entry, argument.cast());
            if prompt && errno == libc::EPERM {
                let inherit = libc::PTHREAD_INHERIT_SCHED;
                libc::pthread_attr_setinheritsched(&raw mut attributes, inherit);
                let pointer = &raw const attributes;
                errno = libc::pthread_create(&raw mut thread, pointer, entry, argument.cast());
            }
            if errno == 0 { Ok(()) } else { Err(Error::from_raw_os_error(errno)) }
        });
        STARTING_THREAD.store(0, SeqCst);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
        if let Err(error) = created {
            drop(Box::from_raw(argument));
            return Err(error);
        }
    }
    Ok(begun)
}

/// Something that happens once, and can be waited for.
#[derive(Debug, Default)]
pub struct Latch(AtomicU32);

impl Latch {
    pub fn open(&self) {
        self.0.store(1, SeqCst);
        wake(&self.0);
    }

    pub fn is_open(&self) -> bool {
        self.0.load(SeqCst) != 0
    }

    /// Waits until it is open.
    pub fn wait(&self) {
        while !self.is_open() {
            wait(&self.0, 0, None);
        }
    }

    /// Waits until it is open or the time is over.
    pub fn wait_at_most(&self, time: Duration) {
        let end = std::time::Instant::now() + time;
        while !self.is_open() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return;
            }
            wait(&self.0, 0, Some(left));
        }
    }
}

/// What a thread is started with.
struct Start {
    name: &'static std::ffi::CStr,
    body: Body,
    begun: Arc<Latch>,
}

extern "C" fn entry(argument: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `spawn` made this box and gave it to this thread only.
    let start = *unsafe { Box::from_raw(argument.cast::<Start>()) };
    IS_PAGER.set(true);
    start.begun.open();
    // The name is for people who look at threads; a refusal is no harm.
    let _ = rustix::thread::set_name(start.name);
    (start.body)();
    std::ptr::null_mut()
}

/// Blocks every signal for the calling thread until dropped: a handler that ran while the thread holds
/// the registry's lock could need that lock itself.
#[derive(Debug)]
pub struct SignalGuard {
    before: u64,
}

impl SignalGuard {
    pub fn block_all() -> SignalGuard {
        let mut before = 0_u64;
        set_signal_mask(u64::MAX, Some(&mut before));
        SignalGuard { before }
    }
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        set_signal_mask(self.before, None);
    }
}

fn set_signal_mask(mask: u64, before: Option<&mut u64>) {
    let before = before.map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: both pointers are null or point to a kernel-sized (8 byte) signal set.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            before,
            8_usize,
        );
    }
}

/// Who prints messages for this process: a sidecar's keeper.
static SAYER: OnceLock<fn(&str)> = OnceLock::new();

/// Has messages printed by `sayer`. The first call counts.
pub fn set_sayer(sayer: fn(&str)) {
    let _ = SAYER.set(sayer);
}

/// Writes a message to the program's standard error, wherever that goes by now; never waits for a reader.
///
/// The pager holds none of the program's descriptors open (a reader at the other end of a pipe would
/// wait for ever), so it looks for the program's descriptor 2 anew for each message.
pub fn say(message: &str) {
    if let Some(sayer) = SAYER.get() {
        return sayer(message);
    }
    let line = format!("farpool: {message}\n");
    if !write_to_same_file(line.as_bytes()) {
        write_to_reopened(line.as_bytes());
    }
}

/// Writes to the very file or socket that the program has open, so that what it writes next comes behind
/// the message and not over it. False if it is something else (a write to a terminal or a named pipe could wait,
/// and O_NONBLOCK would be set for the program too) or cannot be had: the program closed it, its main
/// thread has ended, pidfd_getfd(2) is forbidden. A process may always look into itself: neither Yama nor
/// a program that is not dumpable forbids it.
fn write_to_same_file(line: &[u8]) -> bool {
    use rustix::fs::FileType;
    use rustix::net::SendFlags;
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let Some(program) = i32::try_from(program_pid()).ok().and_then(Pid::from_raw) else {
        return false;
    };
    let descriptor = pidfd_open(program, PidfdFlags::empty())
        .and_then(|program| pidfd_getfd(&program, 2, PidfdGetfdFlags::empty()));
    let Ok(descriptor) = descriptor else {
        return false;
    };
    let Ok(stat) = rustix::fs::fstat(&descriptor) else {
        return false;
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => rustix::io::write(&descriptor, line).is_ok(),
        FileType::Socket => {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            rustix::net::send(&descriptor, line, flags).is_ok()
        }
        // A program that is not dumpable cannot open its pipe anew.
        FileType::Fifo => write_without_waiting(&descriptor, line),
        _ => false,
    }
}

/// Writes to an unnamed pipe; false if it is full, or is another kind of file.
fn write_without_waiting(file: &OwnedFd, line: &[u8]) -> bool {
    const NO_OFFSET: u64 = u64::MAX;
    let parts = [std::io::IoSlice::new(line)];
    rustix::io::pwritev2(file, &parts, NO_OFFSET, rustix::io::ReadWriteFlags::NOWAIT).is_ok()
}

fn write_to_reopened(line: &[u8]) {
    use rustix::fs::{Mode, OFlags};
    let pid = program_pid();
    let flags =
        OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let path = format!("/proc/{pid}/fd/2");
    if let Ok(descriptor) = rustix::fs::open(path.as_str(), flags, Mode::empty()) {
        let _ = rustix::io::write(&descriptor, line);
    }
}

#[cfg(test)]
mod tests {
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

    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::sync::Arc;

    use super::*;

    /// Set in the test's child, whose descriptor 2 is what is tested.
    const CHILD: &str = "FARPOOL_TEST_SAYS";

    /// Runs this test binary with `stderr` as its descriptor 2; there, [`speaker`] speaks.
    fn speak_to(stderr: impl Into<Stdio>, fill: bool) {
        let mut command = Command::new(std::env::current_exe().expect("the test's own path"));
        command.args(["--exact", "sys::tests::speaker", "--nocapture"]);
        command.env(CHILD, if fill { "fill" } else { "" });
        let status = command.stdout(Stdio::null()).stderr(stderr).status();
        assert!(status.expect("it starts").success());
    }

    /// Not a test by itself: the child of the others.
    #[test]
    fn speaker() {
        let Ok(how) = std::env::var(CHILD) else {
            return;
        };
        let mut stderr = std::io::stderr();
        stderr.write_all(b"before\n").expect("before");
        if how == "fill" {
            let flags = rustix::fs::fcntl_getfl(&stderr).expect("flags");
            let nonblocking = flags | rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(&stderr, nonblocking).expect("non-blocking");
            while stderr.write(&[b'x'; 4096]).is_ok() {}
            rustix::fs::fcntl_setfl(&stderr, flags).expect("blocking");
        }
        let done = Arc::new(AtomicU32::new(0));
        let tell = Arc::clone(&done);
        let body = move || {
            leave_descriptor_table().expect("a table of its own");
            say("message");
            tell.store(1, SeqCst);
            wake(&tell);
        };
        spawn(c"speaker", false, Box::new(body)).expect("a thread");
        while done.load(SeqCst) == 0 {
            wait(&done, 0, None);
        }
        if how != "fill" {
            stderr.write_all(b"after\n").expect("after");
        }
    }

    const ALL: &str = "before\nfarpool: message\nafter\n";

    #[test]
    fn in_a_file_a_message_stands_between_the_programs_own_lines() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::memfd_create("stderr", flags).expect("a file"));
        speak_to(file.try_clone().expect("a copy"), false);
        let mut text = String::new();
        file.rewind().expect("the start");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
    }

    #[test]
    fn a_socket_and_a_pipe_carry_messages_too() {
        let (mut reader, writer) = UnixStream::pair().expect("sockets");
        speak_to(OwnedFd::from(writer), false);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        speak_to(writer, false);
        text.clear();
        reader.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
    }

    /// The child ends although nobody reads.
    #[test]
    fn a_message_never_waits_for_a_reader() {
        let (_reader, writer) = std::io::pipe().expect("a pipe");
        speak_to(writer, true);
        let (_reader, writer) = UnixStream::pair().expect("sockets");
        speak_to(OwnedFd::from(writer), true);
    }
}
