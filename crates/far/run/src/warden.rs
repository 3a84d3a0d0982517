//! A sidecar's warden, as the keeper sees it: a process that holds the sidecar's userfaultfds in
//! case the sidecar is killed, and then ends the program and the children that are no longer served
//! (crates/far/sidecar/src/warden.rs). It ends with its work, or with the sidecar; here it is only
//! known, so that it is not taken for a process of the program's.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use rustix::process::{Signal, pidfd_send_signal};

use crate::say::say;
use crate::waits::is_over;

/// See the module's description.
#[derive(Debug)]
pub struct Warden {
    pub pid: u32,
    pub process: OwnedFd,
}

impl Warden {
    /// A warden by the handle that the sidecar has sent. None if it has ended.
    pub fn adopt(process: OwnedFd) -> Option<Warden> {
        // Its process id in this process's own namespace.
        let path = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
        let pid = number(&std::fs::read_to_string(path).ok()?)?;
        Some(Warden { pid, process })
    }
}

/// A sidecar that serves no more, or its warden.
#[derive(Debug)]
pub struct Retired {
    pub pid: u32,
    pub process: OwnedFd,
    /// When it must have ended. None if it ends once it is no longer needed.
    pub until: Option<Instant>,
}

impl Retired {
    /// True if it has ended; a sidecar that is overdue is killed.
    pub fn has_ended(&mut self) -> bool {
        if self.until.is_some_and(|until| Instant::now() > until) {
            self.until = None;
            say!("farpool: sidecar {} does not end by itself; it is ended", self.pid);
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
        is_over(&self.process)
    }
}

fn number(information: &str) -> Option<u32> {
    let line = information.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    #[test]
    fn a_process_is_known_by_its_handle() {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a handle");
        let warden = Warden::adopt(own).expect("it lives");
        assert_eq!(warden.pid, std::process::id());
        assert_eq!(number("pos:\t0\nPid:\t-1\nNSpid:\t-1\n"), None, "it has ended");
    }
}
