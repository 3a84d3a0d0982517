//! Which users may run the blade behind a unix socket.
//!
//! The blade can read all pages, and a socket in a folder like /tmp can belong to any user. So the
//! process that listens must be root's, this user's, or that of the owner of the socket's folder,
//! if no other user can put a socket there (a blade run by a service user). The kernel reports the
//! user at the time when it began to listen.

use std::os::fd::BorrowedFd;
use std::path::Path;

use farpool_kernel::peer_user;
use rustix::fs::Mode;
use rustix::io::Errno;

/// A user whose blade this user did not mean to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stranger {
    /// The user that listens.
    pub(crate) owner: u32,
    /// The user of this process.
    pub(crate) user: u32,
}

/// The user that listens at the other end of a connected unix socket, if it is a stranger.
pub(crate) fn stranger(socket: BorrowedFd<'_>, path: &Path) -> Result<Option<Stranger>, Errno> {
    let owner = peer_user(socket)?;
    let user = rustix::process::geteuid().as_raw();
    let is_known = owner == 0 || owner == user || keeper_of(path) == Some(owner);
    Ok((!is_known).then_some(Stranger { owner, user }))
}

/// The only unprivileged user that can put a socket at this path. None if there is no single one.
fn keeper_of(path: &Path) -> Option<u32> {
    let folder = rustix::fs::stat(path.parent()?).ok()?;
    let mode = Mode::from_raw_mode(folder.st_mode);
    (!mode.intersects(Mode::WGRP | Mode::WOTH)).then_some(folder.st_uid)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_that_others_write_to_has_no_keeper() {
        let directory = tempfile::tempdir().expect("tempdir");
        let socket = directory.path().join("blade.sock");
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(keeper_of(&socket), Some(user));
        for mode in [0o770, 0o1777] {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(directory.path(), mode).expect("chmod");
            assert_eq!(keeper_of(&socket), None);
        }
    }

    #[test]
    fn ones_own_listener_is_no_stranger() {
        use std::os::fd::AsFd;
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("blade.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        let socket = std::os::unix::net::UnixStream::connect(&path).expect("connect");
        assert_eq!(stranger(socket.as_fd(), &path), Ok(None));
    }
}
