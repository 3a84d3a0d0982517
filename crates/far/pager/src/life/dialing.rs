//! Connections over TCP with certificates, for the preloaded library: the keeper makes them, since
//! a program must not hold the certificate's key. Sidecars have a way of their own to ask it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use farpool_kernel::{peer_user, send_with_descriptors};
use farpool_pool::{Address, Opener};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    socketpair,
};

/// Name of the keeper's socket, in the board's directory.
const DIAL_SOCKET: &str = "dial.sock";

/// Asks the keeper whose board this is.
#[derive(Debug)]
pub(crate) struct ByKeeper {
    socket: PathBuf,
}

impl ByKeeper {
    pub(crate) fn new(board: &std::path::Path) -> ByKeeper {
        ByKeeper { socket: board.with_file_name(DIAL_SOCKET) }
    }
}

impl Opener for ByKeeper {
    /// The socket for the answer; other addresses than TCP are opened by this process itself.
    fn ask(&self, address: &Address) -> Result<Option<OwnedFd>, Errno> {
        let Address::Tcp(_) = address else { return Ok(None) };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let keeper = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&keeper, &SocketAddrUnix::new(&self.socket)?) {
            // Its keeper is gone, or was never one with a certificate: nothing is opened in the
            // clear instead.
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            other => other?,
        }
        // Whoever answers chooses the blade, and knows the connection's keys.
        let user = peer_user(keeper.as_fd())?;
        if user != 0 && user != rustix::process::geteuid().as_raw() {
            return Err(Errno::PERM);
        }
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let text = address.to_string();
        let sent =
            send_with_descriptors(&keeper, text.as_bytes(), &[there.as_fd()], SendFlags::DONTWAIT);
        sent.map(|_| Some(here))
    }
}
