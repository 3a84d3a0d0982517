//! Sidecars in running processes: requests to them, and what they report. How they get there:
//! [`crate::nursery`].
//!
//! The keeper does what needs rights: it opens /dev/userfaultfd, does the handshake of each
//! process's userfaultfd, and keeps a duplicate, so that a process whose sidecar dies waits for its
//! pages, instead of reading zeros, until it is ended.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use farpool_inject::{Injected, Pid};
use farpool_uffd::Uffd;
use rustix::net::RecvFlags;
use rustix::process::{Signal, pidfd_send_signal};

use crate::authority;
use crate::ending::Ending;
use crate::inherits::Inherits;
use crate::say::say;
use crate::sidecar_error::SidecarError;
use crate::talk::{
    ANSWER_TIME, MOST_TOLD, Message, READY, STANDSTILL, TAG, WARDEN, ask, ask_until, flood,
    is_wish, receive, send,
};
use crate::waits::{await_end, is_over};
use crate::warden::{Retired, Warden};

/// How often a sidecar that has left is asked for its own ranges unless two answers agree earlier.
const MOST_ANSWERS: usize = 10;
/// A sidecar whose program has ended says something within this time: it gives the program's
/// children their pages, and reports that, or ends. A blade that answers late takes some seconds at
/// most.
pub const HANG_TIME: Duration = Duration::from_secs(30);
/// Most messages of a sidecar that are taken in one check. Its socket holds some 280 at a time, and
/// they are read far faster than a pager produces them: a sidecar with more does nothing else. It
/// is ended, like one that has fallen silent.
const MOST_HEARD: usize = 4096;
/// The number of a child that no sidecar has reported: no reported one has it.
pub const UNTOLD: u64 = 0;

/// What a sidecar has reported unasked, or what was seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The program has ended, or runs another image.
    Gone,
    /// All its pages are back in the program.
    Left,
    /// How many pages could not be brought in.
    Stuck(String),
    /// It cannot page, and has moved nothing out.
    Failed(String),
    /// The sidecar has ended while its program has not, or says something unknown: its last words.
    Died(String),
}

/// One process with a sidecar.
#[derive(Debug)]
pub struct Ward {
    pub pid: Pid,
    program: OwnedFd,
    sidecar: Injected,
    /// Takes over if the sidecar is killed.
    pub(crate) warden: Option<Warden>,
    /// The last reference, if the sidecar and its warden die.
    uffd: Option<Uffd>,
    /// Userfaultfds of children that lack some of their pages, by their numbers.
    pub(crate) children: Vec<(u64, Uffd)>,
    /// The program was a child that another sidecar served, and this one does not serve it yet.
    pub(crate) inherits: Option<Inherits>,
    pub(crate) serves_inherited: bool,
    /// The same, for as long as this sidecar serves.
    pub(crate) inherited: Option<Inherits>,
    /// Messages that arrived while an answer was awaited.
    backlog: VecDeque<Message>,
    said: Option<News>,
    /// The tag of the answer to START, if that is still to come.
    start_tag: Option<String>,
    /// Since when the program has ended and nothing was heard.
    silent_since: Option<Instant>,
    /// It leaves so that the process gets another one.
    is_renewed: bool,
    /// The process is to stand still for a moment.
    wants_standstill: bool,
}

impl Ward {
    /// A ward whose sidecar pages, or may begin to at any moment. `said`: its messages until now.
    pub(crate) fn new(
        pid: Pid,
        program: OwnedFd,
        sidecar: Injected,
        warden: Option<Warden>,
        begun: Begun,
        said: Vec<Message>,
    ) -> Ward {
        let Begun { uffd, inherits, start_tag } = begun;
        Ward {
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
            wants_standstill: false,
        }
    }

    /// True once for each time that the process is to stand still for a moment.
    pub(crate) fn take_standstill(&mut self) -> bool {
        std::mem::take(&mut self.wants_standstill)
    }

    /// The process goes on after having been stopped for this long.
    pub fn goes_on(&mut self, stopped: Duration) {
        self.sidecar.stopped = self.sidecar.stopped.max(stopped);
    }

    /// The longest time that the process's threads were stopped, and their number when the sidecar
    /// was put in.
    pub fn stopped(&self) -> (Duration, usize) {
        (self.sidecar.stopped, self.sidecar.threads)
    }

    /// The sidecar's process id.
    pub fn sidecar(&self) -> Pid {
        self.sidecar.pid
    }

    /// The processes that serve the program, or stand by to: none of them belongs to the tree.
    pub fn servants(&self) -> impl Iterator<Item = u32> {
        let sidecar = self.sidecar.pid.as_raw_nonzero().get().unsigned_abs();
        std::iter::once(sidecar).chain(self.warden.as_ref().map(|warden| warden.pid))
    }

    /// The same, to be tracked until they have ended.
    pub fn retire(&mut self) -> Vec<Retired> {
        retired(&self.sidecar, self.warden.take())
    }

    /// What the sidecar has reported, or what became of it.
    pub fn news(&mut self) -> Option<News> {
        if self.said.is_none() {
            self.said = self.listen();
        }
        if self.said.is_none() {
            self.mind_silence();
        }
        self.said.clone()
    }

    /// Kills a sidecar that does not end with its program. What follows is reported later.
    fn mind_silence(&mut self) {
        if !is_over(&self.program) {
            return;
        }
        if self.silent_since.get_or_insert_with(Instant::now).elapsed() > HANG_TIME {
            self.silent_since = None;
            say!(
                "farpool: the sidecar of process {}, which has ended, says nothing for {} s; it is \
                 ended",
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
                    if text == STANDSTILL {
                        self.wants_standstill = true;
                        continue;
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

    /// An answer to a request that was given up. Only the one to START still matters: if it is a
    /// refusal nothing was moved out.
    fn hears_answer(&mut self, text: &str) -> Option<News> {
        let answer = text.strip_prefix(self.start_tag.as_deref()?)?;
        let reason = answer.strip_prefix("ERROR ").map(str::to_owned);
        self.start_tag = None;
        reason.map(News::Failed)
    }

    /// Sends a request and returns the answer. Messages that arrive meanwhile are handled later.
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

    /// Reads what it has reported of children until now.
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
        // When the first process of a process-id namespace ends, the kernel ends all others in it,
        // and the sidecar's end is seen first.
        if !is_over(&self.program) {
            await_end(&self.program);
        }
        if is_over(&self.program) && self.children.is_empty() {
            News::Gone
        } else {
            await_end(&self.sidecar.pidfd);
            let ending = Ending::of(self.sidecar.pid, &self.sidecar.pidfd);
            News::Died(format!("none; {ending}"))
        }
    }

    /// Children that will not get all their pages: they get SIGBUS where they wait for one, as long
    /// as `end_orphans` is called now and then.
    pub fn orphans(&mut self) -> impl Iterator<Item = (u64, Uffd)> + use<> {
        let own = self.last_reference().map(|uffd| (UNTOLD, uffd));
        std::mem::take(&mut self.children).into_iter().chain(own)
    }

    /// The userfaultfd of a program that has ended, with its sidecar: a child of vfork may still be
    /// in its memory. None if its previous sidecar serves it again.
    pub fn last_reference(&mut self) -> Option<Uffd> {
        let is_returned = self.inherits.is_some() && !self.serves_inherited;
        self.uffd.take().filter(|_| !is_returned)
    }

    /// Has all pages brought back; [`News::Left`] follows.
    pub fn leave(&self) -> Result<(), SidecarError> {
        self.tell("LEAVE")
    }

    /// Has it leave if it may do more than its program, which has given up rights since.
    pub fn renew_if_excessive(&mut self) {
        // One that does not serve yet could not leave.
        let is_beginning =
            self.start_tag.is_some() || (self.inherits.is_some() && !self.serves_inherited);
        if self.is_renewed || is_beginning || is_over(&self.program) {
            return;
        }
        let Some(excess) = authority::excess(self.pid, self.sidecar.pid) else { return };
        self.is_renewed = true;
        say!(
            "farpool: process {0} has given up {excess}, which its sidecar still has; all memory \
             is brought in, and process {0} gets another sidecar",
            self.pid.as_raw_nonzero()
        );
        // One that cannot be told has ended, which is noticed elsewhere.
        let _ = self.leave();
    }

    /// Whether it leaves so that the process gets another one.
    pub fn is_renewed(&self) -> bool {
        self.is_renewed
    }

    /// Sends a request without waiting for an answer.
    pub(crate) fn tell(&self, request: &str) -> Result<(), SidecarError> {
        send(&self.sidecar.control, request, None)
            .map_err(|error| SidecarError::Silent { pid: self.pid.as_raw_nonzero().get(), error })
    }

    /// Unmaps everything that is the sidecar's, and ends it. It must have left.
    pub fn withdraw(&self) -> Result<(), SidecarError> {
        withdraw(&self.sidecar)?;
        reap(self.pid, &self.sidecar);
        Ok(())
    }

    /// Kills the sidecar. If it has moved nothing out the program goes on, with some more addresses
    /// in use.
    pub fn abandon(&self) {
        let _ = pidfd_send_signal(&self.sidecar.pidfd, Signal::KILL);
    }

    /// Kills the program: its sidecar is gone, and the pages that it waits for will not come.
    pub fn end_program(&self) {
        let _ = pidfd_send_signal(&self.program, Signal::KILL);
    }
}

/// Waits until one of the sidecars has sent something or the process of a handle ends, at most for
/// `most`.
pub fn wait(wards: &[Ward], ending: Option<&OwnedFd>, most: Duration) {
    use rustix::event::{PollFd, PollFlags, poll};
    let Ok(most) = most.try_into() else { return };
    let controls = wards.iter().map(|ward| &ward.sidecar.control);
    let fds = controls.chain(ending).map(|fd| PollFd::new(fd, PollFlags::IN));
    // An error is a wake-up like any other: the caller looks again.
    let _ = poll(&mut fds.collect::<Vec<PollFd<'_>>>(), Some(&most));
}

/// The processes of a sidecar that serves no more, and of its warden, that have not ended.
pub(crate) fn retired(sidecar: &Injected, warden: Option<Warden>) -> Vec<Retired> {
    let pid = sidecar.pid.as_raw_nonzero().get().unsigned_abs();
    let until = Some(Instant::now() + HANG_TIME);
    let sidecar = sidecar.pidfd.try_clone().ok();
    let sidecar = sidecar.map(|process| Retired { pid, process, until });
    // Were it ended, a process that waits for a page would read zeros.
    let warden = warden.map(|Warden { pid, process }| Retired { pid, process, until: None });
    let servants = sidecar.into_iter().chain(warden);
    servants.filter(|servant| !is_over(&servant.process)).collect()
}

fn understand(text: &str) -> Option<News> {
    Some(match text.split_once(' ').unwrap_or((text, "")) {
        // The answer to LEAVE: leaving has begun.
        (READY | "LEAVING" | "NOTED" | "FINISHING", _) => return None,
        ("GONE", _) => News::Gone,
        ("LEFT", _) => News::Left,
        ("STUCK", pages) => News::Stuck(pages.into()),
        ("FAILED", reason) => News::Failed(reason.into()),
        // Its last words (PANIC ...), or a message that this version does not know.
        _ => News::Died(text.into()),
    })
}

pub(crate) fn withdraw(sidecar: &Injected) -> Result<(), SidecarError> {
    let pid = sidecar.pid.as_raw_nonzero().get();
    let mut told = String::new();
    // Other processes may stand still: everything shares the deadline of one request.
    let until = Instant::now() + ANSWER_TIME;
    let ask = |request: &str, expected: &str| {
        ask_until(until, (pid, sidecar), request, None, expected, &mut Vec::new())
    };
    // Answering may take memory, which only the next answer lists.
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

/// Waits until a killed sidecar is no process any more. If it was the program's child and the
/// program cannot be made to reap it, a zombie stays, visible only to a program that waits for such
/// children.
pub(crate) fn reap(program: Pid, sidecar: &Injected) {
    await_end(&sidecar.pidfd);
    let _ = farpool_inject::reap(program, sidecar.child);
}

fn range(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

/// What came of a sidecar's start.
#[derive(Debug)]
pub(crate) struct Begun {
    pub uffd: Uffd,
    pub inherits: Option<Inherits>,
    /// The tag of START, if it is not answered yet.
    pub start_tag: Option<String>,
}

#[cfg(test)]
mod tests {
    use rustix::process::{PidfdFlags, pidfd_open};

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
            wants_standstill: false,
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
        // Whether this many come through the socket depends on timing.
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
