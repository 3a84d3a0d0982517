//! The sidecar's birth: a task that shares the program's address space without being its child.
//!
//! A stopped thread of the program clones a helper, the helper clones the sidecar and exits, and
//! the thread reaps the helper. So the sidecar's parent is the nearest subreaper or init, and the
//! program has no child, zombie or SIGCHLD it did not make. Only clone, wait4 and prctl are called
//! in the program's name: none touches the restart block of the call that the thread is in.
//!
//! Where the program itself is that reaper (a subreaper, or the first process of a container) the
//! sidecar would become a child like any other, with a SIGCHLD. There the thread clones it
//! directly: a child without an exit signal, which wait ignores unless asked for such children
//! (__WALL). When it has ended, it is reaped in the program's name ([`reap`]).

use crate::arch::number;
use crate::error::StepError;
use crate::procfs::{Gate, Memory};
use crate::remote::{Remote, gone_or};
use crate::standing::Standing;
use crate::sys;
use crate::task::{Signal, SignalSet, Tid};

/// CLONE_VM | CLONE_FILES, and no exit signal. The descriptor table is shared for a moment only:
/// the sidecar's first call gives it an empty one, without ever taking a reference to any file of
/// the program (closing a copied table would flush files and drop the program's locks).
const CLONE_FLAGS: u64 = 0x100 | 0x400;
/// __WALL | WNOHANG.
const REAP_FLAGS: u64 = 0x4000_0000 | 1;
const PR_GET_CHILD_SUBREAPER: u64 = 37;
/// The first process of its namespace, which adopts orphans.
const FIRST_PROCESS: i32 = 1;
/// Offset of `rseq_cs` in `struct rseq`.
const RSEQ_SECTION: u64 = 8;

/// A sidecar, still traced and stopped.
#[derive(Debug)]
pub struct Born {
    pub sidecar: Remote,
    /// Its process id in the program's namespace, if it is the program's child.
    pub child: Option<i32>,
}

/// A thread of the program that makes the calls that the program must make itself.
#[derive(Debug)]
struct Worker {
    remote: Remote,
    mask: SignalSet,
    /// The thread's restartable sequence (address of `rseq_cs`, its value): the kernel clears the
    /// field when our calls leave the sequence, and would then not abort it.
    sequence: Option<(u64, [u8; 8])>,
    /// The thread is preferred meanwhile, and so are the tasks it clones.
    standing: Option<Standing>,
}

impl Worker {
    /// Blocks all signals of the thread: a handler must not see the registers made up for calls.
    /// Nor may the program: it would take the result of our call for that of its own. Until the
    /// thread is restored its process dies with us.
    fn new(tid: Tid, gate: Gate, memory: &Memory, options: usize) -> Result<Self, StepError> {
        let registers = sys::registers(tid).map_err(gone_or("PTRACE_GETREGSET"))?;
        let base = registers.ok_or(StepError::Fault)?;
        let mask = sys::signal_mask(tid).map_err(gone_or("PTRACE_GETSIGMASK"))?;
        let sequence = sys::rseq_address(tid).and_then(|area| {
            let (at, mut note) = (area + RSEQ_SECTION, [0; 8]);
            memory.read(at, &mut note).ok()?;
            (note != [0; 8]).then_some((at, note))
        });
        let deadly = options | sys::OPTION_CLONE | sys::OPTION_EXITKILL;
        sys::set_options(tid, deadly).map_err(gone_or("PTRACE_SETOPTIONS"))?;
        sys::set_signal_mask(tid, SignalSet(u64::MAX)).map_err(gone_or("PTRACE_SETSIGMASK"))?;
        let standing = Standing::prefer(tid);
        Ok(Self { remote: Remote::new(tid, gate, base), mask, sequence, standing })
    }

    fn give_back(&self, pid: Tid, memory: &Memory, options: usize) -> Result<(), StepError> {
        self.remote.give_back()?;
        if let Some((at, note)) = self.sequence {
            // The page was there a moment ago; without it the sequence is merely not aborted.
            let _ = memory.write(at, &note);
        }
        sys::set_signal_mask(self.remote.tid, self.mask).map_err(gone_or("PTRACE_SETSIGMASK"))?;
        sys::set_options(self.remote.tid, options).map_err(gone_or("PTRACE_SETOPTIONS"))?;
        if self.remote.was_told_to_stop {
            sys::send(pid, Signal(libc::SIGSTOP));
        }
        Ok(())
    }

    /// True if the program has asked for orphans below it to become its children. The answer is
    /// written to the thread's stack, which is restored: all threads stand still.
    fn is_subreaper(&mut self, memory: &Memory) -> Result<bool, StepError> {
        let at = self.remote.base().stack_pointer() & !7;
        let (mut kept, mut answer) = ([0; 8], [0; 8]);
        if memory.read(at, &mut kept).is_err() {
            return Ok(false);
        }
        let arguments = [PR_GET_CHILD_SUBREAPER, at, 0, 0, 0, 0];
        let asked = self.remote.call("prctl", number::PRCTL, arguments);
        let read = memory.read(at, &mut answer);
        let restored = memory.write(at, &kept);
        restored.map_err(|error| StepError::Kernel("putting back 8 bytes of a stack", error))?;
        match asked {
            Ok(_) => Ok(read.is_ok() && answer[..4] != [0; 4]),
            // If the question is refused the answer is no: hardly any program is a subreaper.
            Err(StepError::Refused(..)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Clones the sidecar as the program's own child.
    fn bear_child(&mut self, gate: Gate) -> Result<Born, StepError> {
        let (sidecar, own_id) = self.remote.clone_task(CLONE_FLAGS)?;
        let born = Remote::newborn(sidecar, gate).and_then(|remote| {
            // Without its process id the program could not reap it.
            let child = i32::try_from(own_id).map_err(|_| StepError::Fault)?;
            Ok(Born { sidecar: remote, child: Some(child) })
        });
        match born {
            Ok(born) => Ok(born),
            Err(error) => {
                sys::send(sidecar, Signal(libc::SIGKILL));
                Err(error)
            }
        }
    }

    /// Clones the helper and has it clone the sidecar.
    fn bear_orphan(&mut self, gate: Gate, options: usize) -> Result<Remote, StepError> {
        let (helper, own_id) = self.remote.clone_task(CLONE_FLAGS)?;
        let born = bear_through(helper, gate, options);
        let reaped = self.remote.call("wait4", number::WAIT4, [own_id, 0, REAP_FLAGS, 0, 0, 0]);
        match (born, reaped) {
            (Ok(sidecar), Ok(id)) if id == own_id => Ok(sidecar),
            (Ok(sidecar), reaped) => {
                sidecar.kill();
                Err(reaped.err().unwrap_or(StepError::Fault))
            }
            (Err(error), _) => Err(error),
        }
    }
}

/// The helper's whole life. In any case it has ended afterwards.
fn bear_through(helper: Tid, gate: Gate, options: usize) -> Result<Remote, StepError> {
    let mut helper = match Remote::newborn(helper, gate) {
        Ok(helper) => helper,
        Err(error) => {
            sys::send(helper, Signal(libc::SIGKILL));
            return Err(error);
        }
    };
    let born = clone_sidecar(&mut helper, gate, options);
    match (born, helper.exit()) {
        (Ok(sidecar), Ok(())) => Ok(sidecar),
        (Ok(sidecar), Err(error)) => {
            sidecar.kill();
            helper.kill();
            Err(error)
        }
        (Err(error), ended) => {
            if ended.is_err() {
                helper.kill();
            }
            Err(error)
        }
    }
}

fn clone_sidecar(helper: &mut Remote, gate: Gate, options: usize) -> Result<Remote, StepError> {
    let deadly = options | sys::OPTION_CLONE | sys::OPTION_EXITKILL;
    sys::set_options(helper.tid, deadly).map_err(gone_or("PTRACE_SETOPTIONS"))?;
    let (sidecar, _) = helper.clone_task(CLONE_FLAGS)?;
    Remote::newborn(sidecar, gate)
}

/// Has the stopped thread `tid` of process `pid` create a sidecar. `own_pid` is the process id in
/// its own namespace. Afterwards, also on failure, the thread is as before and still stopped.
pub fn bear(
    (pid, own_pid): (Tid, i32),
    tid: Tid,
    gate: Gate,
    memory: &Memory,
    options: usize,
    before_return: impl FnOnce(),
) -> Result<Born, StepError> {
    let mut worker = Worker::new(tid, gate, memory, options)?;
    let is_reaper = if own_pid == FIRST_PROCESS { Ok(true) } else { worker.is_subreaper(memory) };
    let born = match is_reaper {
        Ok(true) => worker.bear_child(gate),
        Ok(false) => {
            let sidecar = worker.bear_orphan(gate, options);
            sidecar.map(|sidecar| Born { sidecar, child: None })
        }
        Err(error) => Err(error),
    };
    before_return();
    // First, while the program still dies with us: it must not be left with another nice value.
    worker.standing.into_iter().for_each(Standing::give_back);
    let returned = worker.give_back(pid, memory, options);
    match (born, returned) {
        (Ok(born), Ok(())) => Ok(born),
        (Ok(born), Err(error)) => {
            born.sidecar.kill();
            Err(error)
        }
        (Err(error), _) => Err(error),
    }
}

/// Has the stopped thread `tid` of process `pid` reap a sidecar that was the program's child. The
/// thread is as before afterwards.
pub fn reap(
    pid: Tid,
    tid: Tid,
    gate: Gate,
    memory: &Memory,
    options: usize,
    child: i32,
) -> Result<(), StepError> {
    let mut worker = Worker::new(tid, gate, memory, options)?;
    let child = u64::try_from(child).map_err(|_| StepError::Fault)?;
    let reaped = worker.remote.call("wait4", number::WAIT4, [child, 0, REAP_FLAGS, 0, 0, 0]);
    worker.standing.take().into_iter().for_each(Standing::give_back);
    worker.give_back(pid, memory, options)?;
    match reaped {
        Ok(id) if id == child => Ok(()),
        Ok(_) => Err(StepError::Late("the sidecar's end")),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::procfs;
    use crate::stop::stop;

    /// Longest time until a program sleeps again.
    const GOES_ON_WITHIN: Duration = Duration::from_secs(30);

    /// How a program fared after the thread that had stopped it, and done `then`, ended.
    fn left_by(then: impl FnOnce(&mut Worker, Tid, &Memory) + Send + 'static) -> Child {
        let child = Command::new("sleep").arg("1000").spawn().expect("sleep");
        let pid = Tid(i32::try_from(child.id()).expect("a process id"));
        let tracer = std::thread::spawn(move || {
            let _stopped = stop(pid).expect("it stops");
            let memory = Memory::open(pid).expect("its memory");
            let mappings = procfs::mappings(pid).expect("its mappings");
            let gate = procfs::find_gate(&memory, &mappings).expect("a gate");
            let worker = Worker::new(pid, gate, &memory, sys::OPTION_SYSGOOD);
            then(&mut worker.expect("a worker"), pid, &memory);
        });
        tracer.join().expect("no panic");
        child
    }

    /// The calling thread may be killed at any instant: a call's result must not reach the program
    /// as its own.
    #[test]
    fn a_program_that_is_left_in_the_middle_of_a_call_ends() {
        let ends = [
            left_by(|_, _, _| {}),
            left_by(|worker, _, _| {
                worker
                    .remote
                    .call("getpid", libc::SYS_getpid.cast_unsigned(), [0; 6])
                    .expect("pid");
            }),
        ];
        for mut child in ends {
            assert_eq!(child.wait().expect("its end").signal(), Some(libc::SIGKILL));
        }
    }

    #[test]
    fn a_program_that_was_given_back_goes_on() {
        let mut child = left_by(|worker, pid, memory| {
            worker.remote.call("getpid", libc::SYS_getpid.cast_unsigned(), [0; 6]).expect("pid");
            worker.give_back(pid, memory, sys::OPTION_SYSGOOD).expect("as before");
        });
        let pid = Tid(i32::try_from(child.id()).expect("a process id"));
        // Before its sleep it may wait for a disk.
        let until = Instant::now() + GOES_ON_WITHIN;
        loop {
            let state = procfs::Status::read(pid).expect("it lives").state();
            match state {
                Some('S') => break,
                Some('R' | 'D' | 't') if Instant::now() < until => std::thread::yield_now(),
                _ => panic!("the program is {state:?}"),
            }
        }
        child.kill().expect("a signal");
        assert_eq!(child.wait().expect("its end").signal(), Some(libc::SIGKILL));
    }
}
