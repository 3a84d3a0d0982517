//! A network namespace without a name, held by a descriptor.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::Arc;

use crate::{HostsError, sys};

/// The kernel's settings that keep an interface from speaking IPv6 by itself.
const IPV6_SETTINGS: [&str; 2] =
    ["/proc/sys/net/ipv6/conf/all/disable_ipv6", "/proc/sys/net/ipv6/conf/default/disable_ipv6"];

/// A network namespace, which ends with the last of its descriptors, processes and sockets.
#[derive(Clone, Debug)]
pub struct Namespace {
    descriptor: Arc<OwnedFd>,
    inode: u64,
}

impl Namespace {
    /// Makes a new, empty namespace in which nothing speaks IPv6.
    ///
    /// # Errors
    /// This process may not make one.
    pub fn make() -> Result<Self, HostsError> {
        let file = std::thread::scope(|scope| join(scope.spawn(make_file)))
            .map_err(|error| HostsError::Lacking(format!("no network namespaces here: {error}")))?;
        let inode = file.metadata().map_err(HostsError::os("look at a namespace"))?.ino();
        Ok(Self { descriptor: Arc::new(OwnedFd::from(file)), inode })
    }

    /// Runs `work` on a thread of its own inside: sockets it opens belong to this namespace for
    /// good.
    ///
    /// # Errors
    /// The namespace cannot be entered; `work` has not run then.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R, HostsError> {
        let inside = || sys::enter_network(&*self.descriptor).map(|()| work());
        std::thread::scope(|scope| join(scope.spawn(inside)))
            .map_err(HostsError::os("enter a network namespace"))
    }

    /// A command that runs a program inside.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.command_in_group(program, None)
    }

    /// A command that runs a program inside, and in a control group if its open file of members is
    /// given.
    pub(crate) fn command_in_group(
        &self,
        program: impl AsRef<OsStr>,
        members: Option<Arc<File>>,
    ) -> Command {
        let mut command = Command::new(program);
        sys::start_inside(&mut command, Arc::clone(&self.descriptor), members);
        command
    }

    /// A path by which other processes can name it while this process lives.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.descriptor.as_raw_fd())
    }

    /// What /proc/PID/ns/net shows for a process inside.
    pub(crate) fn identity(&self) -> String {
        format!("net:[{}]", self.inode)
    }
}

/// Makes a namespace and opens its file. Must be called on a thread that ends right after.
fn make_file() -> io::Result<File> {
    sys::unshare_network()?;
    for setting in IPV6_SETTINGS {
        match fs::write(setting, "1") {
            // A kernel without IPv6 has nothing to switch off.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    File::open("/proc/thread-self/ns/net")
}

fn join<R>(thread: std::thread::ScopedJoinHandle<'_, R>) -> R {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
