//! How soon a task gets a processor when others want it.
//!
//! A call in a task's name waits for a processor twice, and an injection makes some fifty, while
//! the program stands still or grows: that is long on a machine whose processors are busy. So the
//! thread that clones the sidecar is preferred until it is restored, and the sidecar for its life:
//! its first thread answers its keeper, and the pager's threads lower their own priority where they
//! should (`farpool_pager::sys::stand_back`).
//!
//! This uses the nice value and short slices, not a real-time policy: the program can write to the
//! sidecar's code, so the program may do whatever the sidecar may. It then gets a ten times larger
//! part of a processor, and no task starves. With short slices an injection beside eight busy loops
//! takes 13 and 15 ms instead of 17 and 19 (medians of 15).

use crate::procfs;
use crate::sys;
use crate::task::Tid;

/// How much smaller the nice value of a preferred task is. Ten steps are a weight ten times that of
/// the others, and with eight busy loops on two processors a wake-up took 66 us, not 2.8 ms (median
/// of 800).
pub const PREFERRED_STEPS: i32 = 10;
const LEAST_NICE: i32 = -20;
/// Its time slice: the least that the kernel grants (from Linux 6.12 on; earlier ones have no such
/// setting). A task with a shorter slice than the running one is scheduled before it.
const SLICE_NS: u64 = 100_000;

/// A task's scheduling before it was preferred.
#[derive(Clone, Copy)]
pub struct Standing {
    tid: Tid,
    before: libc::sched_attr,
}

impl Standing {
    /// Prefers a task. None if it has no nice value (real-time, or SCHED_IDLE), or we may not
    /// (CAP_SYS_NICE), which costs only time.
    pub fn prefer(tid: Tid) -> Option<Standing> {
        let before = sys::scheduling(tid).filter(has_nice)?;
        let preferred = libc::sched_attr {
            sched_nice: preferred(before.sched_nice),
            sched_runtime: SLICE_NS,
            ..before
        };
        sys::set_scheduling(tid, &preferred).then_some(Standing { tid, before })
    }

    /// Restores it; a task that has ended needs nothing. The slice that was read, even the kernel's
    /// default, counts as requested by the task from then on.
    pub fn give_back(self) {
        sys::set_scheduling(self.tid, &self.before);
    }
}

impl std::fmt::Debug for Standing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Standing");
        shown.field("tid", &self.tid).field("nice", &self.before.sched_nice).finish_non_exhaustive()
    }
}

/// True if a task's nice value counts. Pure.
fn has_nice(attributes: &libc::sched_attr) -> bool {
    let policy = i32::try_from(attributes.sched_policy);
    matches!(policy, Ok(libc::SCHED_OTHER | libc::SCHED_BATCH))
}

/// Prefers all threads of a process that is about to be killed. Some may be under SCHED_IDLE, and
/// would not stop while others want the processors. A refusal costs only time.
pub fn prefer_all(pid: Tid) {
    for tid in procfs::threads(pid).unwrap_or_default() {
        sys::leave_idle(tid);
        let _ = Standing::prefer(tid);
    }
}

/// The nice value of a preferred task. Pure.
fn preferred(nice: i32) -> i32 {
    (nice - PREFERRED_STEPS).max(LEAST_NICE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_nice_value_is_kept() {
        assert_eq!(preferred(0), -10);
        assert_eq!(preferred(19), 9);
        assert_eq!(preferred(-15), -20);
    }

    #[test]
    fn a_task_is_preferred_and_is_as_before_again() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let tid = Tid(i32::try_from(child.id()).expect("a process id"));
        let seen = || {
            let now = sys::scheduling(tid).expect("it lives");
            (now.sched_policy, now.sched_nice, now.sched_flags, now.sched_runtime)
        };
        let own = seen();
        match Standing::prefer(tid) {
            Some(standing) => {
                assert_eq!(seen().1, preferred(own.1));
                // Before Linux 6.12 there is none.
                assert!(own.3 == 0 || seen().3 == SLICE_NS, "{:?}", seen());
                standing.give_back();
            }
            None => println!("SKIPPED: a smaller nice value needs CAP_SYS_NICE"),
        }
        assert_eq!(seen(), own);
        child.kill().expect("a signal");
        child.wait().expect("its end");
    }
}
