//! The hosts themselves: made together, wired one way, taken down together.
//!
//! Every host has an interface `eth0` with an address of 192.0.2.0/24 (set aside for
//! documentation). Except with direct wiring, the other ends of the links are in a namespace of
//! their own, the hub, as interfaces `port0`, `port1` and so on: host N is on port N. A host that
//! also has links to a switch has them joined as `data0` (see `wiring`).

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::cgroup::Cgroup;
use crate::janitor::Janitor;
use crate::link::{self, LinkCounters};
use crate::wiring::{self, INTERFACE, Wiring, port};
use crate::{HostsError, Namespace};

/// Most hosts on one network: far below the 254 addresses of a /24. More are refused.
pub const MAX_HOSTS: usize = 64;
/// Most links of a host to a switch. More are refused.
pub const MAX_SWITCH_LINKS: usize = 8;

/// Which hosts to make.
#[derive(Clone, Debug)]
pub struct HostsBuilder {
    count: usize,
    wiring: Wiring,
    memory_limit_bytes: Option<u64>,
}

/// Hosts on one network. The hosts end, with all that runs in them, when this is dropped or when
/// this process ends.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<Host>,
    switch: Option<SwitchSide>,
    // Nothing runs in the hub of a bridge, but its bridge does.
    _hubs: Vec<Namespace>,
    // Last: waits until everything above has ended.
    _janitor: Janitor,
}

/// One host.
#[derive(Debug)]
pub struct Host {
    name: String,
    address: Ipv4Addr,
    data_address: Option<Ipv4Addr>,
    namespace: Namespace,
    group: Option<HostGroup>,
}

/// A host's control group and the file by which processes join it.
#[derive(Debug)]
struct HostGroup {
    members: Arc<File>,
    group: Cgroup,
}

/// Where the hosts' links end when a switch is to join them.
#[derive(Debug)]
pub struct SwitchSide {
    namespace: Namespace,
    ports: Vec<String>,
    /// Ports of each host.
    links: usize,
}

impl HostsBuilder {
    /// A memory control group with this limit for each host; without it hosts share the machine's
    /// memory.
    #[must_use]
    pub fn memory_limit_bytes(mut self, bytes: u64) -> Self {
        self.memory_limit_bytes = Some(bytes);
        self
    }

    /// Makes the hosts.
    ///
    /// # Errors
    /// This machine lacks something or does not permit it; nothing is left behind then.
    pub fn make(self) -> Result<Hosts, HostsError> {
        self.check()?;
        let namespaces =
            (0..self.count).map(|_| Namespace::make()).collect::<Result<Vec<_>, _>>()?;
        let hubs = wiring::hubs(self.wiring)?;
        let groups = self.group_names();
        let folders = groups.iter().map(|name| Cgroup::folder_of(name));
        let folders = folders.collect::<Result<Vec<PathBuf>, _>>()?;
        let all: Vec<_> = namespaces.iter().chain(&hubs).cloned().collect();
        let janitor = Janitor::start(&all, &folders)?;
        wiring::wire(self.wiring, &namespaces, &hubs)?;
        let has_data = matches!(self.wiring, Wiring::BridgeAndSwitch { .. });
        let mut hosts = Vec::with_capacity(self.count);
        for (index, namespace) in namespaces.into_iter().enumerate() {
            let limit = self.memory_limit_bytes.zip(groups.get(index));
            let group = limit.map(|(bytes, name)| HostGroup::make(name, bytes)).transpose()?;
            let data_address = has_data.then(|| wiring::data_address(index));
            let address = wiring::address(index);
            hosts.push(Host { name: name(index), address, data_address, namespace, group });
        }
        let links = self.wiring.switch_links();
        let switch = hubs.last().filter(|_| links > 0).map(|hub| SwitchSide {
            namespace: hub.clone(),
            ports: (0..self.count * links).map(port).collect(),
            links,
        });
        Ok(Hosts { hosts, switch, _hubs: hubs, _janitor: janitor })
    }

    fn check(&self) -> Result<(), HostsError> {
        let reason = match (self.wiring, self.count) {
            (_, 0) => "there must be one",
            (_, count) if count > MAX_HOSTS => "a network has at most 64",
            (Wiring::Direct, count) if count != 2 => "a direct link has two ends",
            (Wiring::BridgeAndSwitch { links }, _) if !(1..=MAX_SWITCH_LINKS).contains(&links) => {
                "each has from 1 to 8 links to the switch"
            }
            _ => return Ok(()),
        };
        Err(HostsError::Count { asked: self.count, reason })
    }

    /// Names that no other hosts on this machine have.
    fn group_names(&self) -> Vec<String> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let (serial, process) = (SERIAL.fetch_add(1, Relaxed), std::process::id());
        let hosts = 0..self.memory_limit_bytes.map_or(0, |_| self.count);
        hosts.map(|index| format!("farpool-host-{index}-{serial}-{process}")).collect()
    }
}

impl Hosts {
    /// Describes `count` hosts with this wiring; [`HostsBuilder::make`] makes them.
    #[must_use]
    pub fn builder(count: usize, wiring: Wiring) -> HostsBuilder {
        HostsBuilder { count, wiring, memory_limit_bytes: None }
    }

    /// A host, counted from 0. None beyond the last.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&Host> {
        self.hosts.get(index)
    }

    /// All of them, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Host> {
        self.hosts.iter()
    }

    /// How many hosts there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Never true: there is always a host.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Where the hosts' links end, if they are wired for a switch.
    #[must_use]
    pub fn switch(&self) -> Option<&SwitchSide> {
        self.switch.as_ref()
    }
}

impl std::ops::Index<usize> for Hosts {
    type Output = Host;

    fn index(&self, index: usize) -> &Host {
        &self.hosts[index]
    }
}

impl<'a> IntoIterator for &'a Hosts {
    type Item = &'a Host;
    type IntoIter = std::slice::Iter<'a, Host>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Host {
    /// `A` for the first, `B` for the second, and so on; from the 27th `A1`, `B1`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its second address, on the network of the switch, if it has one.
    #[must_use]
    pub fn data_address(&self) -> Option<Ipv4Addr> {
        self.data_address
    }

    /// A command that runs a program on this host, in its control group if it has one.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let members = self.group.as_ref().map(|group| Arc::clone(&group.members));
        self.namespace.command_in_group(program, members)
    }

    /// Runs `work` on a thread of this process that is in the host's namespace: for sockets.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R, HostsError> {
        self.namespace.enter(work)
    }

    /// Takes its link down, or up again. Additional links to a switch stay as they are.
    ///
    /// # Errors
    /// `ip` refuses.
    pub fn set_link(&self, up: bool) -> Result<(), HostsError> {
        let state = if up { "up" } else { "down" };
        link::ip(&self.namespace, "set a link", &[format!("link set {INTERFACE} {state}")])
    }

    /// The traffic of its link. The traffic of links to a switch is in [`SwitchSide::counters`].
    ///
    /// # Errors
    /// They cannot be read.
    pub fn counters(&self) -> Result<LinkCounters, HostsError> {
        link::counters(&self.namespace, INTERFACE)
    }

    /// Its control group, if it has one.
    #[must_use]
    pub fn group(&self) -> Option<&Cgroup> {
        self.group.as_ref().map(|group| &group.group)
    }
}

impl HostGroup {
    fn make(name: &str, limit_bytes: u64) -> Result<Self, HostsError> {
        let group = Cgroup::with_limit(name, limit_bytes)?;
        let members = OpenOptions::new().write(true).open(group.members_file());
        let members = members.map_err(HostsError::os("open a control group"))?;
        Ok(Self { members: Arc::new(members), group })
    }
}

impl SwitchSide {
    /// The switch's interfaces, host 0's first.
    #[must_use]
    pub fn ports(&self) -> &[String] {
        &self.ports
    }

    /// The numbers of the ports that a host, counted from 0, is on.
    #[must_use]
    pub fn ports_of(&self, host: usize) -> Range<usize> {
        host * self.links..(host + 1) * self.links
    }

    /// A command that runs a program in the switch's namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.namespace.command(program)
    }

    /// Runs `work` on a thread of this process that is in the switch's namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> Result<R, HostsError> {
        self.namespace.enter(work)
    }

    /// The traffic of a port's interface, seen from the switch: what the port received, its host
    /// sent.
    ///
    /// # Errors
    /// There is no such port, or the counters cannot be read.
    pub fn counters(&self, index: usize) -> Result<LinkCounters, HostsError> {
        link::counters(&self.namespace, &port(index))
    }
}

fn name(index: usize) -> String {
    let letter = (b'A'..=b'Z').cycle().nth(index).map_or('?', char::from);
    let round = index / 26;
    if round == 0 { letter.to_string() } else { format!("{letter}{round}") }
}
