//! Programs stand still for a moment because their sidecars want it: only then memory that may not
//! be written to is moved out (`farpool_pager::sys::standstill`).
//!
//! All threads of all processes that run in the memory are stopped, including those of vfork: the
//! sidecar changes the protection of that memory meanwhile. If one cannot be stopped, the sidecar
//! gives up, and asks again later.

use std::collections::HashSet;

use farpool_inject::{InjectError, Pid, Standstill, standstill};

use crate::holder::sharers;
use crate::sidecars::Ward;

/// How often the processes that share the memory are searched, each time after all found so far
/// have been stopped: one that was not stopped yet may have made another.
const MOST_LOOKS: u32 = 10;

/// Stops all processes whose sidecars want it.
pub(crate) fn grant_all(wards: &mut [Ward]) {
    for ward in wards {
        if ward.take_standstill() {
            // If no thread can be had the sidecar waits in vain.
            let _ = standstill(|still| grant(ward, still));
        }
    }
}

/// The same within a standstill that already holds some of them.
pub(crate) fn grant_all_at(wards: &mut [Ward], still: &mut Standstill) {
    for ward in wards {
        if ward.take_standstill() {
            let before: HashSet<Pid> = still.pids().collect();
            grant(ward, still);
            let stopped: Vec<Pid> = still.pids().filter(|pid| !before.contains(pid)).collect();
            stopped.into_iter().for_each(|pid| still.release(pid));
        }
    }
}

fn grant(ward: &mut Ward, still: &mut Standstill) {
    if stop_all(ward, still).is_ok() {
        // A sidecar that does not answer is noticed elsewhere: it has ended, or has fallen silent.
        let _ = ward.ask("STANDING", "");
    }
}

/// Stops the process and all that share its memory, except for its servants.
fn stop_all(ward: &Ward, still: &mut Standstill) -> Result<(), InjectError> {
    let pid = ward.pid.as_raw_nonzero().get().unsigned_abs();
    let serving: HashSet<u32> = ward.servants().collect();
    still.stop(ward.pid)?;
    let mut stopped = HashSet::new();
    for _ in 0..MOST_LOOKS {
        let found = sharers(pid).into_iter();
        let others = found.filter(|other| !serving.contains(other));
        let new: Vec<u32> = others.filter(|other| stopped.insert(*other)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for other in new.into_iter().filter_map(|other| Pid::from_raw(i32::try_from(other).ok()?)) {
            match still.stop(other) {
                // It has ended.
                Ok(()) | Err(InjectError::NoProcess { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Err(InjectError::Busy { pid: ward.pid.as_raw_nonzero().get(), tid: 0 })
}
