//! Two hosts back to back: a blade on one, a program on the other.

use std::path::Path;
use std::process::Command;

use farpool_hosts::{Hosts, HostsBuilder, Wiring};

/// The blade's address.
pub const BLADE_IP: &str = "192.0.2.1";

/// The two hosts; they and the processes on them end when it is dropped.
#[derive(Debug)]
pub struct Network {
    hosts: Hosts,
}

impl Network {
    /// Creates the hosts. Returns None, with a visible reason, if that cannot be done.
    pub fn make() -> Option<Network> {
        let hosts = make(Hosts::builder(2, Wiring::Direct))?;
        assert_eq!(hosts[0].address().to_string(), BLADE_IP);
        Some(Network { hosts })
    }

    /// A command that runs a program on the blade's side.
    pub fn blade_side(&self, program: &Path) -> Command {
        self.hosts[0].command(program)
    }

    /// A command that runs a program on the other side.
    pub fn program_side(&self, program: &Path) -> Command {
        self.hosts[1].command(program)
    }

    /// Takes the link down, or up again.
    pub fn link(&self, up: bool) {
        self.hosts[0].set_link(up).expect("ip link");
    }
}

/// Creates hosts. Returns None, with a visible reason, if that cannot be done.
pub fn make(hosts: HostsBuilder) -> Option<Hosts> {
    hosts.make().map_err(|reason| crate::skip(&reason.to_string())).ok()
}
