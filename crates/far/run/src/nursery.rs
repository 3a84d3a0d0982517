//! How sidecars come into running processes: injected, given what they need, and started.
//!
//! What needs rights is done here, in the keeper: it opens /dev/userfaultfd, does the handshake of
//! each process's userfaultfd, and hands over what a sidecar may not open itself.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use farpool_board::{BladeOffer, Board};
use farpool_inject::{Injected, Pid, Setup, Standstill};
use farpool_uffd::{OpenError, features};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::dialing::Dialing;
use crate::door::Means;
use crate::families;
use crate::inherits::Inherits;
use crate::proc::start_ticks;
use crate::rooms::{check_limits, lift_limits};
use crate::say::say;
use crate::sidecar_error::SidecarError;
use crate::sidecars::{Begun, Ward, reap, retired, withdraw};
use crate::talk::{ANSWER_TIME, Message, ask, ask_as, next_tag, refused};
use crate::waits::{await_readiness, end_before_return};
use crate::warden::{Retired, Warden};
use crate::{authority, rights};

/// What all sidecars of a run start from.
#[derive(Debug)]
pub struct Nursery {
    means: Means,
    board: File,
    dialing: Dialing,
    /// The programs outlive the keeper.
    programs_stay: bool,
    /// All far memory goes to memory files.
    has_files: bool,
}

impl Nursery {
    pub(crate) fn open(
        board: &Path,
        dialing: Dialing,
        programs_stay: bool,
    ) -> Result<Nursery, SidecarError> {
        let means = Means::open().map_err(SidecarError::Means)?;
        Nursery::with(means, board, dialing, programs_stay)
    }

    pub(crate) fn with(
        means: Means,
        board: &Path,
        dialing: Dialing,
        programs_stay: bool,
    ) -> Result<Nursery, SidecarError> {
        let has_files = Board::open(board, false)
            .is_ok_and(|board| are_files(&board.header().settings().blades));
        let board = File::options().read(true).write(true).open(board);
        let board = board.map_err(|error| SidecarError::Kernel { what: "the board", error })?;
        Ok(Nursery { means, board, dialing, programs_stay, has_files })
    }

    /// Puts a sidecar into a process and has it page. On failure the process goes on as before. A
    /// child that one of the `relatives` serves is handed over. A sidecar and warden that failed
    /// and have not ended yet are added to `failed`.
    pub fn admit(
        &self,
        pid: Pid,
        relatives: &mut [Ward],
        failed: &mut Vec<Retired>,
    ) -> Result<Ward, SidecarError> {
        let program = self.program(pid)?;
        let sidecar = farpool_inject::inject(pid, &self.means.image, &setup())?;
        let (mut said, mut warden) = (Vec::new(), None);
        let begun = self.start((pid, &program), &sidecar, relatives, &mut said, &mut warden);
        ward(pid, program, sidecar, warden, begun, said, failed)
    }

    /// As [`Nursery::admit`], but the process stands still until its memory is registered or
    /// watched, since it could pass the limit meanwhile. It still stands when this returns.
    pub fn admit_still(
        &self,
        pid: Pid,
        still: &mut Standstill,
        relatives: &mut [Ward],
        failed: &mut Vec<Retired>,
    ) -> Result<Ward, SidecarError> {
        let program = self.program(pid)?;
        let sidecar = still.enter(pid, &self.means.image, &setup())?;
        let (mut said, mut warden) = (Vec::new(), None);
        let begun = self.start((pid, &program), &sidecar, relatives, &mut said, &mut warden);
        if begun.is_ok() {
            await_readiness(sidecar.pid, &sidecar.control, &mut said);
        }
        ward(pid, program, sidecar, warden, begun, said, failed)
    }

    /// A handle of a process, after checking that its limits leave room for a sidecar.
    fn program(&self, pid: Pid) -> Result<OwnedFd, SidecarError> {
        let opened = pidfd_open(pid, PidfdFlags::empty());
        let program = opened.map_err(|error| SidecarError::Kernel {
            what: "a handle of the process",
            error: error.into(),
        })?;
        check_limits(pid.as_raw_nonzero().get(), self.has_files)?;
        Ok(program)
    }

    /// Messages that arrive meanwhile are added to `aside`.
    fn start(
        &self,
        (process, program): (Pid, &OwnedFd),
        sidecar: &Injected,
        relatives: &mut [Ward],
        aside: &mut Vec<Message>,
        warden: &mut Option<Warden>,
    ) -> Result<Begun, SidecarError> {
        let pid = process.as_raw_nonzero().get();
        let kernel = |what| {
            move |error: rustix::io::Errno| SidecarError::Kernel { what, error: error.into() }
        };
        for way in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&sidecar.control, way, Some(ANSWER_TIME))
                .map_err(kernel("the control socket"))?;
        }
        lift_limits(sidecar.pid);
        let dialer = self.dialing.serve(sidecar.pid).map_err(|error| SidecarError::Kernel {
            what: "a thread that opens connections to blades",
            error,
        })?;
        ask(pid, sidecar, "DIALER", Some(dialer.as_fd()), "NOTED", aside)?;
        drop(dialer);
        let device = Some(self.means.device.as_fd());
        let (_, made) = ask(pid, sidecar, "MAKE", device, "MADE", aside)?;
        let made = made.ok_or_else(|| refused(pid, "it sent no userfaultfd"))?;
        let mut uffd =
            rights::shake_hands(made, features::PAGER | features::EVENTS).map_err(|error| {
                let is_right = matches!(&error, OpenError::Handshake(error)
                if error.raw_os_error() == Some(libc::EPERM));
                if is_right { SidecarError::NoRight { pid, error } } else { error.into() }
            })?;
        let inherits = match families::inherit(pid, sidecar, relatives)? {
            Some((of_child, inherits)) => {
                uffd = of_child;
                Some(inherits)
            }
            None => None,
        };
        hand_files_over(pid, sidecar)?;
        // The program's filter may allow threads only, and the warden is a process.
        let warded = farpool_inject::unfiltered(sidecar.pid, || {
            ask(pid, sidecar, "WARD", None, "WARDED", aside)
        });
        match warded {
            Ok((_, made)) => *warden = made.and_then(Warden::adopt),
            Err(error) => {
                return Err(given_back(error, (program, sidecar), inherits, relatives, aside));
            }
        }
        let mut start = String::from("START");
        if self.programs_stay {
            start += " STAYING";
        }
        let program_pid = pid.unsigned_abs();
        if let Some(ticks) = start_ticks(program_pid) {
            // It may have another number in its own process-id namespace.
            start += &format!(" PROGRAM={program_pid}:{ticks}");
        }
        if may_change_policies() {
            start += " NICE";
        }
        if farpool_inject::may_execute(process) {
            start += " EXECUTES";
        }
        let board = Some(self.board.as_fd());
        let (tag, until) = (next_tag(), Instant::now() + ANSWER_TIME);
        let asked = ask_as(&tag, until, (pid, sidecar), &start, board, "STARTED", aside);
        let start_tag = match asked {
            Ok(_) => None,
            // It may start paging at any moment, so nothing may be taken from it.
            Err(SidecarError::Silent { error, .. }) if error.kind() == ErrorKind::TimedOut => {
                say!("farpool: the sidecar of process {pid} takes long to start");
                Some(tag)
            }
            Err(error) => {
                return Err(given_back(error, (program, sidecar), inherits, relatives, aside));
            }
        };
        Ok(Begun { uffd, inherits, start_tag })
    }
}

/// A sidecar may not open its own page map and memory if they are root's, because its program has
/// changed its user or is not dumpable. A file that cannot be opened here either stays missing, and
/// the sidecar says so.
fn hand_files_over(pid: i32, sidecar: &Injected) -> Result<(), SidecarError> {
    if !authority::has_hidden_files(sidecar.pid) {
        return Ok(());
    }
    for (name, request) in [("pagemap", "PAGEMAP"), ("mem", "MEMORY")] {
        if let Ok(file) = rights::open_of(sidecar.pid, name) {
            ask(pid, sidecar, request, Some(file.as_fd()), "KEPT", &mut Vec::new())?;
        }
    }
    Ok(())
}

/// A sidecar does not begin to page: what it inherited goes back to the previous sidecar.
fn given_back(
    error: SidecarError,
    (program, sidecar): (&OwnedFd, &Injected),
    inherits: Option<Inherits>,
    relatives: &mut [Ward],
    aside: &mut Vec<Message>,
) -> SidecarError {
    if let Some(inherits) = inherits {
        end_before_return(program, sidecar, aside);
        inherits.give_back(relatives);
    }
    error
}

/// A sidecar does not get its program's environment. In debug builds it is told which of its
/// threads is to panic.
fn setup() -> Setup {
    const PANIC_VARIABLE: &str = "FARPOOL_TEST_PANIC";
    let asked = std::env::var(PANIC_VARIABLE).ok().filter(|_| cfg!(debug_assertions));
    let environment = asked.map(|thread| format!("{PANIC_VARIABLE}={thread}"));
    Setup { environment: environment.into_iter().collect(), ..Setup::default() }
}

/// True if all blades are used through memory files. A rack's are not known yet. Pure.
fn are_files(blades: &[BladeOffer]) -> bool {
    !blades.is_empty() && blades.iter().all(|blade| blade.address.starts_with("shm:"))
}

/// The ward of a sidecar that has started, or the cleanup of one that failed to.
fn ward(
    pid: Pid,
    program: OwnedFd,
    sidecar: Injected,
    warden: Option<Warden>,
    begun: Result<Begun, SidecarError>,
    said: Vec<Message>,
    failed: &mut Vec<Retired>,
) -> Result<Ward, SidecarError> {
    match begun {
        Ok(begun) => Ok(Ward::new(pid, program, sidecar, warden, begun, said)),
        Err(error) => {
            // Nothing was moved out, or the warden sees to it. What cannot be unmapped stays as
            // addresses in use.
            if withdraw(&sidecar).is_err() {
                let _ = pidfd_send_signal(&sidecar.pidfd, Signal::KILL);
            }
            reap(pid, &sidecar);
            failed.extend(retired(&sidecar, warden));
            Err(error)
        }
    }
}

/// True if this process may take a thread of another process out of SCHED_IDLE and give it
/// real-time priority.
fn may_change_policies() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE))
}
