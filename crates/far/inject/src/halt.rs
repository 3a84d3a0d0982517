//! Threads of a process that stand still to be inspected: nothing is put into it.
//!
//! A process with a preloaded pager brings its pages by threads of its own, so these must run while
//! its memory is read: the caller says which threads stand still.
//!
//! Invariant: ptrace is per thread, so [`Halted`] stays in the thread that made it. When that
//! thread ends, the kernel releases everything in any case.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::error::InjectError;
use crate::limits::MAX_STOP_MS;
use crate::procfs;
use crate::stop::{self, Stopped};
use crate::sys::{self, Stop};
use crate::task::Tid;

/// Threads that stand still until this is dropped.
#[derive(Debug)]
pub struct Halted {
    stopped: Stopped,
    /// They were resumed, but are still traced.
    run: bool,
    _stays_in_its_thread: PhantomData<*const ()>,
}

/// Stops the wanted threads of a process, of which there must be at least one, and those that they
/// make meanwhile.
pub fn halt(pid: Pid, wanted: &dyn Fn(i32) -> bool) -> Result<Halted, InjectError> {
    let pid = Tid(pid.as_raw_nonzero().get());
    let stopped = stop::stop_those(pid, &|tid| wanted(tid.0))?;
    Ok(Halted { stopped, run: false, _stays_in_its_thread: PhantomData })
}

impl Halted {
    /// The threads, the first of the process first if it is among them.
    pub fn threads(&self) -> Vec<i32> {
        self.stopped.threads().iter().map(|tid| tid.0).collect()
    }

    /// A set of registers of one of them, by its note number in a core file (NT_PRSTATUS for
    /// example). None if the processor has no such set, or the thread was killed or is not among
    /// them.
    pub fn registers(&self, thread: i32, kind: u32) -> Option<Vec<u8>> {
        let is_halted = !self.run && self.stopped.threads().contains(&Tid(thread));
        is_halted.then(|| sys::register_set(Tid(thread), usize::try_from(kind).ok()?)).flatten()
    }

    /// Lets them run until this is dropped, even if the whole process was stopped by SIGSTOP: it
    /// then stops again. [`Halted::keep_running`] has to be called now and then.
    pub fn let_run(&mut self) {
        self.run = true;
        // A thread that was killed needs nothing.
        self.stopped.threads().iter().for_each(|tid| drop(sys::go_on(*tid, None)));
    }

    /// Resumes threads that stopped again: a thread stopped by SIGSTOP reports its stop twice, and
    /// all report SIGCONT.
    pub fn keep_running(&self) {
        for tid in self.stopped.threads().iter().filter(|_| self.run) {
            let signal = match sys::look(*tid) {
                Ok(Some(Stop::Signal(signal))) => Some(signal),
                Ok(Some(Stop::Asked | Stop::Call | Stop::Cloned)) => None,
                Ok(Some(Stop::Ended) | None) | Err(_) => continue,
            };
            let _ = sys::go_on(*tid, signal);
        }
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if self.run {
            let deadline = Instant::now() + Duration::from_millis(MAX_STOP_MS);
            for tid in self.stopped.threads() {
                // A thread that does not stop in time is released by the kernel when this thread
                // ends.
                let _ = sys::interrupt(*tid);
                let _ = sys::wait(*tid, deadline, || procfs::has_ended(*tid));
            }
        }
        self.stopped.release();
    }
}
