//! Messages over unix sockets that carry file descriptors (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors in one message: none of Farpool's carries more than five. A message to be sent
/// with more is refused; the kernel closes those of a peer that find no space.
pub const MOST_DESCRIPTORS: usize = 8;

/// Sends bytes, and descriptors with them if there are any. A closed peer is an error, never
/// SIGPIPE. Returns the bytes sent.
///
/// # Errors
/// Those of sendmsg(2); EINVAL if there are more than [`MOST_DESCRIPTORS`].
pub fn send_with_descriptors(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    // The space is rounded up, so it alone does not tell.
    if descriptors.len() > MOST_DESCRIPTORS {
        return Err(Errno::INVAL);
    }
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags | SendFlags::NOSIGNAL)
}

/// Receives bytes, and hands each descriptor that comes with them to `take`, closed on exec.
/// Returns the bytes received.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive_with_descriptors(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
    take: impl FnMut(OwnedFd),
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    descriptors.flatten().for_each(take);
    Ok(got.bytes)
}

/// Receives bytes, and the first descriptor that comes with them; others are closed. Returns the
/// bytes received and that descriptor.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive_with_descriptor(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut first = None;
    let got = receive_with_descriptors(socket, bytes, flags, |descriptor| {
        first.get_or_insert(descriptor);
    })?;
    Ok((got, first))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_arrive_in_order_and_open() {
        let (near, far) = UnixStream::pair().expect("sockets");
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let (_unread, other) = std::io::pipe().expect("a pipe");
        let both = [writer.as_fd(), other.as_fd()];
        let sent = send_with_descriptors(&near, b"two", &both, SendFlags::empty());
        assert_eq!(sent, Ok(3));
        let (mut bytes, mut taken) = ([0; 8], Vec::new());
        let take = |descriptor| taken.push(descriptor);
        let got = receive_with_descriptors(&far, &mut bytes, RecvFlags::empty(), take);
        assert_eq!((got, &bytes[..3], taken.len()), (Ok(3), &b"two"[..], 2));
        drop((writer, other));
        let mut first = std::fs::File::from(taken.swap_remove(0));
        first.write_all(b"through").expect("the pipe is open");
        drop(first);
        let mut read = String::new();
        reader.read_to_string(&mut read).expect("the pipe's bytes");
        assert_eq!(read, "through");
    }

    #[test]
    fn only_the_first_descriptor_stays_open() {
        let (near, far) = UnixStream::pair().expect("sockets");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let both = [reader.as_fd(), writer.as_fd()];
        send_with_descriptors(&near, b"+", &both, SendFlags::empty()).expect("it is sent");
        drop(writer);
        let (got, first) =
            receive_with_descriptor(&far, &mut [0; 1], RecvFlags::empty()).expect("it arrives");
        assert_eq!((got, first.is_some()), (1, true));
        // The only other writer was the second descriptor: the pipe is at its end.
        assert_eq!(std::fs::File::from(first.expect("a reader")).read(&mut [0; 1]).ok(), Some(0));
    }

    #[test]
    fn too_many_descriptors_are_refused_and_none_is_no_message_of_its_own() {
        let (near, far) = UnixStream::pair().expect("sockets");
        let many = [near.as_fd(); MOST_DESCRIPTORS + 1];
        assert_eq!(
            send_with_descriptors(&near, b"+", &many, SendFlags::empty()),
            Err(Errno::INVAL)
        );
        let most = &many[..MOST_DESCRIPTORS];
        assert_eq!(send_with_descriptors(&near, b"a", most, SendFlags::empty()), Ok(1));
        assert_eq!(send_with_descriptors(&near, b"b", &[], SendFlags::empty()), Ok(1));
        let mut count = 0;
        let counts = |_| count += 1;
        assert_eq!(receive_with_descriptors(&far, &mut [0; 1], RecvFlags::empty(), counts), Ok(1));
        assert_eq!(count, MOST_DESCRIPTORS);
        let second = receive_with_descriptor(&far, &mut [0; 1], RecvFlags::empty());
        assert!(matches!(second, Ok((1, None))));
    }
}
