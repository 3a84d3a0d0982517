//! Messages from the sidecar to its keeper.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_kernel::send_with_descriptors;
use rustix::net::SendFlags;

/// An answer: text and at most one descriptor.
pub type Answer = Result<(String, Option<OwnedFd>), String>;

/// Sends text and perhaps a descriptor; a failed send means that the other end has ended.
pub fn reply(socket: BorrowedFd, answer: Answer) {
    let (text, fd) = answer.unwrap_or_else(|error| (format!("ERROR {error}"), None));
    let fds: Vec<BorrowedFd> = fd.iter().map(AsFd::as_fd).collect();
    let _ = send_with_descriptors(socket, text.as_bytes(), &fds, SendFlags::empty());
}
