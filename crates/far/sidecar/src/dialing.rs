//! Connections to blades, which the keeper opens: it has the root directory, the namespaces and the
//! user that started it, and this process those of its program.
//!
//! A request is the blade's address, and a socket for the answer. After the keeper has ended,
//! connections are opened from here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use farpool_kernel::send_with_descriptors;
use farpool_pager::sys;
use farpool_pool::{Address, Ask};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

/// The socket for requests.
static DIALER: OnceLock<OwnedFd> = OnceLock::new();

/// From now on the keeper is asked for connections.
pub fn begin(socket: Option<OwnedFd>) -> Result<(), String> {
    let socket = socket.ok_or("DIALER wants a socket")?;
    DIALER.set(socket).map_err(|_| "there is a dialer already")?;
    sys::set_dialer(Arc::new(ask as Ask));
    Ok(())
}

fn ask(address: &Address) -> Result<Option<OwnedFd>, Errno> {
    let Some(dialer) = DIALER.get() else { return Ok(None) };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let text = address.to_string();
    match send_with_descriptors(dialer, text.as_bytes(), &[there.as_fd()], SendFlags::DONTWAIT) {
        Ok(_) => Ok(Some(here)),
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(None),
        Err(errno) => Err(errno),
    }
}
