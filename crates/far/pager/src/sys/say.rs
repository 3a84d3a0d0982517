//! Messages for people, on the program's standard error or through the keeper.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use crate::sys::program::{program_in_proc, program_pid};

/// What prints messages for this process: a sidecar's keeper.
static SAYER: OnceLock<fn(&str)> = OnceLock::new();

/// Makes messages be printed by `sayer`. The first call counts.
pub fn set_sayer(sayer: fn(&str)) {
    let _ = SAYER.set(sayer);
}

/// Writes a message to the program's current standard error. Never waits for a reader.
///
/// The pager holds none of the program's descriptors open (a reader at the other end of a pipe
/// would wait for ever), so it looks for the program's descriptor 2 anew for each message.
pub fn say(message: &str) {
    if let Some(sayer) = SAYER.get() {
        return sayer(message);
    }
    let line = format!("farpool: {message}\n");
    if !write_to_same_file(line.as_bytes()) {
        write_to_reopened(line.as_bytes());
    }
}

/// Writes to the same file or socket that the program has open, so that the program's next output
/// comes after the message and not over it. False if it is something else (a write to a terminal or
/// a named pipe could wait, and O_NONBLOCK would be set for the program too) or unavailable: the
/// program closed it, its main thread has ended, pidfd_getfd(2) is forbidden. A process may always
/// access itself: neither Yama nor a program that is not dumpable forbids it.
fn write_to_same_file(line: &[u8]) -> bool {
    use rustix::fs::FileType;
    use rustix::net::SendFlags;
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let Some(program) = i32::try_from(program_pid()).ok().and_then(Pid::from_raw) else {
        return false;
    };
    let descriptor = pidfd_open(program, PidfdFlags::empty())
        .and_then(|program| pidfd_getfd(&program, 2, PidfdGetfdFlags::empty()));
    let Ok(descriptor) = descriptor else {
        return false;
    };
    let Ok(stat) = rustix::fs::fstat(&descriptor) else {
        return false;
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => rustix::io::write(&descriptor, line).is_ok(),
        FileType::Socket => {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            rustix::net::send(&descriptor, line, flags).is_ok()
        }
        // A program that is not dumpable cannot reopen its pipe.
        FileType::Fifo => write_without_waiting(&descriptor, line),
        _ => false,
    }
}

/// Writes to an unnamed pipe. False if it is full, or is another kind of file.
fn write_without_waiting(file: &OwnedFd, line: &[u8]) -> bool {
    const NO_OFFSET: u64 = u64::MAX;
    let parts = [std::io::IoSlice::new(line)];
    rustix::io::pwritev2(file, &parts, NO_OFFSET, rustix::io::ReadWriteFlags::NOWAIT).is_ok()
}

fn write_to_reopened(line: &[u8]) {
    use rustix::fs::{Mode, OFlags};
    let pid = program_in_proc();
    let flags =
        OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let path = format!("/proc/{pid}/fd/2");
    if let Ok(descriptor) = rustix::fs::open(path.as_str(), flags, Mode::empty()) {
        let _ = rustix::io::write(&descriptor, line);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;
    use crate::sys::futex::{wait, wake};
    use crate::sys::{leave_descriptor_table, spawn};

    /// Set in the test's child, whose descriptor 2 is tested.
    const CHILD: &str = "FARPOOL_TEST_SAYS";

    /// Runs this test binary with `stderr` as its descriptor 2; there, [`speaker`] speaks.
    fn speak_to(stderr: impl Into<Stdio>, fill: bool) {
        let mut command = Command::new(std::env::current_exe().expect("the test's own path"));
        command.args(["--exact", "sys::say::tests::speaker", "--nocapture"]);
        command.env(CHILD, if fill { "fill" } else { "" });
        let status = command.stdout(Stdio::null()).stderr(stderr).status();
        assert!(status.expect("it starts").success());
    }

    /// Not a test by itself: the child of the others.
    #[test]
    fn speaker() {
        let Ok(how) = std::env::var(CHILD) else {
            return;
        };
        let mut stderr = std::io::stderr();
        stderr.write_all(b"before\n").expect("before");
        if how == "fill" {
            let flags = rustix::fs::fcntl_getfl(&stderr).expect("flags");
            let nonblocking = flags | rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(&stderr, nonblocking).expect("non-blocking");
            while stderr.write(&[b'x'; 4096]).is_ok() {}
            rustix::fs::fcntl_setfl(&stderr, flags).expect("blocking");
        }
        let done = Arc::new(AtomicU32::new(0));
        let tell = Arc::clone(&done);
        let body = move || {
            leave_descriptor_table().expect("a table of its own");
            say("message");
            tell.store(1, SeqCst);
            wake(&tell);
        };
        spawn(c"speaker", false, Box::new(body)).expect("a thread");
        while done.load(SeqCst) == 0 {
            wait(&done, 0, None);
        }
        if how != "fill" {
            stderr.write_all(b"after\n").expect("after");
        }
    }

    const ALL: &str = "before\nfarpool: message\nafter\n";

    #[test]
    fn in_a_file_a_message_stands_between_the_programs_own_lines() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::memfd_create("stderr", flags).expect("a file"));
        speak_to(file.try_clone().expect("a copy"), false);
        let mut text = String::new();
        file.rewind().expect("the start");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
    }

    #[test]
    fn a_socket_and_a_pipe_carry_messages_too() {
        let (mut reader, writer) = UnixStream::pair().expect("sockets");
        speak_to(OwnedFd::from(writer), false);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        speak_to(writer, false);
        text.clear();
        reader.read_to_string(&mut text).expect("text");
        assert_eq!(text, ALL);
    }

    /// The child ends although nothing reads the pipe.
    #[test]
    fn a_message_never_waits_for_a_reader() {
        let (_reader, writer) = std::io::pipe().expect("a pipe");
        speak_to(writer, true);
        let (_reader, writer) = UnixStream::pair().expect("sockets");
        speak_to(OwnedFd::from(writer), true);
    }
}
