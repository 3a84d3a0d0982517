//! How soon a task gets a processor when others want it.
//!
//! A call in a task's name waits for a processor twice, and an injection makes some fifty, while
//! the program stands still or grows: that is long on a machine whose processors others want, too.
//! So the thread that bears the sidecar is preferred until it is given back, and the sidecar for
//! its life: its first thread answers its keeper, and the pager's threads stand back where they
//! shall (`farpool_pager::sys::stand_back`).
//!
//! By the nice value, not by a real-time policy: the program can write to the sidecar's code, so
//! whatever that may do the program may do, too. It gets a ten times larger part of a processor
//! then, and nobody starves.

use crate::procfs;
use crate::sys::{self, Tid};

/// So much smaller is the nice value of a task that is preferred. Ten steps are a weight ten times
/// that of the others, and with eight busy loops on two processors a wake-up took 66 us, not 2.8 ms
/// (median of 800).
pub const PREFERRED_STEPS: i32 = 10;
const LEAST_NICE: i32 = -20;

/// What a task had before it was preferred.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    tid: Tid,
    nice: i32,
}

impl Standing {
    /// Prefers a task. None: it has no nice value (real-time, or SCHED_IDLE), or we may not
    /// (CAP_SYS_NICE), which costs time only.
    pub fn prefer(tid: Tid) -> Option<Standing> {
        let nice = sys::nice(tid)?;
        sys::set_nice(tid, preferred(nice)).then_some(Standing { tid, nice })
    }

    /// Puts it back; a task that has ended needs nothing.
    pub fn give_back(self) {
        sys::set_nice(self.tid, self.nice);
    }
}

/// Prefers all threads of a process that is about to be ended. Some may be under SCHED_IDLE, and
/// would not come to a stop while others want the processors. A refusal costs time only.
pub fn prefer_all(pid: Tid) {
    for tid in procfs::threads(pid).unwrap_or_default() {
        sys::leave_idle(tid);
        let _ = Standing::prefer(tid);
    }
}

/// Pure.
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
    fn a_task_is_preferred_and_has_its_own_nice_value_again() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let tid = Tid(i32::try_from(child.id()).expect("a process id"));
        let own = sys::nice(tid).expect("a nice value");
        match Standing::prefer(tid) {
            Some(standing) => {
                assert_eq!(sys::nice(tid), Some(preferred(own)));
                standing.give_back();
            }
            None => println!("SKIPPED: a smaller nice value needs CAP_SYS_NICE"),
        }
        assert_eq!(sys::nice(tid), Some(own));
        child.kill().expect("a signal");
        child.wait().expect("its end");
    }
}
