//! The warden: a process that shares the sidecar's descriptor table and outlives it.
//!
//! When a program forks the kernel puts the child's userfaultfd into the table of the process that
//! reads the event, and nowhere else. Were the sidecar killed before the keeper has a duplicate,
//! the table would go, the child's memory would be unregistered, and the child would read zeros. So
//! the table is the warden's, too. It waits for the sidecar's end, in one system call. Then it
//! signals that to the keeper (the control socket does not end by itself while the table is there),
//! and once the keeper has done its part and closed its end, or has ended as well, the warden ends
//! the program and those of its children that wait for a page.
//!
//! Invariant: until the sidecar has ended the warden makes raw system calls only, since it has the
//! thread-local storage of the thread that made it. Afterwards no other thread uses that; but locks
//! may be held for ever, so it allocates nothing.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use crate::watch::Host;
use crate::{CONTROL_FD, bereft, paging, raw};

/// Its name in `ps`.
const NAME: &std::ffi::CStr = c"farpool-warden";
/// Its deepest frame has room for 16 messages of a userfaultfd; the guard page is extra.
const STACK_BYTES: usize = 4 * farpool_units::PAGE_BYTES;
/// Longest wait for a killed process (1 s); on a busy machine it takes some milliseconds.
const END_TIME: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The program, stored for when nothing can be asked any more.
static HOST: OnceLock<Host> = OnceLock::new();
/// A pidfd of the sidecar, which the warden waits for.
static SIDECAR: AtomicI32 = AtomicI32::new(-1);
static STACK: OnceLock<usize> = OnceLock::new();
static WARDEN: Mutex<Option<Warden>> = Mutex::new(None);
/// It is not replaced when it ends.
static IS_DISMISSED: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Warden {
    pid: i32,
    process: OwnedFd,
}

/// Makes the warden. Returns a pidfd of it.
pub fn make(host: Host) -> Result<OwnedFd, String> {
    let failed = |what| move |error| format!("the warden cannot be made: {what}: {error}");
    let mut warden = lock();
    if warden.is_some() {
        return Err("there is a warden already".into());
    }
    let _ = HOST.set(host);
    if SIDECAR.load(SeqCst) < 0 {
        let own = pidfd_open(getpid(), PidfdFlags::empty());
        SIDECAR.store(own.map_err(failed("a handle"))?.into_raw_fd(), SeqCst);
    }
    let stack = *STACK.get_or_init(|| raw::new_stack(STACK_BYTES));
    if stack == 0 {
        return Err("the warden cannot be made: it gets no stack".into());
    }
    let pid = raw::share_descriptors(hold, stack);
    let pid = pid.map_err(|error| format!("the warden cannot be made: {error}"))?;
    match handles(pid) {
        Ok((process, duplicate)) => {
            *warden = Some(Warden { pid, process });
            Ok(duplicate)
        }
        Err(error) => {
            // It is not known yet: the keeper would take it for a process of the program's.
            raw::end_child(pid);
            Err(failed("a handle of it")(error))
        }
    }
}

fn handles(pid: i32) -> Result<(OwnedFd, OwnedFd), Errno> {
    let process = pidfd_open(Pid::from_raw(pid).ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
    let duplicate = rustix::io::fcntl_dupfd_cloexec(&process, 0)?;
    Ok((process, duplicate))
}

/// Ends the warden: the table is to go with the sidecar.
pub fn dismiss() {
    IS_DISMISSED.store(true, SeqCst);
    if let Some(Warden { pid, process }) = lock().take() {
        let _ = pidfd_send_signal(&process, Signal::KILL);
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&END_TIME));
        // No other process reaps it while the sidecar lives.
        raw::reap(pid);
    }
}

/// True if the warden was killed and has to be replaced. It is forgotten then.
pub fn is_missing() -> bool {
    let mut warden = lock();
    let has_ended = warden.as_ref().is_some_and(|warden| raw::reap(warden.pid));
    if has_ended {
        *warden = None;
    }
    has_ended && !IS_DISMISSED.load(SeqCst)
}

/// The warden's life.
extern "C" fn hold(_: *mut libc::c_void) -> libc::c_int {
    raw::set_name(NAME);
    raw::await_event(SIDECAR.load(SeqCst), libc::POLLIN);
    // The keeper sees an end, after all messages of the sidecar, and closes its own: an error
    // (POLLHUP).
    raw::tell_no_more(CONTROL_FD);
    raw::await_event(CONTROL_FD, 0);
    if let Some(host) = HOST.get()
        && paging::may_owe_pages()
    {
        bereft::end_all(*host);
    }
    0
}

fn lock() -> MutexGuard<'static, Option<Warden>> {
    farpool_kernel::lock(&WARDEN)
}
