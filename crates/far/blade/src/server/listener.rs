//! Sockets that a blade listens on.

use super::ServeError;
use crate::sources::Source;
use farpool_kernel::{listen_unix, peer_user};
use farpool_wire::Address;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, connect,
    ipproto, listen, socket_with, sockopt,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connections waiting to be accepted; the kernel cuts it to net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// A silent TCP peer is probed after this time, ...
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
/// ... again each time this has passed, ...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// ... and given up after this many unanswered probes. Its client's lease begins then.
const KEEPALIVE_COUNT: u32 = 3;
/// Sent bytes that the peer does not acknowledge end the connection after this time.
const UNACKNOWLEDGED_LIMIT_MS: u32 = 11_000;

/// A listening socket; a unix one removes its file when dropped.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    pub(super) address: Address,
    /// Path, device and inode of a unix socket's file.
    file: Option<(PathBuf, u64, u64)>,
}

impl Listener {
    pub(super) fn bind(address: &Address, mode: u32) -> Result<Listener, ServeError> {
        match address {
            Address::Unix(path) | Address::Shm(path) => Self::bind_unix(address, path, mode),
            Address::Tcp(tcp) => Self::bind_tcp(*tcp),
        }
        .map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { address: address.clone() },
            _ => ServeError::Listen { address: address.clone(), source },
        })
    }

    fn bind_unix(address: &Address, path: &Path, mode: u32) -> io::Result<Listener> {
        let socket = match listen_unix(path, mode, BACKLOG) {
            Err(Errno::ADDRINUSE) => {
                remove_if_stale(path, &SocketAddrUnix::new(path)?)?;
                listen_unix(path, mode, BACKLOG)?
            }
            other => other?,
        };
        let stat = rustix::fs::stat(path)?;
        let file = Some((path.to_owned(), stat.st_dev, stat.st_ino));
        Ok(Listener { socket, address: address.clone(), file })
    }

    fn bind_tcp(address: SocketAddr) -> io::Result<Listener> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &address)?;
        listen(&socket, BACKLOG)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok(Listener { socket, address: Address::Tcp(bound), file: None })
    }

    pub(super) fn is_unix(&self) -> bool {
        self.file.is_some()
    }

    /// The next connection, ready for use, and where it comes from; `None` if there is none.
    pub(super) fn accept(&self) -> io::Result<Option<(OwnedFd, Source)>> {
        match acceptfrom_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok((socket, peer)) => {
                let from = match peer {
                    _ if self.is_unix() => Source::User(peer_user(socket.as_fd())?),
                    Some(peer) => {
                        set_up_tcp(&socket)?;
                        Source::host(SocketAddr::try_from(peer)?.ip())
                    }
                    // The kernel names the peer of every TCP connection.
                    None => return Err(io::ErrorKind::AddrNotAvailable.into()),
                };
                Ok(Some((socket, from)))
            }
            // A peer that gave up before the accept is no error.
            Err(Errno::WOULDBLOCK | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn set_up_tcp(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)?;
    sockopt::set_tcp_user_timeout(socket, UNACKNOWLEDGED_LIMIT_MS)
}

/// Removes a socket file without a listener; anything else at the path stays.
fn remove_if_stale(path: &Path, name: &SocketAddrUnix) -> io::Result<()> {
    let stat = rustix::fs::lstat(path)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(Errno::ADDRINUSE.into());
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&probe, name) {
        Err(Errno::CONNREFUSED) => Ok(rustix::fs::unlink(path)?),
        _ => Err(Errno::ADDRINUSE.into()),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some((path, device, inode)) = &self.file else {
            return;
        };
        // Another blade may have put its own socket there meanwhile.
        let is_ours =
            rustix::fs::lstat(path).is_ok_and(|s| (s.st_dev, s.st_ino) == (*device, *inode));
        if is_ours {
            // It may be gone already.
            let _ = rustix::fs::unlink(path);
        }
    }
}
