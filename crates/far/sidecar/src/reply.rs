//! Messages from the sidecar to its keeper.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// An answer: text and at most one descriptor.
pub type Answer = Result<(String, Option<OwnedFd>), String>;

/// Sends text and perhaps a descriptor; a failed send means that the other end has ended.
pub fn reply(socket: BorrowedFd, answer: Answer) {
    let (text, fd) = answer.unwrap_or_else(|error| (format!("ERROR {error}"), None));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd> = fd.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let _ = sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL);
}
