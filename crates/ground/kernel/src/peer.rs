//! Who is at the other end of a unix socket.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// The user at the other end of a connected unix socket: the one that connected, or, for who
/// connected, the one that began to listen. rustix also requires its process, which has no number
/// in another process-id namespace.
///
/// # Errors
/// It is not a connected unix socket.
pub fn peer_user(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    const BYTES: libc::socklen_t = 12;
    const _: () = assert!(size_of::<libc::ucred>() == BYTES as usize);
    let (mut peer, mut bytes) = (libc::ucred { pid: 0, uid: 0, gid: 0 }, BYTES);
    // SAFETY: the kernel writes at most `bytes` bytes to `peer`, which has that size, and their
    // number to `bytes`.
    let done = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            &raw mut peer,
            &raw mut bytes,
        )
    };
    match done {
        0 => Ok(peer.uid),
        _ => {
            let error = std::io::Error::last_os_error();
            Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn both_ends_of_ones_own_socket_are_this_users() {
        let (near, far) = UnixStream::pair().expect("sockets");
        let user = rustix::process::geteuid().as_raw();
        assert_eq!((peer_user(near.as_fd()), peer_user(far.as_fd())), (Ok(user), Ok(user)));
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        assert_eq!(peer_user(reader.as_fd()), Err(Errno::NOTSOCK));
    }
}
