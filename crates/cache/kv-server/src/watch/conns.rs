//! `stats conns`: the connected clients and their states.

use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::SocketAddrAny;

use crate::clients::Clients;
use crate::clients::connection::{Client, Phase};
use crate::me::Me;

/// The address of one end of a socket in memcached's form: prefixed with `tcp:`, `tcp6:` or
/// `unix:`.
fn shown(address: rustix::io::Result<SocketAddrAny>) -> String {
    use rustix::net::{SocketAddrUnix, SocketAddrV4, SocketAddrV6};
    let Ok(address) = address else { return "unknown:".into() };
    if let Ok(v4) = SocketAddrV4::try_from(address.clone()) {
        format!("tcp:{v4}")
    } else if let Ok(v6) = SocketAddrV6::try_from(address.clone()) {
        format!("tcp6:{v6}")
    } else if let Ok(unix) = SocketAddrUnix::try_from(address) {
        let path = unix.path().unwrap_or_default();
        format!("unix:{}", path.to_string_lossy())
    } else {
        "unknown:".into()
    }
}

/// memcached's name for the state of a connection.
fn state(client: &Client) -> &'static str {
    match client.phase {
        _ if !client.unsent.is_empty() => "conn_mwrite",
        Phase::Closing => "conn_closing",
        _ if client.watch.is_some() => "conn_watch",
        Phase::Skipping { .. } => "conn_swallow",
        Phase::Requests if client.dump.is_some() => "conn_parse_cmd",
        Phase::Requests if !client.is_quiet() => "conn_io_queue",
        Phase::Requests => "conn_read",
    }
}

/// The lines for a listening socket.
pub(crate) fn describe_listener(socket: &impl AsFd) -> String {
    let number = socket.as_fd().as_raw_fd();
    let address = shown(rustix::net::getsockname(socket));
    format!("STAT {number}:addr {address}\r\nSTAT {number}:state conn_listening\r\n")
}

impl Clients {
    /// Appends the lines of this thread's clients. Returns the number of clients. The first thread
    /// also lists the listening sockets.
    pub(crate) fn list(&self, me: &Me, now_s: u32, out: &mut Vec<u8>) -> usize {
        let mut text = String::new();
        if me.number == 0 {
            text.push_str(me.shared.listeners.get().map_or("", String::as_str));
        }
        let mut clients = 0;
        for connection in self.iter() {
            let (socket, client) = (&connection.socket, &connection.client);
            let number = socket.as_raw_fd();
            let local = shown(rustix::net::getsockname(socket));
            let mut remote = shown(
                rustix::net::getpeername(socket)
                    .and_then(|address| address.ok_or(rustix::io::Errno::NOTCONN)),
            );
            if remote == "unix:" {
                remote.clone_from(&local);
            }
            let idle_s = now_s.saturating_sub(client.last_active_s);
            // Writing to a string cannot fail.
            let _ = write!(
                text,
                "STAT {number}:addr {remote}\r\nSTAT {number}:listen_addr {local}\r\n\
                 STAT {number}:state {}\r\nSTAT {number}:secs_since_last_cmd {idle_s}\r\n",
                state(client),
            );
            clients += 1;
        }
        out.extend_from_slice(text.as_bytes());
        clients
    }
}
