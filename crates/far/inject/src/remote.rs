//! System calls in the name of a stopped task, through an existing instruction.
//!
//! Invariant: the task's text is never changed. Signals are blocked by the caller (ptrace's mask),
//! so that none is handled with the registers made up here.

use std::io::Error;
use std::time::{Duration, Instant};

use farpool_units::exactly;

use crate::arch::Registers;
use crate::error::StepError;
use crate::procfs::Gate;
use crate::sys::{self, Phase, Stop};
use crate::task::{Signal, Tid};

/// Longest that one call may take while the program stands still; none of them waits for anything
/// but a processor. After that the injection is given up, and the program ends, since its thread is
/// in the middle of a call that it did not make. So this is longer than a thread goes without a
/// processor on a machine that still does anything: more than 2 s were seen with 40 runnable
/// threads for two processors, some of them preferred.
const MAX_STOPPED_CALL: Duration = Duration::from_secs(30);
/// Longest that one call of the sidecar may take. The program runs meanwhile, so there is no hurry;
/// on a busy machine a sidecar was seen runnable, but without a processor, for 500 ms.
const MAX_FREE_CALL: Duration = Duration::from_secs(10);
/// Tries of a call that the kernel wants restarted (it was interrupted before it did anything).
const MAX_TRIES: usize = 16;
/// Results from here to -1 are error numbers.
const MIN_ERROR: i64 = -4095;
/// ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK: never seen by programs.
const RESTARTS: [i64; 4] = [-512, -513, -514, -516];

/// A stopped task in whose name calls are made.
#[derive(Debug)]
pub struct Remote {
    pub tid: Tid,
    gate: Gate,
    base: Registers,
    /// The task cloned by the last call, by its id in our namespace.
    cloned: Option<Tid>,
    patience: Duration,
    /// A SIGSTOP arrived meanwhile; it is sent again afterwards.
    pub was_told_to_stop: bool,
    /// At least one call was begun: the registers are not the task's own any more.
    pub has_moved: bool,
}

impl Remote {
    pub fn new(tid: Tid, gate: Gate, base: Registers) -> Self {
        let patience = MAX_STOPPED_CALL;
        Self { tid, gate, base, cloned: None, patience, was_told_to_stop: false, has_moved: false }
    }

    /// For a newborn task: waits for its first stop.
    pub fn newborn(tid: Tid, gate: Gate) -> Result<Self, StepError> {
        match wait(tid, Instant::now() + MAX_STOPPED_CALL)? {
            Stop::Asked => {}
            Stop::Ended => return Err(StepError::Gone),
            _ => return Err(StepError::Fault),
        }
        let registers =
            sys::registers(tid).map_err(|e| StepError::Kernel("PTRACE_GETREGSET", e))?;
        Ok(Self::new(tid, gate, registers.ok_or(StepError::Fault)?))
    }

    /// From now on the program runs while calls are made.
    pub fn take_time(&mut self) {
        self.patience = MAX_FREE_CALL;
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }

    pub fn base(&self) -> &Registers {
        &self.base
    }

    /// Makes a call. Returns its result.
    pub fn call(
        &mut self,
        name: &'static str,
        number: u64,
        args: [u64; 6],
    ) -> Result<u64, StepError> {
        for _ in 0..MAX_TRIES {
            let answer = self.call_once(number, args).map_err(|error| error.during(name))?;
            match answer {
                _ if RESTARTS.contains(&answer) => {}
                MIN_ERROR..=-1 => {
                    let number = exactly(-answer);
                    return Err(StepError::Refused(name, Error::from_raw_os_error(number)));
                }
                _ => return Ok(answer.cast_unsigned()),
            }
        }
        Err(StepError::Late("interrupted again and again"))
    }

    /// Calls clone. Returns the new task in our namespace, and its id in the caller's.
    pub fn clone_task(&mut self, flags: u64) -> Result<(Tid, u64), StepError> {
        self.cloned = None;
        let own_id = self.call("clone", crate::arch::number::CLONE, [flags, 0, 0, 0, 0, 0])?;
        self.cloned.take().map(|tid| (tid, own_id)).ok_or(StepError::Fault)
    }

    fn call_once(&mut self, number: u64, args: [u64; 6]) -> Result<i64, StepError> {
        let registers = self.base.calling(self.gate.0, number, args);
        sys::set_registers(self.tid, &registers).map_err(gone_or("PTRACE_SETREGSET"))?;
        self.has_moved = true;
        let deadline = self.deadline();
        self.next_call_stop(deadline, Phase::Entry)?;
        match self.next_call_stop(deadline, Phase::Exit(0))? {
            Phase::Exit(answer) => Ok(answer),
            _ => Err(StepError::Fault),
        }
    }

    /// Runs to the next entry or exit; traps and events on the way are skipped.
    fn next_call_stop(&mut self, deadline: Instant, wanted: Phase) -> Result<Phase, StepError> {
        loop {
            sys::to_next_call(self.tid).map_err(gone_or("PTRACE_SYSCALL"))?;
            match wait(self.tid, deadline)? {
                Stop::Ended => return Err(StepError::Gone),
                Stop::Asked => {}
                Stop::Cloned => self.cloned = sys::cloned(self.tid).ok(),
                Stop::Signal(Signal(libc::SIGSTOP)) => self.was_told_to_stop = true,
                Stop::Signal(_) => return Err(StepError::Fault),
                Stop::Call => {
                    let phase = sys::phase(self.tid).map_err(gone_or("PTRACE_GET_SYSCALL_INFO"))?;
                    if matches!(phase, Phase::Entry) == matches!(wanted, Phase::Entry) {
                        return Ok(phase);
                    }
                }
            }
        }
    }

    /// Ends the task by a call of its own, and reaps it.
    pub fn exit(&mut self) -> Result<(), StepError> {
        let registers = self.base.calling(self.gate.0, crate::arch::number::EXIT, [0; 6]);
        sys::set_registers(self.tid, &registers).map_err(gone_or("PTRACE_SETREGSET"))?;
        let deadline = self.deadline();
        loop {
            // ESRCH is a task about to end: the wait reports that.
            let _ = sys::go_on(self.tid, None);
            if wait(self.tid, deadline)? == Stop::Ended {
                return Ok(());
            }
        }
    }

    /// Kills the task, and reaps it.
    pub fn kill(&self) {
        sys::send(self.tid, Signal(libc::SIGKILL));
        let deadline = self.deadline();
        while !matches!(wait(self.tid, deadline), Ok(Stop::Ended) | Err(_)) {}
    }

    /// Restores the task's own registers, at a stop from which the kernel does what is due for an
    /// interrupted system call. At the exit of a call it would not: an ERESTART result would reach
    /// the program.
    pub fn give_back(&self) -> Result<(), StepError> {
        if !self.has_moved {
            return Ok(());
        }
        sys::interrupt(self.tid).map_err(gone_or("PTRACE_INTERRUPT"))?;
        let deadline = self.deadline();
        loop {
            sys::go_on(self.tid, None).map_err(gone_or("PTRACE_CONT"))?;
            match wait(self.tid, deadline)? {
                Stop::Ended => return Err(StepError::Gone),
                Stop::Asked => break,
                _ => {}
            }
        }
        sys::set_registers(self.tid, &self.base).map_err(gone_or("PTRACE_SETREGSET"))
    }
}

/// ESRCH means the end of the task, anything else a failure of the request.
pub fn gone_or(what: &'static str) -> impl Fn(Error) -> StepError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => StepError::Gone,
        _ => StepError::Kernel(what, error),
    }
}

fn wait(tid: Tid, deadline: Instant) -> Result<Stop, StepError> {
    let stop = sys::wait(tid, deadline, || crate::procfs::has_ended(tid));
    stop.map_err(|error| StepError::Kernel("waitpid", error))?.ok_or(StepError::Late("a stop"))
}
