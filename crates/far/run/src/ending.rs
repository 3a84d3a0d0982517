//! How a process has ended, by its handle: the message for a sidecar that ended without a word.

use std::fmt;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use farpool_inject::Pid;

/// Size of the first version of the kernel's `struct pidfd_info`, whose last field is the exit
/// code.
const INFO_BYTES: usize = libc::PIDFD_INFO_SIZE_VER0 as usize;
/// The exit code's field in /proc/PID/stat counted from the one after the name (proc(5): 52 and 3).
const EXIT_CODE_FIELD: usize = 52 - 3;

const _: () = assert!(size_of::<libc::pidfd_info>() >= INFO_BYTES);

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Status(i32),
    Signal {
        number: i32,
        has_core: bool,
    },
    /// It has not ended, or the kernel does not tell: before 6.15 it does not for a reaped process.
    Unknown,
}

impl Ending {
    /// How the process `pid` of the handle has ended.
    pub fn of(pid: Pid, process: &OwnedFd) -> Ending {
        // It may be reaped between the first two attempts.
        told_by_handle(process)
            .or_else(|| told_by_zombie(pid))
            .or_else(|| told_by_handle(process))
            .map_or(Ending::Unknown, Ending::from_wait_status)
    }

    fn from_wait_status(status: i32) -> Ending {
        if libc::WIFSIGNALED(status) {
            let has_core = libc::WCOREDUMP(status);
            Ending::Signal { number: libc::WTERMSIG(status), has_core }
        } else {
            Ending::Status(libc::WEXITSTATUS(status))
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Status(code) => write!(f, "it exited with status {code}"),
            Ending::Signal { number: libc::SIGKILL, .. } => {
                f.write_str("signal 9 ended it: a user killed it, or the kernel for lack of memory")
            }
            Ending::Signal { number, has_core } => {
                let core = if *has_core { ", and left a core" } else { "" };
                write!(f, "signal {number} ended it{core}")
            }
            Ending::Unknown => f.write_str("how it ended is not known"),
        }
    }
}

/// The wait status of a process that was reaped (PIDFD_INFO_EXIT, Linux 6.15).
fn told_by_handle(process: &OwnedFd) -> Option<i32> {
    // SAFETY: the structure is numbers, for which zero is a value.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    info.mask = u64::from(libc::PIDFD_INFO_EXIT);
    // SAFETY: the request's number holds the size of `info`, of which the kernel writes no more.
    let answer = unsafe { libc::ioctl(process.as_raw_fd(), libc::PIDFD_GET_INFO, &raw mut info) };
    let has_exit = info.mask & u64::from(libc::PIDFD_INFO_EXIT) != 0;
    (answer == 0 && has_exit).then_some(info.exit_code)
}

/// The wait status of a process that is not reaped yet: its number is still its own. The kernel
/// reports 0 to a caller that may not see the status.
fn told_by_zombie(pid: Pid) -> Option<i32> {
    let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let text = std::fs::read_to_string(path).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split_ascii_whitespace();
    if fields.next() != Some("Z") {
        return None;
    }
    fields.nth(EXIT_CODE_FIELD - 1)?.parse().ok().filter(|status| *status != 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::process::{PidfdFlags, pidfd_open};

    use super::*;

    /// How the shell's end is reported while it is a zombie, and after it was reaped.
    fn endings(script: &str) -> [Ending; 2] {
        let mut shell = Command::new("sh").args(["-c", script]).spawn().expect("a shell");
        let pid = Pid::from_child(&shell);
        let handle = pidfd_open(pid, PidfdFlags::empty()).expect("a handle");
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).expect("its end");
        let zombie = Ending::of(pid, &handle);
        shell.wait().expect("its end");
        [zombie, Ending::of(pid, &handle)]
    }

    /// Linux 6.15 and newer report how a reaped process ended.
    fn tells_of_the_reaped() -> bool {
        let system = rustix::system::uname();
        let release = system.release().to_string_lossy();
        let mut numbers = release.split(['.', '-']).map(|word| word.parse::<u32>().unwrap_or(0));
        (numbers.next(), numbers.next()) >= (Some(6), Some(15))
    }

    fn assert_endings(script: &str, expected: Ending) {
        let [zombie, reaped] = endings(script);
        assert_eq!(zombie, expected, "{script}");
        let told = if tells_of_the_reaped() { expected } else { Ending::Unknown };
        assert_eq!(reaped, told, "{script}");
    }

    #[test]
    fn an_end_is_told_before_and_after_it_was_taken_note_of() {
        assert_endings("exit 3", Ending::Status(3));
        assert_endings("kill -9 $$", Ending::Signal { number: 9, has_core: false });
        assert_endings("kill -15 $$", Ending::Signal { number: 15, has_core: false });
    }

    #[test]
    fn who_lives_has_not_ended() {
        let mut sleep = Command::new("sleep").arg("1000").spawn().expect("sleep");
        let pid = Pid::from_child(&sleep);
        let handle = pidfd_open(pid, PidfdFlags::empty()).expect("a handle");
        assert_eq!(Ending::of(pid, &handle), Ending::Unknown);
        sleep.kill().expect("a signal");
        sleep.wait().expect("its end");
    }
}
