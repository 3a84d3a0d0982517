//! Puts a *sidecar* into a running program: a task that shares its address space and nothing else.
//!
//! No descriptor, signal handler, working directory or process id is shared with the program, and
//! it sees no child it did not make. How: `stop` all threads for some hundred microseconds,
//! `birth` in one of them, resume all, then `furnish` the newborn while the program runs.
//!
//! Invariants:
//! - the program's text and memory are not written (except for a restartable-sequence field, and a
//!   word of a stack, that are restored), its registers and signal mask are restored, an
//!   interrupted system call goes on;
//! - when an injection fails, the program goes on and nothing of the sidecar is left;
//! - the sidecar dies with the injecting thread until it is complete; the program dies with it only
//!   while a thread of it makes calls in our name: it would take their results for those of its
//!   own. Only a SIGKILL of the injecting process can hit such a moment.
//!
//! While [`inject`] runs, no other thread of this process may wait for the program's process id
//! with waitpid or waitid: it would take our stops. Poll a pidfd instead.
//!
//! A program under a seccomp filter: filters are suspended while the sidecar is made (this needs
//! CAP_SYS_ADMIN, and no filter of our own), but the sidecar itself then lives under the program's
//! filter, which is lifted once more while it makes its warden ([`unfiltered`]). Where both are
//! under the same filters (in a container) the calls are made under these.

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod arch;
mod birth;
mod elf;
mod error;
mod filters;
mod furnish;
mod halt;
mod image;
mod limits;
mod procfs;
mod remote;
mod stack;
mod standing;
mod standstill;
mod stop;
mod suspension;
mod sys;
mod task;
mod trial;
mod withdraw;

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

pub use rustix::process::Pid;
use rustix::process::{PidfdFlags, pidfd_open};

pub use crate::elf::ElfError;
pub use crate::error::InjectError;
pub use crate::filters::may_execute;
pub use crate::furnish::{CONTROL_FD, HOST_FD, HOST_VARIABLE, SPAN_VARIABLE};
pub use crate::halt::{Halted, halt};
pub use crate::image::Image;
pub use crate::limits::{MAX_STOP_MS, MAX_THREADS};
pub use crate::standstill::{Standstill, standstill};
pub use crate::suspension::unfiltered;
pub use crate::trial::{TrialError, try_tracing};
pub use crate::withdraw::withdraw;

use crate::birth::Born;
use crate::error::StepError;
use crate::furnish::Host;
use crate::procfs::{Gate, Memory, Status};
use crate::stop::Stopped;
use crate::task::Tid;

/// What the sidecar is started with. [`HOST_VARIABLE`] and [`SPAN_VARIABLE`] are added to the
/// environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// argv; the first is the program's name.
    pub arguments: Vec<String>,
    /// NAME=VALUE.
    pub environment: Vec<String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { arguments: vec!["farpool-sidecar".into()], environment: Vec::new() }
    }
}

/// A running sidecar.
#[derive(Debug)]
pub struct Injected {
    pub pid: Pid,
    pub pidfd: OwnedFd,
    /// A SOCK_SEQPACKET socket; the other end is the sidecar's [`CONTROL_FD`].
    pub control: OwnedFd,
    /// Addresses of its image and first stack.
    pub span: Range<u64>,
    /// How long the program's threads were stopped: from the first interrupt until all ran again.
    pub stopped: Duration,
    /// The number of those threads.
    pub threads: usize,
    /// Its process id in the program's own namespace, if it is the program's child: see [`reap`].
    pub child: Option<i32>,
}

/// Puts a sidecar into the process `target`, which stands still as briefly as possible;
/// [`Standstill::enter`] keeps it stopped for longer.
///
/// Everything is done in a thread of its own: when a thread ends the kernel releases all that it
/// traces, even what could not be released in an orderly way.
pub fn inject(target: Pid, image: &Image, setup: &Setup) -> Result<Injected, InjectError> {
    let pid = Tid(target.as_raw_nonzero().get());
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("farpool-inject".into());
        let thread = builder.spawn_scoped(scope, || {
            let known = examine(pid)?;
            enter(pid, &known, &mut stop::stop(pid)?, image, setup, false)
        });
        let thread = thread.map_err(|source| InjectError::Kernel {
            pid: pid.0,
            what: "a thread",
            source,
        })?;
        thread.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("it panicked");
            Err(InjectError::Kernel { pid: pid.0, what: "the injecting thread", source })
        })
    })
}

/// What was learned about the process before it was stopped.
#[derive(Debug)]
struct Known {
    pidfd: OwnedFd,
    own_pid: i32,
    is_filtered: bool,
    gate: Option<Gate>,
}

/// Puts a sidecar into a stopped process, which stays stopped if `holds` and nothing failed.
fn enter(
    pid: Tid,
    known: &Known,
    stopped: &mut Stopped,
    image: &Image,
    setup: &Setup,
    holds: bool,
) -> Result<Injected, InjectError> {
    let threads = stopped.threads().len();
    let born = bear(pid, stopped, known, holds);
    if !holds || born.is_err() {
        stopped.release();
    }
    let time = stopped.since.elapsed();
    let Born { sidecar, child } = born?;
    let tid = sidecar.tid;
    // It has the same address space, and is read when nothing is stopped any more.
    let auxiliary = procfs::auxiliary(tid);
    let host = Host { pidfd: known.pidfd.as_fd(), own_pid: known.own_pid, auxiliary: &auxiliary };
    let furnished = furnish::furnish(sidecar, image, setup, &host);
    if furnished.is_err() && child.is_some() {
        stopped.release();
        // A remaining zombie is visible only to a program that waits for such children.
        let _ = reap_here(pid, child);
    }
    let furnished = furnished.map_err(|error| error.of(pid.0, tid.0))?;
    let Some(sidecar) = Pid::from_raw(tid.0) else { return Err(StepError::Fault.of(pid.0, tid.0)) };
    Ok(Injected {
        pid: sidecar,
        pidfd: furnished.pidfd,
        control: furnished.control,
        span: furnished.span,
        stopped: time,
        threads,
        child,
    })
}

/// Refuses what can be refused before anything is stopped.
fn examine(pid: Tid) -> Result<Known, InjectError> {
    let gone = InjectError::NoProcess { pid: pid.0 };
    let living = procfs::living(pid);
    let Ok(status) = Status::read(living) else { return Err(gone) };
    let number = |name| status.number(name).unwrap_or(0);
    if number("Tgid") != pid.0 {
        return Err(gone);
    }
    if number("TracerPid") != 0 {
        return Err(InjectError::AlreadyTraced { pid: pid.0, tracer: number("TracerPid") });
    }
    if procfs::program_start(living).is_some_and(|start| !elf::is_native(&start)) {
        return Err(InjectError::OtherArchitecture { pid: pid.0 });
    }
    if number("Seccomp") == 1 {
        return Err(InjectError::SeccompStrict { pid: pid.0 });
    }
    let raw = Pid::from_raw(pid.0);
    let opened = raw.and_then(|raw| pidfd_open(raw, PidfdFlags::empty()).ok());
    let Some(pidfd) = opened else { return Err(gone) };
    let own_pid = status.own_pid().unwrap_or(pid.0);
    // Searched now to shorten the stop; checked again when the program stands still.
    let gate = Memory::open(living).ok().and_then(|memory| find_gate(living, &memory));
    Ok(Known { pidfd, own_pid, is_filtered: filters::is_filtered(&status), gate })
}

fn find_gate(tid: Tid, memory: &Memory) -> Option<Gate> {
    procfs::find_gate(memory, &procfs::mappings(tid).ok()?)
}

/// A thread to make calls, with what that takes.
fn prepare(
    pid: Tid,
    stopped: &Stopped,
    known: &Known,
) -> Result<(Tid, Memory, Gate, usize), InjectError> {
    let tid = suitable(pid, stopped.threads())?;
    let memory = Memory::open(tid).map_err(|source| InjectError::Kernel {
        pid: pid.0,
        what: "opening its memory",
        source,
    })?;
    let found = known.gate.filter(|gate| procfs::is_gate(&memory, *gate));
    let gate = found.or_else(|| find_gate(tid, &memory));
    let gate = gate.ok_or(InjectError::NoGate { pid: pid.0 })?;
    let options = options(pid, tid, known.is_filtered)?;
    Ok((tid, memory, gate, options))
}

/// Has a program reap a sidecar that was its child, if it was ([`Injected`]). The program stands
/// still for that.
pub fn reap(program: Pid, child: Option<i32>) -> Result<(), InjectError> {
    let pid = Tid(program.as_raw_nonzero().get());
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("farpool-inject".into());
        let kernel = |source| InjectError::Kernel { pid: pid.0, what: "a thread", source };
        let thread = builder.spawn_scoped(scope, || reap_here(pid, child)).map_err(kernel)?;
        thread.join().unwrap_or_else(|_| Err(kernel(std::io::Error::other("it panicked"))))
    })
}

/// The same in a thread that traces nothing of the program.
fn reap_here(pid: Tid, child: Option<i32>) -> Result<(), InjectError> {
    let Some(child) = child else { return Ok(()) };
    let known = examine(pid)?;
    let mut stopped = stop::stop(pid)?;
    let reaped = prepare(pid, &stopped, &known).and_then(|(tid, memory, gate, options)| {
        let reaped = birth::reap(pid, tid, gate, &memory, options, child);
        reaped.map_err(|error| error.of(pid.0, tid.0))
    });
    stopped.release();
    reaped
}

fn bear(pid: Tid, stopped: &mut Stopped, known: &Known, holds: bool) -> Result<Born, InjectError> {
    let (tid, memory, gate, options) = prepare(pid, stopped, known)?;
    let release = || {
        if !holds {
            stopped.release_but(tid);
        }
    };
    let born = birth::bear((pid, known.own_pid), tid, gate, &memory, options, release);
    born.map_err(|error| error.of(pid.0, tid.0))
}

/// A thread in whose name calls can be made.
fn suitable(pid: Tid, threads: &[Tid]) -> Result<Tid, InjectError> {
    let sealed = |reason| InjectError::Sealed { pid: pid.0, reason };
    let mut reason = "none of its threads can make a call";
    for tid in threads {
        match sys::registers(*tid) {
            Ok(Some(_)) => {}
            Ok(None) => return Err(InjectError::OtherArchitecture { pid: pid.0 }),
            Err(_) => continue,
        }
        if sys::dispatches_calls(*tid) {
            reason = "it catches its own system calls (syscall user dispatch)";
        } else if procfs::births_elsewhere(*tid) {
            reason = "its children are born in another process-id namespace";
        } else {
            return Ok(*tid);
        }
    }
    Err(sealed(reason))
}

/// The tracing options; with a filter, one that suspends it if we may. A process under a filter may
/// not, but if the program has the same filters it may do what we may.
fn options(pid: Tid, tid: Tid, is_filtered: bool) -> Result<usize, InjectError> {
    if !is_filtered {
        return Ok(sys::OPTION_SYSGOOD);
    }
    let options = sys::OPTION_SYSGOOD | sys::OPTION_SUSPEND_SECCOMP;
    let reason = "it has a seccomp filter, and suspending that needs CAP_SYS_ADMIN";
    match sys::set_options(tid, options) {
        Ok(()) => Ok(options),
        Err(_) if filters::are_own(tid) => Ok(sys::OPTION_SYSGOOD),
        Err(_) => Err(InjectError::Sealed { pid: pid.0, reason }),
    }
}
