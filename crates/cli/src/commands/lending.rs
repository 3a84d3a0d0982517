//! Settings of a node that lends memory, with a controller or without one.

use std::time::Duration;

use farpool_blade::BladeConfig;
use farpool_identity::{Credentials, Role};
use farpool_policy::donor_protection::BUSY_BYTES_PER_S_PER_PROCESSOR;
use farpool_wire::Address;

use crate::args::NodeSettings;
use crate::commands::refuse_remote;
use crate::values::{BusyRate, ControlRate, Patience};

/// Default address of its blade: this machine only.
const LISTEN_DEFAULT: &str = "tcp://127.0.0.1:7070";

/// How long segments may take to move away at the end: some GiB over 10 Gb/s, well within the 90 s
/// that systemd gives a service to stop.
const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Returns the addresses to listen on, if they are allowed.
pub(super) fn listen(settings: &NodeSettings) -> anyhow::Result<Vec<Address>> {
    let is_allowed = settings.allow_remote_tcp == Some(true) || settings.pki.is_some();
    refuse_remote(&settings.listen, Some(is_allowed))?;
    let mut listen: Vec<Address> = settings.listen.iter().map(|at| at.0.clone()).collect();
    if listen.is_empty() {
        listen.push(LISTEN_DEFAULT.parse()?);
    }
    Ok(listen)
}

/// Bytes per second and processor to serve while this host's own programs use all processors.
pub(super) fn busy_rate(settings: &NodeSettings) -> u64 {
    settings.busy_rate.map_or(BUSY_BYTES_PER_S_PER_PROCESSOR, |BusyRate(bytes_per_s)| bytes_per_s)
}

/// Control requests a second that its blade carries out for those under one grant.
pub(super) fn control_requests_per_s(settings: &NodeSettings) -> u64 {
    let default = BladeConfig::default().control_requests_per_s;
    settings.control_rate.map_or(default, |ControlRate(rate)| rate)
}

pub(super) fn drain_timeout(settings: &NodeSettings) -> Duration {
    settings.drain_timeout.map_or(DRAIN_TIMEOUT_DEFAULT, |Patience(time)| time)
}

/// Returns a node's name if none is given: that of its certificate, as which alone it may speak.
pub(super) fn own_name(credentials: Option<&Credentials>) -> String {
    match credentials.map(|it| it.identity().role) {
        Some(Role::Node(name)) => name.to_string(),
        _ => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    }
}
