//! Takes a sidecar out of a program again: its memory is unmapped in its own name, then it is
//! killed.
//!
//! Its threads are stopped and never go on, so the stacks they are on can go, too. The program is
//! not stopped.

use std::ops::Range;

use rustix::process::Pid;

use crate::arch::number;
use crate::error::{InjectError, StepError};
use crate::procfs::{self, Gate, Memory};
use crate::remote::Remote;
use crate::standing;
use crate::stop;
use crate::sys;
use crate::task::{Signal, SignalSet, Tid};

/// RSEQ_FLAG_UNREGISTER.
const UNREGISTER: u64 = 1;
/// Size of `struct robust_list_head`.
const ROBUST_LIST_BYTES: u64 = 24;

/// Ends the sidecar and unmaps `ranges`, all of them its own. Nothing may wait for it: neither for
/// pages nor for events of a userfaultfd that covers them.
pub fn withdraw(sidecar: Pid, ranges: &[Range<u64>]) -> Result<(), InjectError> {
    let pid = Tid(sidecar.as_raw_nonzero().get());
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("farpool-inject".into());
        let kernel = |source| InjectError::Kernel { pid: pid.0, what: "a thread", source };
        let thread = builder.spawn_scoped(scope, || withdraw_here(pid, ranges)).map_err(kernel)?;
        thread.join().unwrap_or_else(|_| Err(kernel(std::io::Error::other("it panicked"))))
    })
}

fn withdraw_here(pid: Tid, ranges: &[Range<u64>]) -> Result<(), InjectError> {
    standing::prefer_all(pid);
    let stopped = stop::stop(pid)?;
    let result = unmap(stopped.threads(), ranges).map_err(|error| error.of(pid.0, pid.0));
    // Killed, not resumed: what it would run on is gone.
    sys::send(pid, Signal(libc::SIGKILL));
    result
}

fn unmap(threads: &[Tid], ranges: &[Range<u64>]) -> Result<(), StepError> {
    let kernel = |what| move |error| StepError::Kernel(what, error);
    let first = *threads.first().ok_or(StepError::Gone)?;
    let memory = Memory::open(first).map_err(kernel("opening its memory"))?;
    let mut mappings = procfs::mappings(first).map_err(kernel("reading its mappings"))?;
    // The instruction that makes the calls must not be unmapped by them.
    mappings.retain(|mapping| !ranges.iter().any(|range| range.contains(&mapping.start)));
    let gate = procfs::find_gate(&memory, &mappings).ok_or(StepError::Fault)?;
    let mut remotes = Vec::with_capacity(threads.len());
    for tid in threads {
        remotes.push(let_go(*tid, gate)?);
    }
    let remote = remotes.first_mut().ok_or(StepError::Gone)?;
    for range in ranges {
        let bytes = range.end - range.start;
        remote.call("munmap", number::MUNMAP, [range.start, bytes, 0, 0, 0, 0])?;
    }
    Ok(())
}

/// Makes the kernel forget the memory that it would touch in a thread's name: its restartable
/// sequence, on the way out of any call (a fault there is a SIGSEGV), and at its end the word that
/// reports it and the locks that it may hold. By then the program may have memory of its own there.
fn let_go(tid: Tid, gate: Gate) -> Result<Remote, StepError> {
    let kernel = |what| move |error| StepError::Kernel(what, error);
    let registers = sys::registers(tid).map_err(kernel("PTRACE_GETREGSET"))?;
    let mut remote = Remote::new(tid, gate, registers.ok_or(StepError::Fault)?);
    // It ends with its tracer: it must not go on with registers that were made up for a call.
    let deadly = sys::OPTION_SYSGOOD | sys::OPTION_EXITKILL;
    sys::set_options(tid, deadly).map_err(kernel("PTRACE_SETOPTIONS"))?;
    sys::set_signal_mask(tid, SignalSet(u64::MAX)).map_err(kernel("PTRACE_SETSIGMASK"))?;
    if let Some(area) = sys::rseq(tid) {
        let arguments = [area.address, area.bytes.into(), UNREGISTER, area.signature.into(), 0, 0];
        remote.call("rseq", number::RSEQ, arguments)?;
    }
    remote.call("set_tid_address", number::SET_TID_ADDRESS, [0; 6])?;
    remote.call("set_robust_list", number::SET_ROBUST_LIST, [0, ROBUST_LIST_BYTES, 0, 0, 0, 0])?;
    Ok(remote)
}
