//! Ports for servers that must be told one beforehand.
//!
//! A port that was free a moment ago can be gone the next: the kernel gives it to a connection of
//! another test. So these lie below the ports that the kernel gives to connections, and each is
//! taken only once.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as Name, UnixListener};
use std::sync::Mutex;

use farpool_kernel::lock;

/// Below what Linux gives to connections by itself (32768 and up, `ip_local_port_range`), and above
/// the usual ports of servers.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A port of 127.0.0.1 at which no process listens, and that no other test gets while this process
/// runs.
///
/// # Panics
/// When every port is taken.
#[must_use]
pub fn free_port() -> u16 {
    // Held until the process ends: one socket name for each port, which other processes see.
    static TAKEN: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    let mut taken = lock(&TAKEN);
    // Processes that start one after another begin far from each other.
    let start = std::process::id().wrapping_mul(97);
    (0..u32::from(COUNT))
        .map(|step| {
            let offset = start.wrapping_add(step) % u32::from(COUNT);
            FIRST + u16::try_from(offset).expect("below COUNT")
        })
        .find(|&port| {
            let name = Name::from_abstract_name(format!("farpool-test-port-{port}"));
            let Ok(listener) = UnixListener::bind_addr(&name.expect("a short name")) else {
                return false;
            };
            taken.push(listener);
            TcpListener::bind(("0.0.0.0", port)).is_ok()
        })
        .expect("a port is free")
}

/// 127.0.0.1 with a [`free_port`].
///
/// # Panics
/// When every port is taken.
#[must_use]
pub fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port()).into()
}

#[cfg(test)]
mod tests {
    use super::free_port;

    #[test]
    fn no_port_is_given_twice_and_each_can_be_listened_at() {
        let ports: std::collections::BTreeSet<u16> = (0..50).map(|_| free_port()).collect();
        assert_eq!(ports.len(), 50);
        for port in ports {
            std::net::TcpListener::bind(("127.0.0.1", port)).expect("nobody else has it");
        }
    }
}
