//! Threads of the pager: how they start, when they run, and what they keep from the program.

use std::cell::Cell;
use std::io::Error;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farpool_units::exactly;

use super::memory::{map_local_without_children, until_available};
use crate::sys::futex::{wait, wake};
use crate::sys::program::sidecars_program;

/// Stack of a pager thread: deep enough for connecting to a blade, small enough to forget.
const STACK_BYTES: usize = 256 << 10;

/// Name of the calling thread.
pub fn thread_name() -> String {
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

/// Gives the calling thread its own, empty descriptor table.
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

/// Binds the calling thread to one CPU. A refusal only costs speed.
pub fn pin_to(cpu: usize) {
    let _ = farpool_kernel::pin_thread(cpu);
}

/// Restricts a thread of this process to these CPUs except `without`. A refusal only costs speed.
pub fn confine(thread: u32, cpus: &[usize], without: usize) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|cpu| **cpu != without).for_each(|cpu| set.set(*cpu));
    let pid = i32::try_from(thread).ok().and_then(rustix::process::Pid::from_raw);
    if let (Some(_), false) = (pid, cpus.is_empty()) {
        let _ = rustix::thread::sched_setaffinity(pid, &set);
    }
}

/// Puts a thread under SCHED_IDLE (or back under SCHED_OTHER). True if the kernel allowed it, or
/// the broker was asked.
pub fn set_idle_policy(thread: u32, idle: bool) -> bool {
    if let (Some(ask), false) = (BROKER.get(), idle) {
        // Leaving SCHED_IDLE is a privilege.
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

/// The time slice that a thread requests in order to be scheduled soon.
const PROMPT_SLICE_NS: u64 = 100_000;

/// Asks for a thread's real-time priority where this process may not set it itself, through a
/// sidecar's keeper. Takes the thread, and whether it should have the priority.
static BROKER: OnceLock<fn(u32, bool)> = OnceLock::new();

/// Makes priorities be requested through `broker`. The first call counts.
pub fn set_broker(broker: fn(u32, bool)) {
    let _ = BROKER.set(broker);
}

/// Makes the calling thread run at once when it wakes, however many of the program's threads want
/// the CPUs, or like any other thread again. The lowest real-time priority needs a privilege
/// (CAP_SYS_NICE or RLIMIT_RTPRIO); without it short time slices are requested, which the kernel
/// grants soon (from Linux 6.12 on; older kernels do not know them).
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
        let size = exactly::<u32, _>(size_of::<libc::sched_attr>());
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) == 0 {
            attributes.sched_runtime = if prompt { PROMPT_SLICE_NS } else { 0 };
            let _ = libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}

/// Makes the calling thread of a sidecar wait for a processor as the program does. The keeper
/// prefers a sidecar to the program, if it may, so that the limit is held however many threads want
/// the processors; but a thread whose work is proportional to the program's requests must not take
/// its time from others. In the program's own process there is nothing to do.
pub fn stand_back() {
    use rustix::process::{Pid, getpriority_process, setpriority_process};
    let program = sidecars_program().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    if let Some(nice) = program.and_then(|program| getpriority_process(Some(program)).ok()) {
        // None is the calling thread. The kernel refuses a value that would favour it.
        let _ = setpriority_process(None, nice);
    }
}

/// Whether threads can be put under SCHED_IDLE and be taken out of it again: taking them out is a
/// privilege (CAP_SYS_NICE, or RLIMIT_NICE of 20), so it cannot be tried.
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

/// More bytes than a thread's stat has.
const THREAD_STAT_BYTES: usize = 1024;

/// The fields of a thread's stat (proc(5)) from the third on, which is its state.
fn thread_stat(thread: u32, buffer: &mut [u8]) -> Option<impl Iterator<Item = &[u8]>> {
    use rustix::fs::{Mode, OFlags};
    use std::io::Write;
    let mut path = [0_u8; 64];
    // The last byte stays 0, which ends the path. The name of any thread leads to its process, even
    // of another thread.
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

/// CPUs the process may use.
pub fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return vec![0];
    };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// The thread that is starting a pager thread; 0 = none. What the C library allocates meanwhile for
/// the new thread (thread-local storage) must be local memory.
static STARTING_THREAD: AtomicU32 = AtomicU32::new(0);

/// Whether an allocation of the calling thread is for a pager thread and must be local.
#[inline]
pub fn is_internal_allocation() -> bool {
    let starting = STARTING_THREAD.load(Relaxed);
    starting != 0 && starting == thread_id()
}

thread_local! {
    /// The thread is one of the pager's. Plain and without a destructor, so that the C library has
    /// nothing to do for it.
    static IS_PAGER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is one of the pager's.
pub fn is_pager_thread() -> bool {
    IS_PAGER.get()
}

/// The body of a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// Starts a detached thread with all signals blocked, so that no handler of the program ever runs
/// on it.
///
/// Not `std::thread`: that allocates thread-local state through destructors of the C library, whose
/// memory is the program's and may be far.
///
/// The returned latch opens when the thread's body begins. The C library's own start of a thread
/// reads the locale, which may be far: a thread that serves faults must be past that before memory
/// is registered.
///
/// `prompt`: it runs at once, see [`be_prompt`], if the process is allowed that; else it waits for
/// a CPU like any other thread.
pub fn spawn(name: &'static std::ffi::CStr, prompt: bool, body: Body) -> Result<Arc<Latch>, Error> {
    let begun = Arc::<Latch>::default();
    let argument = Box::into_raw(Box::new(Start { name, body, begun: begun.clone() }));
    // SAFETY: plain pthread calls on locals; `argument` is given to exactly one `entry`, or taken
    // back when no thread was made.
    unsafe {
        let mut blocked = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut blocked);
        let mut attributes = std::mem::zeroed::<libc::pthread_attr_t>();
        libc::pthread_attr_init(&raw mut attributes);
        if sidecars_program().is_some() {
            // The C library's own stacks would be found among the program's mappings, and could
            // become far.
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

/// An event that happens once, and can be waited for.
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

    /// Waits until it is open or the time is up.
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
    // The name is for people who look at threads; a refusal does no harm.
    let _ = rustix::thread::set_name(start.name);
    (start.body)();
    std::ptr::null_mut()
}

/// Blocks every signal for the calling thread until dropped: a handler that ran while the thread
/// holds the registry's lock could need that lock itself.
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

/// Kernel id of the calling thread.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}
