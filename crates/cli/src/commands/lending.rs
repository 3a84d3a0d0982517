//! What a node that lends memory is told, with a controller or without one.

use std::time::Duration;

use farpool_policy::donor_protection::BUSY_BYTES_PER_S_PER_PROCESSOR;
use farpool_wire::Address;

use crate::args::NodeSettings;
use crate::commands::refuse_remote;
use crate::values::{BusyRate, Patience};

/// Where its blade listens if nothing is said: this machine only.
const LISTEN_DEFAULT: &str = "tcp://127.0.0.1:7070";

/// How long segments may take to move away at the end: some GiB over 10 Gb/s, well within the 90 s
/// that systemd gives a service to stop.
const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Where it listens, if that is allowed.
pub(super) fn listen(settings: &NodeSettings) -> anyhow::Result<Vec<Address>> {
    refuse_remote(&settings.listen, settings.allow_remote_tcp)?;
    let mut listen: Vec<Address> = settings.listen.iter().map(|at| at.0.clone()).collect();
    if listen.is_empty() {
        listen.push(LISTEN_DEFAULT.parse()?);
    }
    Ok(listen)
}

/// Bytes a second and processor that are served while this host's own programs use all processors.
pub(super) fn busy_rate(settings: &NodeSettings) -> u64 {
    settings.busy_rate.map_or(BUSY_BYTES_PER_S_PER_PROCESSOR, |BusyRate(bytes_per_s)| bytes_per_s)
}

pub(super) fn drain_timeout(settings: &NodeSettings) -> Duration {
    settings.drain_timeout.map_or(DRAIN_TIMEOUT_DEFAULT, |Patience(time)| time)
}

pub(super) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
