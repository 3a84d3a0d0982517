//! Unix sockets that listen with the permissions they are to have.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, chmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

/// Listens on a path that is free, without blocking. The socket has its permissions `mode` before
/// it listens: nobody else can connect at any moment, whatever the umask is.
///
/// # Errors
/// Those of bind(2), such as EADDRINUSE, chmod(2) and listen(2).
pub fn listen_unix(path: &Path, mode: u32, backlog: i32) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    chmod(path, Mode::from_raw_mode(mode))?;
    listen(&socket, backlog)?;
    Ok(socket)
}
