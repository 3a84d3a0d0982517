//! Why an injection failed. Each message names the process and the remedy.

use std::io;

use crate::elf::ElfError;
use crate::limits::MAX_STOP_MS;

/// Why no sidecar was put into the program. The program goes on as before except for
/// [`InjectError::Died`].
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    #[error("the sidecar's image cannot be used: {0}")]
    Image(#[from] ElfError),
    #[error("there is no process {pid}; it may have ended")]
    NoProcess { pid: i32 },
    #[error(
        "process {pid} is traced already, by process {tracer} (a debugger or strace); detach it \
         and try again"
    )]
    AlreadyTraced { pid: i32, tracer: i32 },
    #[error(
        "process {pid} may not be traced; run as root or with CAP_SYS_PTRACE, or as the same user \
         with kernel.yama.ptrace_scope=0"
    )]
    NotPermitted { pid: i32 },
    #[error(
        "process {pid} is of another architecture than this farpool; use a farpool built for it"
    )]
    OtherArchitecture { pid: i32 },
    #[error(
        "process {pid} is under strict seccomp: it may only read, write and exit, so nothing can \
         be put into it"
    )]
    SeccompStrict { pid: i32 },
    #[error("process {pid} cannot take a sidecar: {reason}")]
    Sealed { pid: i32, reason: &'static str },
    #[error(
        "process {pid} is busy: its thread {tid} did not stop within {MAX_STOP_MS} ms (it waits \
         for a disk, or for a vfork'd child to exec); try again"
    )]
    Busy { pid: i32, tid: i32 },
    #[error(
        "task {tid}, made for process {pid}, did not answer ({call}) in time; the machine is \
         overloaded, or the program's address space is locked; try again"
    )]
    Slow { pid: i32, tid: i32, call: &'static str },
    #[error("process {pid} has more than {max} threads; they would be stopped for too long")]
    TooManyThreads { pid: i32, max: usize },
    #[error("process {pid} ended while the sidecar was put into it")]
    Died { pid: i32 },
    #[error(
        "no system call instruction was found in process {pid}: it has no vdso and no readable text"
    )]
    NoGate { pid: i32 },
    #[error(
        "{call} on behalf of process {pid} failed: {source}; {reason}",
        reason = usual_reason(source)
    )]
    Refused { pid: i32, call: &'static str, source: io::Error },
    #[error("{what} failed for process {pid}: {source}")]
    Kernel { pid: i32, what: &'static str, source: io::Error },
}

/// What usually makes the kernel refuse a call in a process, and the setting to look at.
fn usual_reason(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "it may open too few more files; raise RLIMIT_NOFILE (ulimit -n)",
        Some(libc::ENOMEM) => {
            "it may map too little more memory; raise RLIMIT_AS and RLIMIT_DATA (ulimit -v, -d)"
        }
        Some(libc::EAGAIN) => {
            "it may start too few more tasks (RLIMIT_NPROC, or pids.max of its control group), or \
             is scheduled under SCHED_DEADLINE, where the kernel lets it start none"
        }
        _ => "a seccomp filter is the usual reason",
    }
}

/// The failure of a step on one task; the caller knows the process and adds it.
#[derive(Debug)]
pub(crate) enum StepError {
    /// The task ended.
    Gone,
    /// It did not stop within the time allowed.
    Busy,
    /// A call did not return within the time allowed.
    Late(&'static str),
    /// The task got a signal that no mask blocks (a fault, or SIGSYS).
    Fault,
    /// New mappings are locked at once (mlockall with MCL_FUTURE).
    Locked,
    Refused(&'static str, io::Error),
    Kernel(&'static str, io::Error),
}

impl StepError {
    /// Names the call that was late.
    pub(crate) fn during(self, call: &'static str) -> Self {
        if let Self::Late(_) = self { Self::Late(call) } else { self }
    }

    pub(crate) fn of(self, pid: i32, tid: i32) -> InjectError {
        match self {
            Self::Gone => InjectError::Died { pid },
            Self::Busy => InjectError::Busy { pid, tid },
            Self::Late(call) => InjectError::Slow { pid, tid, call },
            Self::Fault => InjectError::Sealed {
                pid,
                reason: "a system call made for it was answered by a fault",
            },
            Self::Locked => InjectError::Sealed {
                pid,
                reason: "it has all memory that it maps locked (mlockall with MCL_FUTURE), so \
                         none of it can be far",
            },
            Self::Refused(call, source) => InjectError::Refused { pid, call, source },
            Self::Kernel(what, source) => InjectError::Kernel { pid, what, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_call_names_the_limit_that_is_likely() {
        let said = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            InjectError::Refused { pid: 7, call: "open", source }.to_string()
        };
        for (errno, word) in [
            (libc::EMFILE, "RLIMIT_NOFILE"),
            (libc::ENOMEM, "RLIMIT_AS"),
            (libc::EAGAIN, "SCHED_DEADLINE"),
            (libc::EPERM, "seccomp"),
        ] {
            let text = said(errno);
            assert!(text.contains(word) && text.contains("process 7"), "{text}");
        }
    }
}
