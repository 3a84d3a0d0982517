//! Waits while a sidecar is put in or taken out, all of them bounded.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use farpool_inject::{Injected, Pid};
use rustix::net::RecvFlags;
use rustix::process::{Signal, pidfd_send_signal};

use crate::talk::{MOST_TOLD, Message, READY, TAKEN, is_wish, receive};

/// Longest that a process is kept stopped for its sidecar; registering some GB takes milliseconds.
const HOLD_TIME: Duration = Duration::from_millis(200);
/// Longest wait for a killed sidecar (0.2 s); on a busy machine it takes some milliseconds.
const END_NS: i64 = 200_000_000;

/// Waits until the program's memory is registered or watched. If it fails, or takes too long, the
/// limit may be passed. The end of the sidecar is kept like any other message, and handled later.
pub(crate) fn await_readiness(sidecar: Pid, control: &OwnedFd, said: &mut Vec<Message>) {
    await_ready_until(Instant::now() + HOLD_TIME, sidecar, control, said);
}

fn await_ready_until(until: Instant, sidecar: Pid, control: &OwnedFd, said: &mut Vec<Message>) {
    use rustix::event::{PollFd, PollFlags, poll};
    while let Some(time) = until.checked_duration_since(Instant::now()) {
        let Ok(time) = time.try_into() else { return };
        let mut fds = [PollFd::new(control, PollFlags::IN)];
        if !poll(&mut fds, Some(&time)).is_ok_and(|ready| ready > 0) {
            return;
        }
        let Ok((text, descriptor)) = receive(control, RecvFlags::DONTWAIT) else { return };
        if is_wish(&text, sidecar) {
            continue;
        }
        // Messages may have descriptors, so a sidecar that sends too many is not waited for.
        let is_over = text == READY || text.is_empty() || said.len() >= MOST_TOLD;
        said.push((text, descriptor));
        if is_over {
            return;
        }
    }
}

/// Whether the process of a handle has ended.
pub(crate) fn is_over(process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&zero)).is_ok_and(|ready| ready > 0)
}

/// Kills a sidecar that was to take over a child, before its parent's serves that again: two pagers
/// would each know half of what the child does. If it has begun to serve, too much has happened for
/// the child to go on.
pub(crate) fn end_before_return(program: &OwnedFd, sidecar: &Injected, aside: &mut Vec<Message>) {
    let _ = pidfd_send_signal(&sidecar.pidfd, Signal::KILL);
    await_end(&sidecar.pidfd);
    // Another process may have its end of the socket, and write to it for ever.
    while aside.len() < MOST_TOLD
        && let Ok(message) = receive(&sidecar.control, RecvFlags::DONTWAIT)
        && !message.0.is_empty()
    {
        aside.push(message);
    }
    let is_flood = aside.len() >= MOST_TOLD;
    if is_flood || aside.iter().any(|(text, _)| text == TAKEN) || !is_over(&sidecar.pidfd) {
        let _ = pidfd_send_signal(program, Signal::KILL);
    }
}

/// Waits for a process that is about to end, so that it is not taken for one of the program's.
pub(crate) fn await_end(process: &OwnedFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let most = Timespec { tv_sec: 0, tv_nsec: END_NS };
    let _ = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&most));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::talk::send;

    /// Longest wait for anything here; reached only if something is broken.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// The program is stopped meanwhile.
    #[test]
    fn a_sidecar_that_ends_before_it_is_ready_is_not_waited_for() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (control, sidecar) = pair.expect("sockets");
        send(&sidecar, "CHILD 1", None).expect("a message");
        drop(sidecar);
        let (done, waited) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let until = Instant::now() + 10 * PATIENCE;
            await_ready_until(until, rustix::process::getpid(), &control, &mut said);
            let texts: Vec<String> = said.into_iter().map(|(text, _)| text).collect();
            done.send(texts)
        });
        let said = waited.recv_timeout(PATIENCE).expect("an end");
        assert_eq!(said, ["CHILD 1", ""]);
    }
}
