//! Sidecars in running processes: put in, told what to do, listened to.
//!
//! The keeper does what needs rights: it opens /dev/userfaultfd, shakes hands on each process's userfaultfd, and keeps a
//! duplicate, so that a process whose sidecar dies waits for its pages, instead of reading zeros, until it is ended.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farpool_board::{BladeOffer, Board};
use farpool_inject::{InjectError, Injected, Pid, Setup, Standstill};
use farpool_uffd::{OpenError, Uffd, features};
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::authority;
use crate::dialing;
use crate::door::{DoorLack, Means};
use crate::families::{self, Inherits};
use crate::keeper::start_ticks;
use crate::rights;
use crate::rooms::{ADDRESS_ROOM_MIB, check_limits, lift_limits};
use crate::say::say;
use crate::talk::{
    ANSWER_TIME, MOST_TOLD, Message, READY, TAG, WARDEN, ask, ask_as, ask_until, flood, is_wish,
    next_tag, receive, refused, send,
};
use crate::waits::{await_end, await_readiness, end_before_return, is_over};
use crate::warden::{Retired, Warden};

/// A sidecar that has left is asked for its own ranges until two answers agree, or so often.
const MOST_ANSWERS: usize = 10;
/// A sidecar whose program has ended says something within this time: it gives the program's children their pages, and
/// tells of that, or ends. A blade that answers late takes some seconds at most.
pub const HANG_TIME: Duration = Duration::from_secs(30);
/// So many messages of a sidecar at the most are taken in one look at it. Its socket holds some 280
/// at a time, and they are read far faster than a pager has something to tell: whoever has more to
/// say does nothing else. Such a sidecar is ended, like one that says nothing any more.
const MOST_HEARD: usize = 4096;
/// The number of a child that no sidecar has told of: none that is told of has it.
pub const UNTOLD: u64 = 0;

/// Why a process has no sidecar.
#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error("{0}; {remedy}", remedy = .0.remedy())]
    Means(DoorLack),
    #[error(transparent)]
    Userfaultfd(#[from] OpenError),
    #[error(
        "the kernel tells of the forks of process {pid} only with CAP_SYS_PTRACE: {error}; run as \
         root, or setcap cap_sys_ptrace=p on the farpool binary"
    )]
    NoRight { pid: i32, error: OpenError },
    #[error("the sidecar of process {pid}: {reason}")]
    Refused { pid: i32, reason: String },
    #[error(
        "process {pid} is served by its parent's sidecar, which does not hand it over yet: {reason}"
    )]
    NotYet { pid: i32, reason: String },
    #[error("the sidecar of process {pid} does not answer: {error}")]
    Silent { pid: i32, error: Error },
    #[error(
        "process {pid} may map {room} MiB more (RLIMIT_AS), and its sidecar could take {ADDRESS_ROOM_MIB} MiB of that; \
         raise its limit (ulimit -v)"
    )]
    NoAddresses { pid: i32, room: u64 },
    #[error(
        "process {pid} may have {room} MiB more of private memory (RLIMIT_DATA), and its sidecar \
         could take \
         {ADDRESS_ROOM_MIB} MiB of that; raise its limit (ulimit -d)"
    )]
    NoData { pid: i32, room: u64 },
    #[error(
        "process {pid} may use {seconds} s of processor time (RLIMIT_CPU), its sidecar as much, \
         and with the sidecar it \
         would end early; lift its limit (ulimit -t unlimited), or give farpool CAP_SYS_RESOURCE"
    )]
    LittleTime { pid: i32, seconds: u64 },
    #[error(
        "process {pid} may write to files of {bytes} bytes (RLIMIT_FSIZE), and its sidecar, \
         which writes to the blade's \
         memory file, too; lift its limit (ulimit -f unlimited), give farpool CAP_SYS_RESOURCE, \
         or use a blade on a \
         socket (--blade unix://...)"
    )]
    SmallFiles { pid: i32, bytes: u64 },
    #[error("process {pid} has a pager of another farpool already, whose limit it is held to")]
    AlreadyPaged { pid: u32 },
    #[error("{what}: {error}")]
    Kernel { what: &'static str, error: Error },
}

impl SidecarError {
    /// Whether the reason may pass at any moment, and a try costs the process hardly anything.
    pub(crate) fn may_pass(&self) -> bool {
        use InjectError::{AlreadyTraced, Busy, Died, NoProcess, Slow};
        matches!(
            self,
            SidecarError::NotYet { .. }
                | SidecarError::Inject(
                    AlreadyTraced { .. }
                        | Busy { .. }
                        | Died { .. }
                        | NoProcess { .. }
                        | Slow { .. }
                )
        )
    }

    /// Whether another try would end the same way.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            SidecarError::Inject(error) => !matches!(
                error,
                InjectError::Busy { .. }
                    | InjectError::Slow { .. }
                    | InjectError::Died { .. }
                    | InjectError::NoProcess { .. }
            ),
            SidecarError::Silent { .. }
            | SidecarError::Refused { .. }
            | SidecarError::NotYet { .. } => false,
            _ => true,
        }
    }
}

/// What a sidecar has told of its own accord, or what was seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The program has ended, or runs another image.
    Gone,
    /// Everything is in the program again.
    Left,
    /// So many pages could not be brought in.
    Stuck(String),
    /// It cannot page, and has moved nothing out.
    Failed(String),
    /// The sidecar has ended while its program has not, or says something else: its last words.
    Died(String),
}

/// What all sidecars of a run start from.
#[derive(Debug)]
pub struct Nursery {
    means: Means,
    board: File,
    /// Where the board is.
    folder: PathBuf,
    /// The programs outlive the keeper.
    programs_stay: bool,
    /// All far memory goes to memory files.
    has_files: bool,
}

/// A sidecar that pages.
#[derive(Debug)]
struct Begun {
    uffd: Uffd,
    inherits: Option<Inherits>,
    /// Of START, if it was not answered yet.
    start_tag: Option<String>,
}

/// One process with a sidecar.
#[derive(Debug)]
pub struct Ward {
    pub pid: Pid,
    program: OwnedFd,
    sidecar: Injected,
    /// What outlives the sidecar if that is killed.
    pub(crate) warden: Option<Warden>,
    /// The last reference, if the sidecar and its warden die.
    uffd: Option<Uffd>,
    /// Those of children that do not have all their pages yet, by their numbers.
    pub(crate) children: Vec<(u64, Uffd)>,
    /// The program was a child that another sidecar served, and this one does not yet.
    pub(crate) inherits: Option<Inherits>,
    pub(crate) serves_inherited: bool,
    /// The same, for as long as this sidecar serves.
    pub(crate) inherited: Option<Inherits>,
    /// What it told while an answer was waited for.
    backlog: VecDeque<Message>,
    said: Option<News>,
    /// What the answer to START begins with, if that has still to come.
    start_tag: Option<String>,
    /// Since when the program has ended and nothing was heard.
    silent_since: Option<Instant>,
    /// It leaves so that the process gets another one.
    is_renewed: bool,
}

impl Nursery {
    pub fn open(board: &Path, programs_stay: bool) -> Result<Nursery, SidecarError> {
        Nursery::with(Means::open().map_err(SidecarError::Means)?, board, programs_stay)
    }

    pub(crate) fn with(
        means: Means,
        board: &Path,
        programs_stay: bool,
    ) -> Result<Nursery, SidecarError> {
        let has_files = Board::open(board, false)
            .is_ok_and(|board| are_files(&board.header().settings().blades));
        let folder = board.parent().unwrap_or(board).to_owned();
        let board = File::options().read(true).write(true).open(board);
        let board = board.map_err(|error| SidecarError::Kernel { what: "the board", error })?;
        Ok(Nursery { means, board, folder, programs_stay, has_files })
    }

    /// Puts a sidecar into a process and has it page. If that fails the process goes on as before.
    /// If it is a child that one of the `relatives` serves, it is handed over. Who was to serve it,
    /// and has not ended yet, comes to `failed`.
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

    /// As [`Nursery::admit`], and the process stands still until its memory is registered, or
    /// watched, for it could pass the limit meanwhile; it does so still when this returns.
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

    /// A handle of a process that may have a sidecar.
    fn program(&self, pid: Pid) -> Result<OwnedFd, SidecarError> {
        let opened = pidfd_open(pid, PidfdFlags::empty());
        let program = opened.map_err(|error| SidecarError::Kernel {
            what: "a handle of the process",
            error: error.into(),
        })?;
        check_limits(pid.as_raw_nonzero().get(), self.has_files)?;
        Ok(program)
    }

    /// What is told meanwhile comes to `aside`.
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
        let dialer = dialing::serve(sidecar.pid, &self.folder).map_err(|error| {
            SidecarError::Kernel { what: "a thread that opens connections to blades", error }
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
        match ask(pid, sidecar, "WARD", None, "WARDED", aside) {
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
            // In its own process-id namespace it may have another number.
            start += &format!(" PROGRAM={program_pid}:{ticks}");
        }
        if may_change_policies() {
            start += " NICE";
        }
        let board = Some(self.board.as_fd());
        let (tag, until) = (next_tag(), Instant::now() + ANSWER_TIME);
        let asked = ask_as(&tag, until, (pid, sidecar), &start, board, "STARTED", aside);
        let start_tag = match asked {
            Ok(_) => None,
            // It may page any moment: then nothing of it may be taken away.
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

/// A sidecar may not open its own page map and memory when they are root's, for its program has
/// changed its user or has forbidden looking into it. What cannot be opened here either the
/// sidecar misses, and says so.
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

/// A sidecar does not begin to page: what it inherits goes back to who served it.
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

/// A sidecar has no environment of its program's. In debug builds it is told which of its threads
/// is to panic.
fn setup() -> Setup {
    const PANIC_VARIABLE: &str = "FARPOOL_TEST_PANIC";
    let asked = std::env::var(PANIC_VARIABLE).ok().filter(|_| cfg!(debug_assertions));
    let environment = asked.map(|thread| format!("{PANIC_VARIABLE}={thread}"));
    Setup { environment: environment.into_iter().collect(), ..Setup::default() }
}

/// Whether blades are all used through memory files. A rack's are not known yet. Pure.
fn are_files(blades: &[BladeOffer]) -> bool {
    !blades.is_empty() && blades.iter().all(|blade| blade.address.starts_with("shm:"))
}

/// What has become of a sidecar's start.
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
        Ok(Begun { uffd, inherits, start_tag }) => Ok(Ward {
            pid,
            program,
            sidecar,
            warden,
            uffd: Some(uffd),
            children: Vec::new(),
            inherits,
            serves_inherited: false,
            inherited: inherits,
            backlog: said.into(),
            said: None,
            start_tag,
            silent_since: None,
            is_renewed: false,
        }),
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

impl Ward {
    /// The process goes on: it was stopped for so long.
    pub fn goes_on(&mut self, stopped: Duration) {
        self.sidecar.stopped = self.sidecar.stopped.max(stopped);
    }

    /// The longest that the process's threads were stopped, and how many these were when its
    /// sidecar was put in.
    pub fn stopped(&self) -> (Duration, usize) {
        (self.sidecar.stopped, self.sidecar.threads)
    }

    /// The sidecar's process id.
    pub fn sidecar(&self) -> Pid {
        self.sidecar.pid
    }

    /// Who serves the program, or would if need be: no processes of the tree.
    pub fn servants(&self) -> impl Iterator<Item = u32> {
        let sidecar = self.sidecar.pid.as_raw_nonzero().get().unsigned_abs();
        std::iter::once(sidecar).chain(self.warden.as_ref().map(|warden| warden.pid))
    }

    /// The same, to be known until they have ended.
    pub fn retire(&mut self) -> Vec<Retired> {
        retired(&self.sidecar, self.warden.take())
    }

    /// What the sidecar has said since, or what became of it.
    pub fn news(&mut self) -> Option<News> {
        if self.said.is_none() {
            self.said = self.listen();
        }
        if self.said.is_none() {
            self.mind_silence();
        }
        self.said.clone()
    }

    /// Ends a sidecar that does not end with its program. What that means is heard later.
    fn mind_silence(&mut self) {
        if !is_over(&self.program) {
            return;
        }
        if self.silent_since.get_or_insert_with(Instant::now).elapsed() > HANG_TIME {
            self.silent_since = None;
            say!(
                "farpool: the sidecar of process {}, which has ended, says nothing for {} s; it is ended",
                self.pid.as_raw_nonzero(),
                HANG_TIME.as_secs()
            );
            self.abandon();
        }
    }

    fn listen(&mut self) -> Option<News> {
        for _ in 0..MOST_HEARD {
            let next = self.backlog.pop_front();
            let received = match next {
                Some(message) => Ok(message),
                None => receive(&self.sidecar.control, RecvFlags::DONTWAIT),
            };
            match received {
                Ok((text, _)) if text.is_empty() => return Some(self.end()),
                Ok((text, descriptor)) => {
                    self.silent_since = None;
                    if text.starts_with(TAG) {
                        match self.hears_answer(&text) {
                            Some(news) => return Some(news),
                            None => continue,
                        }
                    }
                    if is_wish(&text, self.sidecar.pid) || self.hears_of_child(&text, descriptor) {
                        continue;
                    }
                    if let Some(news) = understand(&text) {
                        return Some(news);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(_) => return Some(self.end()),
            }
        }
        self.abandon();
        Some(News::Died(format!("{MOST_HEARD} messages and more at once")))
    }

    /// An answer to a request that was given up. Only that to START still matters: if it is a
    /// refusal nothing was moved out.
    fn hears_answer(&mut self, text: &str) -> Option<News> {
        let answer = text.strip_prefix(self.start_tag.as_deref()?)?;
        let reason = answer.strip_prefix("ERROR ").map(str::to_owned);
        self.start_tag = None;
        reason.map(News::Failed)
    }

    /// Sends a request and takes the answer; what it tells of its own accord meanwhile is heard later.
    pub(crate) fn ask(&mut self, request: &str, expected: &str) -> Result<Message, SidecarError> {
        let pid = self.pid.as_raw_nonzero().get();
        if self.backlog.len() >= MOST_TOLD {
            return Err(SidecarError::Silent { pid, error: flood() });
        }
        let mut told = Vec::new();
        let answer = ask(pid, &self.sidecar, request, None, expected, &mut told);
        self.backlog.extend(told);
        answer
    }

    /// Hears of all children that it has told of until now.
    pub(crate) fn gather_children(&mut self) {
        while self.backlog.len() < MOST_TOLD
            && let Ok(message) = receive(&self.sidecar.control, RecvFlags::DONTWAIT)
        {
            let is_end = message.0.is_empty();
            self.backlog.push_back(message);
            if is_end {
                break;
            }
        }
        for (text, descriptor) in std::mem::take(&mut self.backlog) {
            let words = ["CHILD ", "SETTLED ", WARDEN];
            let is_child = words.iter().any(|word| text.starts_with(word));
            if !is_child || !self.hears_of_child(&text, descriptor) {
                self.backlog.push_back((text, None));
            }
        }
    }

    /// What the end of the sidecar means. Its program may end at the same moment.
    fn end(&self) -> News {
        // With the first process of a process-id namespace the kernel ends all that are in it, the
        // sidecar before that is seen to have ended.
        if !is_over(&self.program) {
            await_end(&self.program);
        }
        if is_over(&self.program) && self.children.is_empty() {
            News::Gone
        } else {
            News::Died("nothing".into())
        }
    }

    /// Children that will not get all their pages: where they wait for one they get SIGBUS, as long as this is called
    /// now and then.
    pub fn orphans(&mut self) -> impl Iterator<Item = (u64, Uffd)> + use<> {
        let own = self.last_reference().map(|uffd| (UNTOLD, uffd));
        std::mem::take(&mut self.children).into_iter().chain(own)
    }

    /// Of a program that has ended, with its sidecar: a child of vfork may still be in its memory. None: whoever
    /// served it before does so again.
    pub fn last_reference(&mut self) -> Option<Uffd> {
        let is_returned = self.inherits.is_some() && !self.serves_inherited;
        self.uffd.take().filter(|_| !is_returned)
    }

    /// Has everything brought in; [`News::Left`] comes.
    pub fn leave(&self) -> Result<(), SidecarError> {
        self.tell("LEAVE")
    }

    /// Has it leave if it may do more than its program, which has given up rights since.
    pub fn renew_if_excessive(&mut self) {
        if self.is_renewed || is_over(&self.program) {
            return;
        }
        let Some(excess) = authority::excess(self.pid, self.sidecar.pid) else { return };
        self.is_renewed = true;
        say!(
            "farpool: process {0} has given up {excess}, which its sidecar still has; all memory is \
             brought in, and process {0} gets another sidecar",
            self.pid.as_raw_nonzero()
        );
        // One that cannot be told has ended, which is heard of.
        let _ = self.leave();
    }

    /// Whether it leaves so that the process gets another one.
    pub fn is_renewed(&self) -> bool {
        self.is_renewed
    }

    /// Sends a request whose answer says nothing.
    pub(crate) fn tell(&self, request: &str) -> Result<(), SidecarError> {
        send(&self.sidecar.control, request, None)
            .map_err(|error| SidecarError::Silent { pid: self.pid.as_raw_nonzero().get(), error })
    }

    /// Unmaps all that is the sidecar's, and ends it. It must have left.
    pub fn withdraw(&self) -> Result<(), SidecarError> {
        withdraw(&self.sidecar)?;
        reap(self.pid, &self.sidecar);
        Ok(())
    }

    /// Kills the sidecar. If it has moved nothing out the program goes on, with some more addresses in use.
    pub fn abandon(&self) {
        let _ = pidfd_send_signal(&self.sidecar.pidfd, Signal::KILL);
    }

    /// Ends the program: its sidecar is gone, and nobody brings the pages that it waits for.
    pub fn end_program(&self) {
        let _ = pidfd_send_signal(&self.program, Signal::KILL);
    }
}

/// Waits until one of the sidecars has something to say or the process of a handle ends, at most for `most`.
pub fn wait(wards: &[Ward], ending: Option<&OwnedFd>, most: Duration) {
    use rustix::event::{PollFd, PollFlags, poll};
    let Ok(most) = most.try_into() else { return };
    let controls = wards.iter().map(|ward| &ward.sidecar.control);
    let fds = controls.chain(ending).map(|fd| PollFd::new(fd, PollFlags::IN));
    // An error is a wake-up like any other: the caller looks again.
    let _ = poll(&mut fds.collect::<Vec<PollFd<'_>>>(), Some(&most));
}

/// Those that have not ended of a sidecar that serves no more, and its warden.
fn retired(sidecar: &Injected, warden: Option<Warden>) -> Vec<Retired> {
    let pid = sidecar.pid.as_raw_nonzero().get().unsigned_abs();
    let until = Some(Instant::now() + HANG_TIME);
    let sidecar = sidecar.pidfd.try_clone().ok();
    let sidecar = sidecar.map(|process| Retired { pid, process, until });
    // Were it ended, who waits for a page would read zeros.
    let warden = warden.map(|Warden { pid, process }| Retired { pid, process, until: None });
    let servants = sidecar.into_iter().chain(warden);
    servants.filter(|servant| !is_over(&servant.process)).collect()
}

fn understand(text: &str) -> Option<News> {
    Some(match text.split_once(' ').unwrap_or((text, "")) {
        // The answer to LEAVE: it has begun.
        (READY | "LEAVING" | "NOTED" | "FINISHING", _) => return None,
        ("GONE", _) => News::Gone,
        ("LEFT", _) => News::Left,
        ("STUCK", pages) => News::Stuck(pages.into()),
        ("FAILED", reason) => News::Failed(reason.into()),
        // Its last words (PANIC ...), or what this version does not know.
        _ => News::Died(text.into()),
    })
}

fn withdraw(sidecar: &Injected) -> Result<(), SidecarError> {
    let pid = sidecar.pid.as_raw_nonzero().get();
    let mut told = String::new();
    // Others may stand still: all of it has the time of one request.
    let until = Instant::now() + ANSWER_TIME;
    let ask = |request: &str, expected: &str| {
        ask_until(until, (pid, sidecar), request, None, expected, &mut Vec::new())
    };
    // To answer it may take memory, which the next answer has.
    for _ in 0..MOST_ANSWERS {
        let (text, _) = ask("RANGES", "")?;
        let agrees = text == told;
        told = text;
        if agrees {
            break;
        }
    }
    ask("DISMISS", "DISMISSED")?;
    let mut ranges: Vec<Range<u64>> = told.split_whitespace().filter_map(range).collect();
    ranges.push(sidecar.span.clone());
    Ok(farpool_inject::withdraw(sidecar.pid, &ranges)?)
}

/// Waits until a sidecar that is ended is no process any more. If it was the program's child and
/// that cannot be made to take note of its end, a zombie stays, which nobody sees who does not ask
/// for such children.
fn reap(program: Pid, sidecar: &Injected) {
    await_end(&sidecar.pidfd);
    let _ = farpool_inject::reap(program, sidecar.child);
}

fn range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

/// Whether this process may take a thread of another out of SCHED_IDLE and give it real-time priority.
fn may_change_policies() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_NICE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_sidecar_says_is_understood() {
        assert_eq!(understand("READY"), None);
        assert_eq!(understand("LEAVING"), None);
        assert_eq!(understand("GONE"), Some(News::Gone));
        assert_eq!(understand("LEFT"), Some(News::Left));
        assert_eq!(understand("STUCK 3"), Some(News::Stuck("3".into())));
        assert_eq!(understand("FAILED no blade"), Some(News::Failed("no blade".into())));
        assert_eq!(understand("PANIC at"), Some(News::Died("PANIC at".into())));
    }

    /// A ward whose sidecar and program are a process that does nothing, and the sidecar's end of
    /// its socket.
    fn idle_ward() -> (std::process::Child, Ward, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let process = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let pid = Pid::from_raw(i32::try_from(process.id()).expect("a number")).expect("a number");
        let handle = || pidfd_open(pid, PidfdFlags::empty()).expect("a handle");
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (control, there) = pair.expect("sockets");
        let stopped = Duration::ZERO;
        let ward = Ward {
            pid,
            program: handle(),
            sidecar: Injected {
                pid,
                pidfd: handle(),
                control,
                span: 0..0,
                stopped,
                threads: 1,
                child: None,
            },
            warden: None,
            uffd: None,
            children: Vec::new(),
            inherits: None,
            serves_inherited: false,
            inherited: None,
            backlog: VecDeque::new(),
            said: None,
            start_tag: None,
            silent_since: None,
            is_renewed: false,
        };
        (process, ward, there)
    }

    #[test]
    fn the_late_answer_to_a_start_is_heard() {
        let (mut process, mut ward, there) = idle_ward();
        ward.start_tag = Some("@7 ".into());
        for text in ["@6 ERROR too late", "@7 STARTED", "@7 ERROR not asked"] {
            send(&there, text, None).expect("a message");
        }
        assert!(ward.news().is_none());
        ward.start_tag = Some("@8 ".into());
        send(&there, "@8 ERROR no memory", None).expect("a message");
        assert!(matches!(ward.news(), Some(News::Failed(reason)) if reason == "no memory"));
        process.kill().expect("a signal");
        process.wait().expect("its end");
    }

    #[test]
    fn a_sidecar_that_does_nothing_but_tell_is_ended() {
        let (mut process, mut ward, there) = idle_ward();
        std::thread::spawn(move || while send(&there, "NOTED", None).is_ok() {});
        for _ in 0..3 {
            ward.gather_children();
        }
        assert!(ward.backlog.len() <= MOST_TOLD);
        let error = ward.ask("CEDE 1", "CEDED").expect_err("it does not answer");
        assert!(matches!(error, SidecarError::Silent { .. }), "{error}");
        assert!(ward.backlog.len() <= 2 * MOST_TOLD);
        // Whether so many come through the socket depends on who is faster.
        ward.backlog = (0..MOST_HEARD).map(|_| ("NOTED".into(), None)).collect();
        assert!(matches!(ward.news(), Some(News::Died(_))));
        let status = process.wait().expect("its end");
        assert!(!status.success());
    }

    #[test]
    fn ranges_are_hexadecimal() {
        assert_eq!(range("1000-2f00"), Some(0x1000..0x2f00));
        assert_eq!(range("1000"), None);
    }
}
