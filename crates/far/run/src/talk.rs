//! Messages between the keeper and a sidecar: one per request and one per answer, text and perhaps
//! a descriptor. The requests are listed in crates/far/sidecar/src/paging.rs.

use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_inject::{Injected, Pid};
use farpool_kernel::{receive_with_descriptor, send_with_descriptors};
use rustix::net::{RecvFlags, SendFlags};

use crate::say::say;
use crate::sidecar_error::SidecarError;

/// Longest that a sidecar may take to answer a request, whatever it reports meanwhile; it does
/// nothing but answer. After that it counts as silent.
pub(crate) const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Most messages taken while an answer is awaited and kept until they are handled: each may have a
/// descriptor. The socket holds some 280, and a program that forks all the time causes one or two
/// for each child. A sidecar that sends more counts as silent.
pub(crate) const MOST_TOLD: usize = 1024;

/// The longest message of a sidecar: its list of own ranges.
const MESSAGE_BYTES: usize = 128 << 10;

/// A message of a sidecar: text, perhaps a descriptor.
pub(crate) type Message = (String, Option<OwnedFd>);

/// Prefix of answers to numbered requests, and of nothing else.
pub(crate) const TAG: char = '@';
/// The program's memory is registered, or watched.
pub(crate) const READY: &str = "READY";
/// The sidecar serves a child that another one has ceded.
pub(crate) const TAKEN: &str = "TAKEN";
/// The sidecar has another warden.
pub(crate) const WARDEN: &str = "WARDEN";
/// The program is to stand still for a moment.
pub(crate) const STANDSTILL: &str = "STANDSTILL";
/// Why a child is not ceded: it needs no sidecar any more.
pub(crate) const SETTLED: &str = "SETTLED";

/// Handles a message that only asks for something that is done at once: text to be printed, or a
/// thread's priority, which is given if this process may; it only affects speed. False for others.
pub(crate) fn is_wish(text: &str, sidecar: Pid) -> bool {
    if let Some(message) = text.strip_prefix("SAY ") {
        say!("farpool: {message}");
        return true;
    }
    let (wish, thread) = text.split_once(' ').unwrap_or((text, ""));
    let policy = match wish {
        "PROMPT" => libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
        "CALM" => libc::SCHED_OTHER,
        _ => return false,
    };
    let sidecar = sidecar.as_raw_nonzero();
    let Ok(thread) = thread.parse::<i32>() else { return true };
    // A sidecar may be in another process-id namespace, or lie.
    if Path::new(&format!("/proc/{sidecar}/task/{thread}")).exists() {
        let parameter = libc::sched_param { sched_priority: i32::from(wish == "PROMPT") };
        // SAFETY: a thread id, and a pointer to a live sched_param.
        unsafe { libc::sched_setscheduler(thread, policy, &raw const parameter) };
    }
    true
}

/// Sends a request and returns the answer, which begins with `expected`. Messages that arrive
/// meanwhile are added to `aside`.
pub(crate) fn ask(
    pid: i32,
    sidecar: &Injected,
    request: &str,
    descriptor: Option<BorrowedFd<'_>>,
    expected: &str,
    aside: &mut Vec<Message>,
) -> Result<Message, SidecarError> {
    let until = Instant::now() + ANSWER_TIME;
    ask_until(until, (pid, sidecar), request, descriptor, expected, aside)
}

/// A fresh prefix for a request and its answer. An answer may come after it was given up, and must
/// not be taken for that to the next request.
pub(crate) fn next_tag() -> String {
    static REQUESTS: AtomicU64 = AtomicU64::new(0);
    format!("{TAG}{} ", REQUESTS.fetch_add(1, Relaxed))
}

/// As [`ask`], for one of several requests that share a deadline.
pub(crate) fn ask_until(
    until: Instant,
    (pid, sidecar): (i32, &Injected),
    request: &str,
    descriptor: Option<BorrowedFd<'_>>,
    expected: &str,
    aside: &mut Vec<Message>,
) -> Result<Message, SidecarError> {
    ask_as(&next_tag(), until, (pid, sidecar), request, descriptor, expected, aside)
}

/// As [`ask_until`], for a request whose answer may still matter after it was given up.
pub(crate) fn ask_as(
    tag: &str,
    until: Instant,
    (pid, sidecar): (i32, &Injected),
    request: &str,
    descriptor: Option<BorrowedFd<'_>>,
    expected: &str,
    aside: &mut Vec<Message>,
) -> Result<Message, SidecarError> {
    let silent = |error| SidecarError::Silent { pid, error };
    send(&sidecar.control, &format!("{tag}{request}"), descriptor).map_err(silent)?;
    let answer = await_answer(&sidecar.control, sidecar.pid, tag, until, aside);
    let (text, descriptor) = answer.map_err(silent)?;
    if text.is_empty() {
        return Err(refused(pid, "it has ended"));
    }
    if let Some(reason) = text.strip_prefix("ERROR ") {
        return Err(refused(pid, reason));
    }
    if text.starts_with(expected) { Ok((text, descriptor)) } else { Err(refused(pid, &text)) }
}

/// Waits for the answer that begins with `tag`, or for the end of the sidecar. Returns it without
/// the tag. Unasked messages are added to `aside`.
fn await_answer(
    control: &OwnedFd,
    sidecar: Pid,
    tag: &str,
    until: Instant,
    aside: &mut Vec<Message>,
) -> Result<Message, Error> {
    for _ in 0..MOST_TOLD {
        let (text, descriptor) = receive_until(control, until)?;
        if is_wish(&text, sidecar) {
            continue;
        }
        match text.strip_prefix(tag) {
            Some(answer) => return Ok((answer.to_owned(), descriptor)),
            None if text.is_empty() => return Ok((text, descriptor)),
            // The answer to a request that was given up.
            None if text.starts_with(TAG) => {}
            None => aside.push((text, descriptor)),
        }
    }
    Err(flood())
}

/// The error for a sidecar that sends messages without end.
pub(crate) fn flood() -> Error {
    Error::other(format!("it told more than {MOST_TOLD} things meanwhile"))
}

/// Waits for a message until a deadline, which no message extends: else a sidecar that talks all
/// the time would hold the keeper for ever, and with it the processes that stand still.
pub(crate) fn receive_until(control: &OwnedFd, until: Instant) -> Result<Message, Error> {
    use rustix::event::{PollFd, PollFlags, poll};
    while let Some(time) = until.checked_duration_since(Instant::now()) {
        let time = time.try_into().map_err(Error::other)?;
        match poll(&mut [PollFd::new(control, PollFlags::IN)], Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return receive(control, RecvFlags::DONTWAIT),
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(std::io::ErrorKind::TimedOut.into())
}

pub(crate) fn send(
    control: &OwnedFd,
    text: &str,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), Error> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    send_with_descriptors(control, text.as_bytes(), &descriptors, SendFlags::empty())?;
    Ok(())
}

pub(crate) fn receive(
    control: impl AsFd,
    flags: RecvFlags,
) -> Result<(String, Option<OwnedFd>), Error> {
    let mut bytes = vec![0; MESSAGE_BYTES];
    let (got, descriptor) = receive_with_descriptor(control, &mut bytes, flags)?;
    let text = String::from_utf8_lossy(&bytes[..got]);
    Ok((printable(text.trim_end()), descriptor))
}

/// Text of a program, or of its sidecar, made safe for a terminal: else its author could control
/// the terminal of the user of the keeper. All but printable characters are escaped. Pure.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => shown.push(' '),
            // Printable, and escaped only in quoted text.
            '\\' | '\'' | '"' => shown.push(character),
            other => shown.extend(other.escape_debug()),
        }
    }
    shown
}

pub(crate) fn refused(pid: i32, reason: &str) -> SidecarError {
    SidecarError::Refused { pid, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn sockets() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        pair.expect("sockets")
    }

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        let said = "SAY \u{1b}]0;root\u{7}\u{1b}[2J\rover\u{9b}31m\u{202e}\u{7f}";
        let shown = r"SAY \u{1b}]0;root\u{7}\u{1b}[2J\rover\u{9b}31m\u{202e}\u{7f}";
        assert_eq!(printable(said), shown);
        assert_eq!(printable("a\nb\tc"), "a b c");
        let harmless = r#"CHILD 7: it's "C:\x", größer than 4 %"#;
        assert_eq!(printable(harmless), harmless);
        let (control, sidecar) = sockets();
        send(&sidecar, said, None).expect("a message");
        assert_eq!(receive(&control, RecvFlags::empty()).expect("a message").0, shown);
    }

    /// Says something every few milliseconds until the other end is closed.
    fn keep_telling(sidecar: OwnedFd, text: &'static str, pause: Duration) {
        std::thread::spawn(move || {
            while send(&sidecar, text, None).is_ok() {
                std::thread::sleep(pause);
            }
        });
    }

    #[test]
    fn an_answer_is_waited_for_until_one_deadline_whatever_is_told() {
        let time = Duration::from_millis(100);
        let (control, sidecar) = sockets();
        keep_telling(sidecar, "NOTED", time / 20);
        let (until, mut aside) = (Instant::now() + time, Vec::new());
        let own = rustix::process::getpid();
        let error = await_answer(&control, own, "@1 ", until, &mut aside).expect_err("no answer");
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
        assert!(Instant::now() >= until);
    }

    #[test]
    fn what_is_told_meanwhile_is_limited() {
        let (control, sidecar) = sockets();
        keep_telling(sidecar, "NOTED", Duration::ZERO);
        let (until, mut aside) = (Instant::now() + 10 * ANSWER_TIME, Vec::new());
        let own = rustix::process::getpid();
        let error = await_answer(&control, own, "@1 ", until, &mut aside).expect_err("no answer");
        assert_eq!(error.to_string(), flood().to_string());
        assert_eq!(aside.len(), MOST_TOLD);
    }

    #[test]
    fn what_is_told_before_an_answer_is_kept_and_late_answers_are_not() {
        let (control, sidecar) = sockets();
        for text in ["SAY hello", "CHILD 1", "@10 LATE", "@11 MADE"] {
            send(&sidecar, text, None).expect("a message");
        }
        let (until, mut aside) = (Instant::now() + ANSWER_TIME, Vec::new());
        let own = rustix::process::getpid();
        let answer = await_answer(&control, own, "@11 ", until, &mut aside);
        let (answer, _) = answer.expect("an answer");
        assert_eq!((answer.as_str(), aside.len()), ("MADE", 1));
        assert_eq!(aside[0].0, "CHILD 1");
    }
}
