//! Handles a program that gives rights up while the pager's threads run in the same process.
//!
//! Two things have to be done:
//! * everything that the pager needs rights for is opened before: the steward may just have been
//!   started, or not yet;
//! * glibc makes every thread make the same call (setuid and its like), by a signal, and aborts the
//!   process if the result in one of them differs from the caller's. User and group ids are the
//!   same in all threads, but capabilities and securebits belong to each thread: a program that
//!   keeps its capabilities (PR_SET_KEEPCAPS) keeps only those of the calling thread. So the
//!   pager's threads take over the caller's rights before they make the call.
//!
//! The handler of that signal is glibc's; ours runs before it. It runs on threads of the pager that
//! may hold any lock, so it only makes system calls.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

use super::futex::{wait, wake};
use super::threads::{is_pager_thread, thread_id};

/// glibc's signal for such calls (SIGSETXID), which its own sigaction does not touch.
const BROADCAST_SIGNAL: c_int = 33;
/// `_LINUX_CAPABILITY_VERSION_3`: 64 bits in two words.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
const KEEP_CAPS: u64 = 1 << 4;
/// A value of [`SECUREBITS`]: a filter of the program refuses to read them, so those of the pager's
/// threads stay.
const UNKNOWN: u64 = u64::MAX;

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Action {
    handler: usize,
    flags: c_ulong,
    restorer: usize,
    mask: u64,
}

const _: () = assert!(size_of::<Action>() == 32);

/// `struct __user_cap_header_struct`; 0 is the calling thread.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    thread: c_int,
}

/// `struct __user_cap_data_struct`, twice: effective, permitted and inheritable bits.
type Capabilities = [[u32; 3]; 2];

const _: () = assert!(size_of::<CapabilityHeader>() == 8 && size_of::<Capabilities>() == 24);

/// The rights that the pager's threads take over, while TAKING_OVER.
static CAPABILITIES: [[AtomicU32; 3]; 2] = [const { [const { AtomicU32::new(0) }; 3] }; 2];
static SECUREBITS: AtomicU64 = AtomicU64::new(UNKNOWN);
static TAKING_OVER: AtomicBool = AtomicBool::new(false);
/// glibc's handler.
static NEXT_HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Whether everything that needs rights is open, and whether a thread is changing them.
#[derive(Debug, Default)]
pub struct Rights {
    opened: AtomicU32,
    /// The thread that changes them; 0 = none.
    changing: AtomicU32,
}

impl Rights {
    /// Notes that everything that needs rights was opened, or never can be.
    pub fn set_opened(&self) {
        self.opened.store(1, SeqCst);
        wake(&self.opened);
    }

    /// Waits until everything that needs rights was opened.
    pub fn wait_until_opened(&self) {
        while self.opened.load(SeqCst) == 0 {
            wait(&self.opened, 0, None);
        }
    }

    /// Resets the state in a forked child, before its pager is started.
    pub fn reset(&self) {
        self.opened.store(0, SeqCst);
        self.changing.store(0, SeqCst);
        TAKING_OVER.store(false, SeqCst);
    }

    /// Lets no other thread change rights. False: the calling thread holds the lock already
    /// (initgroups calls modules that may do anything).
    pub fn lock(&self) -> bool {
        let thread = thread_id();
        while let Err(holder) = self.changing.compare_exchange(0, thread, Acquire, Relaxed) {
            if holder == thread {
                return false;
            }
            wait(&self.changing, holder, None);
        }
        true
    }

    pub fn unlock(&self) {
        self.changing.store(0, Release);
        wake(&self.changing);
    }
}

/// Makes the pager's threads, until [`end_broadcast`], take over the calling thread's rights before
/// they make the C library's call.
pub fn begin_broadcast() {
    stand_before_glibc();
    publish_own();
    TAKING_OVER.store(true, SeqCst);
}

/// Ends it: all threads have made the C library's call.
pub fn end_broadcast() {
    TAKING_OVER.store(false, SeqCst);
}

/// Puts our handler before glibc's. glibc sets its own once, when the first thread is started.
fn stand_before_glibc() {
    let ours = on_broadcast as *const () as usize;
    let mut action = Action::default();
    // SAFETY: reads the signal's action into a live struct of the kernel's layout.
    let read = unsafe { set_action(std::ptr::null(), &raw mut action) };
    if read != 0 || [libc::SIG_DFL, libc::SIG_IGN, ours].contains(&action.handler) {
        return;
    }
    NEXT_HANDLER.store(action.handler, SeqCst);
    action.handler = ours;
    // SAFETY: glibc's action as it was, except for the handler, which calls glibc's.
    unsafe { set_action(&raw const action, std::ptr::null_mut()) };
}

/// rt_sigaction(2) for the broadcast's signal.
///
/// # Safety
/// `new` and `old` are null or point to live actions; the handler in `new` is a valid handler.
unsafe fn set_action(new: *const Action, old: *mut Action) -> libc::c_long {
    // SAFETY: as the caller guarantees; signal sets have 8 bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, BROADCAST_SIGNAL, new, old, 8_usize) }
}

type Handler = extern "C" fn(c_int, *mut c_void, *mut c_void);

extern "C" fn on_broadcast(signal: c_int, info: *mut c_void, context: *mut c_void) {
    if is_pager_thread() && TAKING_OVER.load(SeqCst) {
        take_over();
    }
    let next = NEXT_HANDLER.load(SeqCst);
    // SAFETY: glibc's handler of this signal, found in its own action (SA_SIGINFO), which is never
    // unloaded.
    unsafe { std::mem::transmute::<usize, Handler>(next)(signal, info, context) }
}

/// Publishes the calling thread's rights.
fn publish_own() {
    let own = capabilities().unwrap_or_default();
    for (place, word) in CAPABILITIES.iter().flatten().zip(own.iter().flatten()) {
        place.store(*word, SeqCst);
    }
    SECUREBITS.store(securebits().unwrap_or(UNKNOWN), SeqCst);
}

/// Gives the calling thread, one of the pager's, the published rights. What the kernel refuses
/// stays as it is: glibc will report it.
fn take_over() {
    // SAFETY: the errno of this thread, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    let wanted = SECUREBITS.load(SeqCst);
    let known = securebits().filter(|_| wanted != UNKNOWN);
    let differing = known.map_or(0, |own| own ^ wanted);
    // SAFETY: plain numbers; changes only the calling thread. The first call needs a right that may
    // go with the capabilities, so they come last.
    unsafe {
        if differing & !KEEP_CAPS != 0 {
            libc::syscall(libc::SYS_prctl, libc::PR_SET_SECUREBITS, wanted, 0, 0, 0);
        }
        if differing & KEEP_CAPS != 0 {
            let keep = c_ulong::from(wanted & KEEP_CAPS != 0);
            libc::syscall(libc::SYS_prctl, libc::PR_SET_KEEPCAPS, keep, 0, 0, 0);
        }
    }
    let wanted =
        CAPABILITIES.each_ref().map(|words| words.each_ref().map(|word| word.load(SeqCst)));
    if capabilities() != Some(wanted) {
        let header = CapabilityHeader { version: CAPABILITY_VERSION, thread: 0 };
        // SAFETY: live structs of the kernel's layout.
        unsafe { libc::syscall(libc::SYS_capset, &raw const header, &raw const wanted) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// The calling thread's capabilities.
fn capabilities() -> Option<Capabilities> {
    let mut own = Capabilities::default();
    let mut header = CapabilityHeader { version: CAPABILITY_VERSION, thread: 0 };
    // SAFETY: live structs of the kernel's layout.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, &raw mut own) };
    (result == 0).then_some(own)
}

/// The calling thread's securebits, if a filter lets it read them.
fn securebits() -> Option<u64> {
    // SAFETY: plain numbers.
    let bits = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_GET_SECUREBITS, 0, 0, 0, 0) };
    u64::try_from(bits).ok()
}
