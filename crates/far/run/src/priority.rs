//! The keeper's priority: real-time while it watches the tree, the usual one while it reaps.

/// Lets the calling thread, and those it starts, check the tree in time, however many of the
/// program's threads want the CPUs. If refused (it needs CAP_SYS_NICE), a busy machine sees the
/// limit overrun.
pub(crate) fn be_prompt() {
    set(libc::SCHED_FIFO, 1);
}

/// Does something with the usual priority. A real-time thread must not reap: the kernel removes the
/// dead process's entries from /proc, and while a thread that is about to end removes some of them,
/// it tries again and again. A real-time thread does not let that other thread on the processor:
/// both waited for up to a second, until the kernel's limit for real-time threads.
pub(crate) fn at_usual_priority<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: 0 is the calling thread.
    if unsafe { libc::sched_getscheduler(0) } != libc::SCHED_FIFO {
        return work();
    }
    set(libc::SCHED_OTHER, 0);
    let result = work();
    be_prompt();
    result
}

/// Changes the calling thread's policy, if it may.
fn set(policy: i32, sched_priority: i32) {
    let parameter = libc::sched_param { sched_priority };
    // SAFETY: 0 is the calling thread; a pointer to a live sched_param.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> i32 {
        // SAFETY: 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn the_usual_priority_is_for_the_work_alone() {
        assert_eq!(at_usual_priority(policy), libc::SCHED_OTHER);
        assert_eq!(policy(), libc::SCHED_OTHER, "it was not prompt before");
        be_prompt();
        let prompt = policy();
        assert_eq!(at_usual_priority(policy), libc::SCHED_OTHER);
        assert_eq!(policy(), prompt);
    }
}
