//! Stops all threads of a process, and resumes them.
//!
//! All of them, because a helper task is the process's child for a moment, which another thread
//! would see in wait4. Stopped by SEIZE and INTERRUPT: no signal is sent, a group stop is
//! preserved, and signals that arrive are delivered as usual. Whatever goes wrong, the end of the
//! injecting thread makes the kernel release every thread.

use std::collections::HashSet;
use std::io::Error;
use std::time::{Duration, Instant};

use crate::error::{InjectError, StepError};
use crate::limits::{MAX_STOP_MS, MAX_THREADS};
use crate::procfs;
use crate::sys::{self, Stop};
use crate::task::Tid;

/// The same for a thread that could stop but gets no processor for it: it would not run anyway, nor
/// would the others.
const MAX_STARVED_MS: u64 = 2_000;
/// Most reads of /proc/PID/task; each but the last found threads made since the one before. A
/// stopped thread makes none, so this ends; the limit is for a process that is not to be trusted.
const MAX_ROUNDS: usize = 1_000;

/// A process whose threads are all stopped.
#[derive(Debug)]
pub struct Stopped {
    pid: Tid,
    threads: Vec<Tid>,
    pub since: Instant,
}

/// Stops the process.
pub fn stop(pid: Tid) -> Result<Stopped, InjectError> {
    stop_those(pid, &|_| true)
}

/// Stops the wanted threads of the process.
pub fn stop_those(pid: Tid, wanted: &dyn Fn(Tid) -> bool) -> Result<Stopped, InjectError> {
    let mut stopped = Stopped { pid, threads: Vec::new(), since: Instant::now() };
    match stopped.gather(wanted) {
        Ok(()) if stopped.threads.is_empty() => Err(InjectError::NoProcess { pid: pid.0 }),
        Ok(()) => Ok(stopped),
        Err(error) => {
            stopped.release();
            Err(error)
        }
    }
}

impl Stopped {
    /// The stopped threads, the first thread of the process first if it lives.
    pub fn threads(&self) -> &[Tid] {
        &self.threads
    }

    /// Resumes all threads but one.
    pub fn release_but(&mut self, kept: Tid) {
        let go = self.threads.iter().filter(|tid| **tid != kept);
        go.for_each(|tid| drop(sys::detach(*tid)));
        self.threads.retain(|tid| *tid == kept);
    }

    /// Resumes all threads.
    pub fn release(&mut self) {
        self.threads.drain(..).for_each(|tid| drop(sys::detach(tid)));
    }

    fn gather(&mut self, wanted: &dyn Fn(Tid) -> bool) -> Result<(), InjectError> {
        let deadline = self.since + Duration::from_millis(MAX_STOP_MS);
        let mut known = HashSet::new();
        for _ in 0..MAX_ROUNDS {
            let Ok(mut found) = procfs::threads(self.pid) else {
                return Err(InjectError::NoProcess { pid: self.pid.0 });
            };
            found.retain(|tid| wanted(*tid) && known.insert(*tid));
            if found.is_empty() {
                return Ok(());
            }
            if known.len() > MAX_THREADS {
                return Err(InjectError::TooManyThreads { pid: self.pid.0, max: MAX_THREADS });
            }
            self.take(&found, deadline)?;
        }
        Err(InjectError::Busy { pid: self.pid.0, tid: self.pid.0 })
    }

    /// Seizes, interrupts and awaits threads; those that end meanwhile are left out.
    fn take(&mut self, found: &[Tid], deadline: Instant) -> Result<(), InjectError> {
        let mut seized = Vec::with_capacity(found.len());
        for tid in found {
            match sys::seize(*tid) {
                Ok(()) => seized.push(*tid),
                Err(_) if procfs::has_ended(*tid) => {}
                Err(error) => return Err(refusal(self.pid, *tid, error)),
            }
        }
        for tid in &seized {
            if let Err(error) = sys::interrupt(*tid)
                && error.raw_os_error() != Some(libc::ESRCH)
            {
                return Err(StepError::Kernel("PTRACE_INTERRUPT", error).of(self.pid.0, tid.0));
            }
        }
        let mut failure = None;
        for tid in seized {
            match await_stop(tid, deadline) {
                Ok(true) => self.threads.push(tid),
                Ok(false) => {}
                // The others are stopped, or will be at once: only a stopped thread can be
                // detached.
                Err(error) => {
                    failure.get_or_insert_with(|| error.of(self.pid.0, tid.0));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Waits for a thread's stop. False if it ended instead. A signal that arrives first is delivered:
/// its handler's frame is made, and the stop follows before the handler runs.
pub fn await_stop(tid: Tid, mut deadline: Instant) -> Result<bool, StepError> {
    let last = deadline + Duration::from_millis(MAX_STARVED_MS - MAX_STOP_MS);
    loop {
        let stop = sys::wait(tid, deadline, || procfs::has_ended(tid));
        match stop.map_err(|error| StepError::Kernel("waitpid", error))? {
            None if deadline < last && procfs::is_runnable(tid) => deadline = last,
            None => return Err(StepError::Busy),
            Some(Stop::Ended) => return Ok(false),
            Some(Stop::Asked) => break,
            Some(Stop::Signal(signal)) => drop(sys::go_on(tid, Some(signal))),
            Some(Stop::Call | Stop::Cloned) => drop(sys::go_on(tid, None)),
        }
    }
    mend(tid);
    Ok(true)
}

/// Makes a call that only our stop ended go on afterwards (epoll_wait and others).
fn mend(tid: Tid) {
    if let Ok(Some(registers)) = sys::registers(tid)
        && let Some(restarted) = registers.restarted()
    {
        // A failure means that the thread was killed.
        let _ = sys::set_registers(tid, &restarted);
    }
}

/// Why a thread could not be seized.
fn refusal(pid: Tid, tid: Tid, error: Error) -> InjectError {
    let tracer = procfs::Status::read(tid).ok().and_then(|status| status.number("TracerPid"));
    match (error.raw_os_error(), tracer) {
        (_, Some(tracer)) if tracer != 0 => InjectError::AlreadyTraced { pid: pid.0, tracer },
        (Some(libc::EPERM | libc::EACCES), _) => InjectError::NotPermitted { pid: pid.0 },
        _ => InjectError::Kernel { pid: pid.0, what: "PTRACE_SEIZE", source: error },
    }
}
