//! How fast the network interface is that has an address, as the kernel says.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// Bytes per second of a megabit per second, the unit of `/sys/class/net/*/speed`.
const BYTES_PER_MEGABIT: u64 = 125_000;
/// Where the kernel shows its interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Returns the speed in bytes per second of the interface with this address. None if no interface
/// has it, or the interface does not say: it is virtual, down, or wireless.
#[must_use]
pub fn link_bytes_per_s(address: IpAddr) -> Option<u64> {
    let name = interfaces().remove(&address)?;
    speed_of(&Path::new(INTERFACES).join(name))
}

fn speed_of(interface: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(interface.join("speed")).ok()?;
    // -1 stands for an unknown speed.
    let megabits: u64 = text.trim().parse().ok()?;
    megabits.checked_mul(BYTES_PER_MEGABIT).filter(|speed| *speed > 0)
}

/// Returns the interface of each address of this machine.
fn interfaces() -> BTreeMap<IpAddr, String> {
    let mut all = BTreeMap::new();
    let mut list = std::ptr::null_mut();
    // SAFETY: the call writes a list to the place given, which freeifaddrs below gives back.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return all;
    }
    let mut next = list;
    while !next.is_null() {
        // SAFETY: each entry of the list is valid until freeifaddrs.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if let Some(address) = address_of(entry.ifa_addr) {
            // SAFETY: the name of an entry is a text that ends with zero, valid like the entry.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            all.insert(address, name.to_string_lossy().into_owned());
        }
    }
    // SAFETY: the list comes from getifaddrs, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    all
}

/// Returns the address in a `sockaddr` of the list, if it is one of the Internet.
fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: it is not null, and the list's addresses have at least their family.
    let family = i32::from(unsafe { (*address).sa_family });
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in; it may not be aligned as one.
            let at = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(at.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6; it may not be aligned as one.
            let at = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(at.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_an_interface_without_a_speed() {
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert_eq!(interfaces().get(&loopback).map(String::as_str), Some("lo"));
        assert_eq!(link_bytes_per_s(loopback), None);
        assert_eq!(link_bytes_per_s(IpAddr::from([192, 0, 2, 77])), None);
    }

    #[test]
    fn a_speed_is_megabits_per_second() {
        let folder = tempfile::tempdir().expect("a folder");
        let cases = [("10000\n", Some(1_250_000_000)), ("-1\n", None), ("0\n", None), ("x", None)];
        for (text, speed) in cases {
            std::fs::write(folder.path().join("speed"), text).expect("the folder takes it");
            assert_eq!(speed_of(folder.path()), speed, "{text:?}");
        }
        assert_eq!(speed_of(Path::new("/nowhere")), None);
    }
}
