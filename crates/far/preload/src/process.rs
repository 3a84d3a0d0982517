//! fork: the pager is brought to rest before it and started anew in the child.
//!
//! Our handlers are registered before the program's, so they run last before the fork and first
//! after it. Between the two, in the child, only the C library's fork code runs.
//!
//! Order; each step before the gate shuts may still wait for other threads:
//! 1. all signals are blocked until fork is over: a handler would run with the gate shut;
//! 2. the lock of glibc's list of open files, which fork also takes, is taken: a thread that holds
//!    it may wait for a far page of a file, and with the gate shut it would wait for us;
//! 3. only then is the pager brought to rest.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use farpool_pager::Pager;
use farpool_pager::life::fork::Fork;
use farpool_pager::sys::{self, SignalGuard};

use crate::exec::next;
use crate::{local, pager, set_errno};

/// Offsets in glibc's `struct _IO_FILE`, which is part of its ABI.
const FILE_CHAIN_OFFSET: usize = 104;
const FILE_LOCK_OFFSET: usize = 136;
const FILE_BYTES: usize = 216;
/// The most open files that are visited; a longer chain is taken for damaged.
const MAX_FILES: usize = 1 << 16;

/// A fork that is under way.
struct Forking {
    fork: Option<Fork>,
    _signals: SignalGuard,
}

/// The fork that is under way.
struct Current(UnsafeCell<Option<Forking>>);

// SAFETY: used only by the thread that holds FORKING, and by its copy in the child.
unsafe impl Sync for Current {}

static CURRENT: Current = Current(UnsafeCell::new(None));
/// 1 while a thread forks.
static FORKING: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    static _IO_list_all: *const u8;
}

/// glibc's functions for the lock of its list of open files, which is recursive. Looked up by name,
/// because other C libraries do not have them; null if there are none.
static LOCK_FILE_LIST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static UNLOCK_FILE_LIST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static RESET_FILE_LIST_LOCK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

pub fn register_fork_handlers() {
    let functions = [
        (&LOCK_FILE_LIST, c"_IO_list_lock"),
        (&UNLOCK_FILE_LIST, c"_IO_list_unlock"),
        (&RESET_FILE_LIST_LOCK, c"_IO_list_resetlock"),
    ]
    .map(|(function, name)| {
        // SAFETY: looks a symbol up by its name.
        (function, unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
    });
    if let Some(fork) = next::<ForkFunction>(c"fork") {
        FORK.store(fork as *mut c_void, Release);
    }
    // All or none: a lock that is taken must be released.
    if functions.iter().all(|(_, found)| !found.is_null()) {
        functions.iter().for_each(|(function, found)| function.store(*found, Release));
    }
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

fn call(function: &AtomicPtr<c_void>) {
    let function = function.load(Acquire);
    if !function.is_null() {
        // SAFETY: one of glibc's three functions above; they take no argument and return nothing.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(function)() }
    }
}

type ForkFunction = unsafe extern "C" fn() -> libc::pid_t;

/// The C library's fork; null until it is looked up.
static FORK: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// # Safety
/// As fork(2). Fails with ENOMEM if far memory cannot be shared with a child.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> libc::pid_t {
    if let Some(Err(errno)) = pager().map(Pager::may_fork) {
        set_errno(errno);
        return -1;
    }
    let known = FORK.load(Acquire);
    let fork = if known.is_null() {
        next::<ForkFunction>(c"fork")
    } else {
        // SAFETY: only a function that `next` found is stored.
        Some(unsafe { std::mem::transmute::<*mut c_void, ForkFunction>(known) })
    };
    let Some(fork) = fork else {
        set_errno(libc::ENOSYS);
        return -1;
    };
    // SAFETY: the program asked for this call.
    unsafe { fork() }
}

unsafe extern "C" fn before() {
    let signals = SignalGuard::block_all();
    call(&LOCK_FILE_LIST);
    while FORKING.compare_exchange(0, 1, Acquire, Ordering::Relaxed).is_err() {
        sys::wait(&FORKING, 1, None);
    }
    let fork = pager().map(Pager::before_fork);
    if fork.is_some() {
        touch_open_files();
        local::lock_for_fork();
    }
    // SAFETY: FORKING is held.
    unsafe { *CURRENT.0.get() = Some(Forking { fork, _signals: signals }) };
}

unsafe extern "C" fn in_parent() {
    // SAFETY: FORKING is held.
    let current = unsafe { (*CURRENT.0.get()).take() };
    finish(current, Pager::after_fork_in_parent, &UNLOCK_FILE_LIST);
}

unsafe extern "C" fn in_child() {
    // SAFETY: FORKING is held; the child's only thread is here.
    let current = unsafe { (*CURRENT.0.get()).take() };
    finish(current, Pager::after_fork_in_child, &RESET_FILE_LIST_LOCK);
}

/// Undoes what [`before`] did, in the opposite order; signals come last.
fn finish(current: Option<Forking>, end: fn(&'static Pager, Fork), list: &AtomicPtr<c_void>) {
    let Some(mut current) = current else { return };
    if let Some(fork) = current.fork.take() {
        local::unlock_after_fork();
        if let Some(pager) = pager() {
            end(pager, fork);
        }
    }
    FORKING.store(0, Release);
    sys::wake(&FORKING);
    call(list);
}

/// Makes resident what the C library's fork code touches in the child before our handler runs: the
/// locks of all open files. The pager evicts nothing until the fork is over.
fn touch_open_files() {
    // SAFETY: walks glibc's list of open files by its ABI, with the list's lock held.
    unsafe {
        let mut file = _IO_list_all;
        for _ in 0..MAX_FILES {
            if file.is_null() {
                return;
            }
            std::ptr::read_volatile(file);
            std::ptr::read_volatile(file.add(FILE_BYTES - 1));
            let lock = file.add(FILE_LOCK_OFFSET).cast::<*const u8>().read_volatile();
            if !lock.is_null() {
                std::ptr::read_volatile(lock);
            }
            file = file.add(FILE_CHAIN_OFFSET).cast::<*const u8>().read_volatile();
        }
    }
}
