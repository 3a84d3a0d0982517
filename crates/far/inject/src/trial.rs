//! Checks whether this process may do what an injection needs, by trying it on a child that does
//! nothing: a security module, a container's seccomp filter or a process-id namespace may forbid
//! any of it.

use std::io::Error;
use std::os::fd::AsFd;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, WaitOptions, pidfd_getfd, pidfd_open};

use crate::error::InjectError;
use crate::procfs::Memory;
use crate::stop;
use crate::sys;
use crate::task::{Signal, Tid};

/// What an injection needs and this process may not do.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    #[error("no child can be made to try it on ({0})")]
    Child(Error),
    #[error("{0}")]
    Trace(InjectError),
    #[error("a traced process's memory cannot be written to (/proc/PID/mem: {0})")]
    Memory(Error),
    #[error("a descriptor of a traced process cannot be had (pidfd_getfd: {0})")]
    Descriptor(Error),
    #[error("address spaces cannot be compared (kcmp: {0})")]
    Compare(Error),
}

impl TrialError {
    /// True if tracing itself is what is forbidden.
    pub fn is_of_tracing(&self) -> bool {
        matches!(self, TrialError::Trace(InjectError::NotPermitted { .. }))
    }
}

/// Tries everything but the image on a child of this process, which has ended afterwards. It takes
/// some hundred microseconds.
pub fn try_tracing() -> Result<(), TrialError> {
    let failed = |errno: rustix::io::Errno| TrialError::Child(errno.into());
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    let child = sys::fork_idle(writer.as_fd()).map_err(TrialError::Child)?;
    drop(writer);
    // The child opens itself to its tracer before it writes. If it ends, so does the pipe.
    let begun = rustix::io::read(&reader, &mut [0; 1]).map_err(failed);
    let tried = begun.and_then(|_| try_on(child));
    sys::send(child, Signal(libc::SIGKILL));
    if let Some(child) = Pid::from_raw(child.0) {
        // No other thread waits for its end. A requested stop may be reported first.
        while let Ok(Some((_, status))) =
            rustix::process::waitpid(Some(child), WaitOptions::empty())
            && !(status.exited() || status.signaled())
        {}
    }
    tried
}

fn try_on(child: Tid) -> Result<(), TrialError> {
    let mut stopped = stop::stop(child).map_err(TrialError::Trace)?;
    let memory = Memory::open(child).map_err(TrialError::Memory);
    let tried = memory.and_then(|_| try_descriptor(child));
    stopped.release();
    tried?;
    sys::compare_memory(child).map_err(TrialError::Compare)
}

fn try_descriptor(child: Tid) -> Result<(), TrialError> {
    let failed = |errno: rustix::io::Errno| TrialError::Descriptor(errno.into());
    let Some(pid) = Pid::from_raw(child.0) else { return Ok(()) };
    let handle = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    // The descriptor does not matter, nor whether it is open: a lack of permission is reported
    // first.
    match pidfd_getfd(&handle, 0, PidfdGetfdFlags::empty()) {
        Ok(_) | Err(rustix::io::Errno::BADF) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trial_leaves_no_child() {
        let children = || std::fs::read_to_string(format!("/proc/self/task/{}/children", tid()));
        let before = children().expect("children");
        match try_tracing() {
            Ok(()) => {}
            Err(error) => println!("SKIPPED: tracing is forbidden here: {error}"),
        }
        assert_eq!(children().expect("children"), before);
    }

    fn tid() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }
}
