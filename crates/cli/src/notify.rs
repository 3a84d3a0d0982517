//! Tells systemd that a service is ready or stopping (sd_notify), where systemd asked for it.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state` ("READY=1", "STOPPING=1") when NOTIFY_SOCKET is set; does nothing otherwise.
///
/// # Errors
/// The socket does not accept the message; the service works without it.
pub fn notify(state: &str) -> io::Result<()> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(path) if !path.is_empty() => send(&path, state),
        _ => Ok(()),
    }
}

/// A name that starts with `@` is in the abstract namespace, any other is a path.
fn send(name: &OsStr, state: &str) -> io::Result<()> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(hidden) => SocketAddr::from_abstract_name(hidden)?,
        None => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}
