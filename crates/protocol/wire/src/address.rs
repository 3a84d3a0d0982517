//! A blade's address, as people write it: `unix:///path`, `shm:///path`, `tcp://ip:port`.
//!
//! Hosts must be numeric: a name look-up would run code of the C library inside the program that
//! uses far memory.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;

/// Longest path of a socket in bytes: the size of the kernel's address, less the closing zero.
pub const SOCKET_PATH_LIMIT_BYTES: usize = 107;

/// A blade's address, and how its pages are transferred.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// Unix socket, which also carries pages.
    Unix(PathBuf),
    /// Unix socket; the client gets the segment's memory by descriptor and copies pages itself.
    Shm(PathBuf),
    /// TCP, address and port as numbers.
    Tcp(SocketAddr),
}

/// Why an address was refused.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AddressError {
    /// An unknown scheme.
    #[error("the address {0:?} must begin with unix://, shm:// or tcp://")]
    Scheme(String),
    /// A socket path that is not absolute, or empty.
    #[error("the socket path in {0:?} must be absolute, as in unix:///run/farpool/blade.sock")]
    Path(String),
    /// A socket path too long for the kernel.
    #[error(
        "the socket path in {0:?} is longer than {SOCKET_PATH_LIMIT_BYTES} bytes; choose a shorter \
         one"
    )]
    PathTooLong(String),
    /// Not a numeric address and port.
    #[error(
        "{0:?} needs a numeric address and a port, as in tcp://192.0.2.1:7070 or \
         tcp://[2001:db8::1]:7070"
    )]
    Host(String),
}

impl Address {
    /// Returns the socket's path, if the address is on the local machine's file system.
    pub fn socket_path(&self) -> Option<&Path> {
        match self {
            Address::Unix(path) | Address::Shm(path) => Some(path),
            Address::Tcp(_) => None,
        }
    }

    /// True if only this machine can reach it.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix(_) | Address::Shm(_) => true,
            Address::Tcp(address) => address.ip().is_loopback(),
        }
    }

    /// Returns what the blade fails with.
    pub fn failure_domain(&self) -> FailureDomain {
        match self {
            Address::Tcp(at) if !at.ip().to_canonical().is_loopback() => {
                FailureDomain::Host(at.ip().to_canonical())
            }
            local => FailureDomain::Blade(local.clone()),
        }
    }
}

/// What fails together.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum FailureDomain {
    /// A blade of this host: if the host fails, the client does, too.
    Blade(Address),
    /// Another host with all its blades.
    Host(IpAddr),
    /// One of a rack's model, by a number that the client gives its name.
    Named(u64),
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix://") {
            return socket_path(text, path).map(Address::Unix);
        }
        if let Some(path) = text.strip_prefix("shm://") {
            return socket_path(text, path).map(Address::Shm);
        }
        match text.strip_prefix("tcp://") {
            Some(host) => {
                host.parse().map(Address::Tcp).map_err(|_| AddressError::Host(text.to_owned()))
            }
            None => Err(AddressError::Scheme(text.to_owned())),
        }
    }
}

fn socket_path(text: &str, path: &str) -> Result<PathBuf, AddressError> {
    if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') {
        return Err(AddressError::Path(text.to_owned()));
    }
    if path.len() > SOCKET_PATH_LIMIT_BYTES {
        return Err(AddressError::PathTooLong(text.to_owned()));
    }
    Ok(PathBuf::from(path))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
            Address::Shm(path) => write!(f, "shm://{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blades_of_one_other_host_fail_together_and_those_of_this_one_do_not() {
        let domain = |text: &str| text.parse::<Address>().expect("valid").failure_domain();
        assert_eq!(domain("tcp://192.0.2.1:1"), domain("tcp://192.0.2.1:2"));
        assert_ne!(domain("tcp://192.0.2.1:1"), domain("tcp://192.0.2.2:1"));
        assert_eq!(domain("tcp://[::ffff:192.0.2.1]:1"), domain("tcp://192.0.2.1:2"));
        assert_ne!(domain("tcp://127.0.0.1:1"), domain("tcp://127.0.0.1:2"));
        assert_ne!(domain("unix:///a"), domain("unix:///b"));
    }

    #[test]
    fn addresses_print_as_they_were_written() {
        for text in ["unix:///run/a.sock", "shm:///b", "tcp://127.0.0.1:7070", "tcp://[::1]:7070"] {
            assert_eq!(text.parse::<Address>().map(|a| a.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn wrong_addresses_are_refused_by_what_is_wrong() {
        let parse = |text: &str| text.parse::<Address>();
        assert!(matches!(parse("http://x"), Err(AddressError::Scheme(_))));
        assert!(matches!(parse("unix://run/x"), Err(AddressError::Path(_))));
        assert!(matches!(parse("unix://"), Err(AddressError::Path(_))));
        assert!(matches!(parse("tcp://localhost:1"), Err(AddressError::Host(_))));
        assert!(matches!(parse("tcp://127.0.0.1"), Err(AddressError::Host(_))));
        let long = format!("shm:///{}", "x".repeat(SOCKET_PATH_LIMIT_BYTES));
        assert!(matches!(parse(&long), Err(AddressError::PathTooLong(_))));
    }

    #[test]
    fn only_loopback_tcp_is_local() {
        let local = |text: &str| text.parse::<Address>().map(|a| a.is_local());
        assert_eq!(local("tcp://127.0.0.1:1"), Ok(true));
        assert_eq!(local("tcp://10.0.0.1:1"), Ok(false));
        assert_eq!(local("tcp://0.0.0.0:1"), Ok(false));
    }
}
