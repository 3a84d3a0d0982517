//! Lifts the seccomp filter of a sidecar's first thread for a moment.
//!
//! A sidecar lives under its program's filters. One that kills who makes a process (QEMU's
//! `-sandbox on,spawn=deny`, which libvirt gives) would kill it when it makes its warden. The
//! kernel applies no filter to a thread whose tracer has suspended them, which needs CAP_SYS_ADMIN
//! and no filter of the tracer's own.

use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::filters;
use crate::limits::MAX_STOP_MS;
use crate::procfs::Status;
use crate::stop::{Stopped, await_stop, stop_those};
use crate::sys;
use crate::task::Tid;

/// Runs `body` while the first thread of the process `sidecar` is under no filter. Where filters
/// cannot be suspended `body` runs all the same: what it needs may be allowed.
pub fn unfiltered<T: Send>(sidecar: Pid, body: impl FnOnce() -> T + Send) -> T {
    let tid = Tid(sidecar.as_raw_nonzero().get());
    if !Status::read(tid).is_ok_and(|status| filters::is_filtered(&status)) {
        return body();
    }
    // In a thread of its own: when that ends the kernel releases what it traces, whatever happens.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let suspended = suspend(tid);
            let result = body();
            if let Some(suspended) = suspended {
                resume(tid, suspended);
            }
            result
        });
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Traces the thread, which runs on without filters.
fn suspend(tid: Tid) -> Option<Stopped> {
    let mut stopped = stop_those(tid, &|thread| thread == tid).ok()?;
    let options = sys::OPTION_SYSGOOD | sys::OPTION_SUSPEND_SECCOMP;
    let set = sys::set_options(tid, options).and_then(|()| sys::go_on(tid, None));
    if set.is_err() {
        stopped.release();
        return None;
    }
    Some(stopped)
}

fn resume(tid: Tid, mut suspended: Stopped) {
    // Only a stopped thread can be left. One that does not stop in time is left by this thread's
    // end.
    if sys::interrupt(tid).is_ok() {
        let _ = await_stop(tid, Instant::now() + Duration::from_millis(MAX_STOP_MS));
    }
    suspended.release();
}
