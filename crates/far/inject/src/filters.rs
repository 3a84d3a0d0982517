//! Seccomp filters: a process's own, or those that this process has, too.
//!
//! What a filter allows cannot be read without rights over the whole machine. But most filters are
//! a container's, and apply to all that runs there. A process under exactly the filters of this
//! process may do what this process may.

use std::fs;
use std::sync::OnceLock;

use rustix::process::{Pid, WaitOptions};

use crate::procfs::{self, Status};
use crate::sys;
use crate::task::Tid;

const FILTERED: i32 = 2;

/// True if a process has a filter.
pub fn is_filtered(status: &Status) -> bool {
    status.number("Seccomp") == Some(FILTERED)
}

/// True if a process is under exactly the filters of this process: as many, in the same cgroup.
/// Filters are never removed, and a container's processes begin with the container's; a service
/// with the same number of filters is in another cgroup.
pub fn are_own(tid: Tid) -> bool {
    let own = Tid(rustix::process::getpid().as_raw_nonzero().get());
    let of = |tid: Tid| {
        let status = Status::read(tid).ok()?;
        let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", tid.0)).ok()?;
        is_filtered(&status).then_some((status.number("Seccomp_filters")?, cgroup))
    };
    of(own).is_some_and(|found| of(tid) == Some(found))
}

/// True if filters let a sidecar of the process make memory executable: it runs under its program's
/// filters.
pub fn may_execute(pid: Pid) -> bool {
    let tid = procfs::living(Tid(pid.as_raw_nonzero().get()));
    let is_free = Status::read(tid).is_ok_and(|status| status.number("Seccomp").unwrap_or(0) == 0);
    is_free || (are_own(tid) && is_execution_allowed())
}

/// True if this process's own filters allow it. They are the same for its life.
fn is_execution_allowed() -> bool {
    static IS_ALLOWED: OnceLock<bool> = OnceLock::new();
    *IS_ALLOWED.get_or_init(try_execution)
}

/// Tries it in a child: a filter may kill a process that tries.
fn try_execution() -> bool {
    let Ok(child) = sys::fork_executing() else { return false };
    let Some(child) = Pid::from_raw(child.0) else { return false };
    let ended = rustix::process::waitpid(Some(child), WaitOptions::empty());
    ended.is_ok_and(|ended| ended.is_some_and(|(_, status)| status.exit_status() == Some(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_no_filter_may_and_has_none_of_another() {
        let own = rustix::process::getpid();
        let tid = Tid(own.as_raw_nonzero().get());
        if is_filtered(&Status::read(tid).expect("status")) {
            assert!(are_own(tid));
            return println!("SKIPPED: this process is under a seccomp filter");
        }
        assert!(!are_own(tid), "there is none");
        assert!(may_execute(own) && is_execution_allowed());
    }
}
