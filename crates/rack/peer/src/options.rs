//! A node's settings, and why a node does not run.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use farpool_acms::{Arbitration, ConfigError, Thresholds};
use farpool_blade::ServeError;
use farpool_http::tls::Tls;
use farpool_http::{Protection, Unprotected};

use crate::RackKeyError;

/// A node's settings.
#[derive(Clone, Debug)]
pub struct CollaborateOptions {
    /// Name of the cluster: nodes of one cluster lend each other memory.
    pub cluster: String,
    /// Name of this node: unique in the cluster, and the same after restarts.
    pub name: String,
    /// Where datagrams (UDP) and the blade (TCP) listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where the blade listens, if elsewhere.
    pub blade_listen: Option<SocketAddr>,
    /// Address at which others reach this node, if not the one on which it listens; the ports are
    /// the same.
    pub advertise: Option<IpAddr>,
    /// The blade's socket for programs of this node.
    pub socket: PathBuf,
    /// Nodes to greet, `host:port`.
    pub join: Vec<String>,
    /// The node's zone; see [`farpool_acms::Zone`].
    pub zone: u32,
    /// The use of memory at which it lends and at which it borrows.
    pub thresholds: Thresholds,
    /// How it orders competing nodes.
    pub arbitration: Arbitration,
    /// How long a grant that it makes lasts without a renewal.
    pub lease: Duration,
    /// How long others have to move out when it needs its memory.
    pub reclaim_deadline: Duration,
    /// Address of the REST interface, for its programs and for people.
    pub rest: SocketAddr,
    /// Who may ask over REST, and how they prove who they are.
    pub protection: Protection,
    /// Permits datagrams and pages beyond loopback, which are not encrypted.
    pub allow_remote_tcp: bool,
    /// Control requests that the blade carries out in a second for the programs under one grant;
    /// [`farpool_blade::BladeConfig::control_requests_per_s`].
    pub control_requests_per_s: u64,
    /// File with the rack key, which all nodes of the cluster share.
    pub rack_key_file: Option<PathBuf>,
    /// Permits datagrams beyond loopback without a rack key: anyone there can borrow memory and
    /// take it from others.
    pub insecure: bool,
    /// The most that one borrower may have, percent of what this node would lend in all.
    pub borrower_percent: u8,
    /// How long lent memory may hold no data until it is taken back.
    pub unused: Duration,
    /// File with the number of the last life, so that a clock that is set back does no harm.
    pub state_file: Option<PathBuf>,
    /// How long an ending node waits until its memory has been given back and its programs have
    /// ended.
    pub drain_timeout: Duration,
}

/// Why a node does not run.
#[derive(Debug, thiserror::Error)]
pub enum CollaborateError {
    /// The name of the cluster or node is empty.
    #[error("the {0} is empty; give it a name")]
    NoName(&'static str),
    /// A listening address is beyond loopback, which is not permitted.
    #[error(
        "{0} can be reached from other machines; nothing there is encrypted, so allow it \
         explicitly if the network is trusted"
    )]
    RemoteTcp(SocketAddr),
    /// A listening address is beyond loopback, and there is no rack key.
    #[error(
        "{0} can be reached from other machines and there is no rack key: give --rack-key-file, \
         or --insecure if everybody there may borrow memory and take it from others"
    )]
    NoRackKey(SocketAddr),
    /// The file with the rack key is not used.
    #[error(transparent)]
    RackKey(#[from] RackKeyError),
    /// The REST address is beyond loopback, and nothing there would be encrypted.
    #[error(
        "the REST address {0} can be reached from other machines, and whoever is on the way could \
         read and change what is asked; give --pki DIR (farpool pki issue), or --allow-remote-rest \
         and --token-file if that is what you want"
    )]
    RemoteDoor(SocketAddr),
    /// The REST interface would not be protected as it should be.
    #[error("the REST address: {0}")]
    Unprotected(#[source] Unprotected),
    /// The address given to others would be an unspecified one.
    #[error("others cannot reach this node at {0}; say at which address they can (--advertise)")]
    NoAdvertise(SocketAddr),
    /// A setting of the protocol is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address is in use, or not this machine's.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The blade does not start.
    #[error("the blade cannot be started")]
    Blade(#[from] ServeError),
    /// The node's memory cannot be sampled.
    #[error("the node's memory cannot be looked at")]
    Memory(#[source] std::io::Error),
    /// The number of the last life cannot be read or stored.
    #[error("the state file {path} cannot be used")]
    StateFile {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system refused a socket, a thread or the like.
    #[error("the node cannot run")]
    Io(#[from] std::io::Error),
}

impl CollaborateOptions {
    /// Checks whether a node can run with these options.
    ///
    /// # Errors
    /// Says which option is wrong.
    pub fn check(&self) -> Result<(), CollaborateError> {
        for (what, name) in [("cluster", &self.cluster), ("node", &self.name)] {
            if name.is_empty() {
                return Err(CollaborateError::NoName(what));
            }
        }
        self.rest_tls()?;
        for address in std::iter::once(self.listen).chain(self.blade_listen) {
            let is_secure = self.protection.credentials.is_some();
            if !address.ip().is_loopback() && !is_secure && !self.allow_remote_tcp {
                return Err(CollaborateError::RemoteTcp(address));
            }
            if self.advertised_ip(address).is_unspecified() {
                return Err(CollaborateError::NoAdvertise(address));
            }
            let is_guarded = self.rack_key_file.is_some() || self.insecure;
            if !address.ip().is_loopback() && !is_guarded {
                return Err(CollaborateError::NoRackKey(address));
            }
        }
        Ok(())
    }

    /// Returns what the REST interface needs to speak TLS, or None to serve in the clear.
    pub(crate) fn rest_tls(&self) -> Result<Option<Arc<Tls>>, CollaborateError> {
        self.protection.check(&[self.rest]).map_err(|error| match error {
            Unprotected::Clear(address) => CollaborateError::RemoteDoor(address),
            other => CollaborateError::Unprotected(other),
        })
    }

    /// Returns the address at which others reach the listener at `listen`.
    pub(crate) fn advertised_ip(&self, listen: SocketAddr) -> IpAddr {
        self.advertise.unwrap_or_else(|| listen.ip())
    }
}
