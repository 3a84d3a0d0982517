//! The calls that move a thread or a child process to another network namespace.
//!
//! Every step here is one system call, straight to the kernel.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// Puts the calling thread into a new network namespace.
pub(crate) fn unshare_network() -> io::Result<()> {
    // SAFETY: the call is unsafe because of CLONE_FILES, which would hide other threads'
    // descriptors from this thread. A network namespace concerns only sockets opened from now on.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

/// Puts the calling thread into a network namespace.
pub(crate) fn enter_network(namespace: impl AsFd) -> io::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Makes a command run its program in a network namespace, and in a control group if its file of
/// members is given.
pub(crate) fn start_inside(
    command: &mut Command,
    namespace: Arc<OwnedFd>,
    members: Option<Arc<File>>,
) {
    let enter = move || {
        enter_network(&*namespace)?;
        if let Some(members) = &members {
            // 0 means the writing process.
            rustix::io::write(&**members, b"0")?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls on descriptors that it owns;
    // it neither allocates nor locks. Converting their errors does not allocate either: they are
    // numbers.
    unsafe { command.pre_exec(enter) };
}
