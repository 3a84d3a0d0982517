//! The connections of the hosts: links, bridges, and the ports of a switch.
//!
//! A host with links to a switch *besides* a bridge has all of them in a bridge of its own,
//! `data0`, with one address, so that it need not know which of its links leads where: it learns
//! that, as a bridge does. Nothing passes from one of these links to another, because a host is not
//! a switch; so two circuits between the same two hosts make no loop.

use std::net::Ipv4Addr;

use farpool_units::exactly;

use crate::link;
use crate::{HostsError, Namespace};

/// A host's interface.
pub(crate) const INTERFACE: &str = "eth0";
/// The bridge that joins a host's links to a switch, if it also has an interface to a bridge.
const DATA: &str = "data0";
/// How long such a host assumes that a sender is still behind the link that it used, in hundredths
/// of a second: circuits change, and with the kernel's usual 300 s the host would then send to
/// nobody.
const LEARNED_CENTISECONDS: u32 = 500;
/// The bridge of a packet network, in the hub.
const BRIDGE: &str = "bridge0";

/// What the hosts' links end in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wiring {
    /// Two hosts, back to back.
    Direct,
    /// A kernel bridge: any host reaches any other.
    Bridge,
    /// The ports of a switch that a program has yet to be: see [`crate::Hosts::switch`]. Until then
    /// no host reaches any other.
    Switch,
    /// A kernel bridge for managing the hosts ([`crate::Host::address`]) and, besides, this many
    /// links of each host to a switch, for data ([`crate::Host::data_address`]).
    BridgeAndSwitch {
        /// Links of each host, 1 to [`crate::MAX_SWITCH_LINKS`].
        links: usize,
    },
}

impl Wiring {
    /// A host's links to the switch.
    pub(crate) fn switch_links(self) -> usize {
        match self {
            Wiring::Direct | Wiring::Bridge => 0,
            Wiring::Switch => 1,
            Wiring::BridgeAndSwitch { links } => links,
        }
    }
}

/// Makes the namespaces in which the hosts' links end. That of a switch is the last.
pub(crate) fn hubs(wiring: Wiring) -> Result<Vec<Namespace>, HostsError> {
    let count = match wiring {
        Wiring::Direct => 0,
        Wiring::Bridge | Wiring::Switch => 1,
        Wiring::BridgeAndSwitch { .. } => 2,
    };
    (0..count).map(|_| Namespace::make()).collect()
}

/// Makes all links, and gives the hosts their addresses.
pub(crate) fn wire(
    wiring: Wiring,
    hosts: &[Namespace],
    hubs: &[Namespace],
) -> Result<(), HostsError> {
    match (wiring, hubs, hosts) {
        (Wiring::Bridge, [hub], _) => link::ip(hub, "wire the hosts", &bridge(hosts))?,
        (Wiring::Switch, [hub], _) => {
            let lines = hosts.iter().enumerate().flat_map(|(at, host)| plug(at, host, INTERFACE));
            link::ip(hub, "wire the hosts", &lines.collect::<Vec<_>>())?;
        }
        (Wiring::BridgeAndSwitch { links }, [hub, switch], _) => {
            link::ip(hub, "wire the hosts", &bridge(hosts))?;
            let all = hosts.iter().flat_map(|host| (0..links).map(move |at| (host, data_link(at))));
            let lines = all.enumerate().flat_map(|(at, (host, name))| plug(at, host, &name));
            link::ip(switch, "wire the hosts to the switch", &lines.collect::<Vec<_>>())?;
        }
        (_, _, [one, other]) => {
            link::ip(one, "wire the hosts", &[veth(INTERFACE, other, INTERFACE)])?;
        }
        _ => {}
    }
    for (index, host) in hosts.iter().enumerate() {
        let mut lines = vec!["link set lo up".to_owned()];
        lines.extend(addressed(INTERFACE, address(index)));
        if let Wiring::BridgeAndSwitch { links } = wiring {
            lines.extend(data_lines(index, links));
        }
        link::ip(host, "set a host up", &lines)?;
    }
    hosts.iter().chain(hubs).try_for_each(link::await_active)
}

/// Returns the commands that connect all hosts to one bridge in the hub.
fn bridge(hosts: &[Namespace]) -> Vec<String> {
    let mut lines = vec![format!("link add {BRIDGE} type bridge"), format!("link set {BRIDGE} up")];
    for (index, host) in hosts.iter().enumerate() {
        lines.extend(plug(index, host, INTERFACE));
        lines.push(format!("link set {} master {BRIDGE}", port(index)));
    }
    lines
}

/// Returns the commands for a link from a port of the hub to a host's interface.
fn plug(index: usize, host: &Namespace, interface: &str) -> [String; 2] {
    let port = port(index);
    [veth(&port, host, interface), format!("link set {port} up")]
}

/// Returns the commands that join a host's links to the switch to one interface with one address.
fn data_lines(host: usize, links: usize) -> Vec<String> {
    let ageing = LEARNED_CENTISECONDS;
    let mut lines = vec![format!("link add {DATA} type bridge ageing_time {ageing}")];
    for name in (0..links).map(data_link) {
        lines.push(format!("link set {name} master {DATA}"));
        lines.push(format!("link set {name} type bridge_slave isolated on"));
        lines.push(format!("link set {name} up"));
    }
    lines.extend(addressed(DATA, data_address(host)));
    lines
}

fn addressed(interface: &str, address: Ipv4Addr) -> [String; 2] {
    [format!("address add {address}/24 dev {interface}"), format!("link set {interface} up")]
}

fn veth(name: &str, host: &Namespace, interface: &str) -> String {
    format!("link add {name} type veth peer name {interface} netns {}", host.path())
}

fn data_link(index: usize) -> String {
    format!("eth{}", index + 1)
}

/// A port's interface in the hub.
pub(crate) fn port(index: usize) -> String {
    format!("port{index}")
}

/// A host's address.
pub(crate) fn address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, last_byte(index))
}

/// A host's address on the network of the switch; 198.51.100.0/24 is set aside for documentation,
/// too.
pub(crate) fn data_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 51, 100, last_byte(index))
}

fn last_byte(index: usize) -> u8 {
    // At most MAX_HOSTS, as checked.
    exactly(index + 1)
}
