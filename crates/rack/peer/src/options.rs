//! How a node takes part, and why it does not.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use farpool_acms::{Arbitration, ConfigError, Thresholds};
use farpool_blade::ServeError;
use farpool_http::bearer::is_token;

/// A node's settings.
#[derive(Clone, Debug)]
pub struct CollaborateOptions {
    /// Nodes of one cluster lend each other memory.
    pub cluster: String,
    /// The name of this node: the same over restarts, and no other node's.
    pub name: String,
    /// Where datagrams (UDP) and the blade (TCP) listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where the blade listens, if elsewhere.
    pub blade_listen: Option<SocketAddr>,
    /// Where others reach this node, if not where it listens; the ports are those it listens on.
    pub advertise: Option<IpAddr>,
    /// The blade's socket for programs of this node.
    pub socket: PathBuf,
    /// Nodes to greet, `host:port`.
    pub join: Vec<String>,
    /// Where it stands; see [`farpool_acms::Zone`].
    pub zone: u32,
    /// When it lends and when it borrows.
    pub thresholds: Thresholds,
    /// Whom it chooses.
    pub arbitration: Arbitration,
    /// How long what it lends stands without a renewal.
    pub lease: Duration,
    /// How long others have to move out when it needs its memory.
    pub reclaim_deadline: Duration,
    /// Where its programs and people connect.
    pub rest: SocketAddr,
    /// What they must present.
    pub token: Option<String>,
    /// Permits a REST address beyond loopback, where others can read what is said; needs a token,
    /// too.
    pub allow_remote_rest: bool,
    /// Permits datagrams and pages beyond loopback, which are not encrypted.
    pub allow_remote_tcp: bool,
    /// Remembers the last life, so that a clock that went back changes nothing.
    pub state_file: Option<PathBuf>,
    /// How long a node that ends waits until what it lends has come back.
    pub drain_timeout: Duration,
}

/// Why a node does not run.
#[derive(Debug, thiserror::Error)]
pub enum CollaborateError {
    /// A name of nothing.
    #[error("the {0} is empty; give it a name")]
    NoName(&'static str),
    /// Reached from elsewhere.
    #[error(
        "{0} can be reached from other machines; nothing there is encrypted and nobody is asked \
         who he is, so allow it explicitly if the network is trusted"
    )]
    RemoteTcp(SocketAddr),
    /// Others could read what is said.
    #[error(
        "the REST address {0} can be reached from other machines; allow that explicitly if you want it"
    )]
    RemoteDoor(SocketAddr),
    /// Anybody could use this node.
    #[error("the REST address {0} can be reached from other machines; give it a token")]
    NoToken(SocketAddr),
    /// An empty token protects nothing, and other characters do not fit a header.
    #[error("the token must be 1 or more visible ASCII characters")]
    BadToken,
    /// Others would be told an address that none is.
    #[error("others cannot reach this node at {0}; say at which address they can (--advertise)")]
    NoAdvertise(SocketAddr),
    /// A setting of the protocol.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address is taken, or not this machine's.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The blade does not start.
    #[error("the blade cannot be started")]
    Blade(#[from] ServeError),
    /// The node's memory is not known.
    #[error("the node's memory cannot be looked at")]
    Memory(#[source] std::io::Error),
    /// The last life is not known.
    #[error("the state file {path} cannot be used")]
    StateFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The machine does not give what is needed.
    #[error("the node cannot run")]
    Io(#[from] std::io::Error),
}

impl CollaborateOptions {
    /// Whether a node can run with these.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn check(&self) -> Result<(), CollaborateError> {
        for (what, name) in [("cluster", &self.cluster), ("node", &self.name)] {
            if name.is_empty() {
                return Err(CollaborateError::NoName(what));
            }
        }
        if self.token.as_deref().is_some_and(|token| !is_token(token)) {
            return Err(CollaborateError::BadToken);
        }
        if !self.rest.ip().is_loopback() {
            if self.token.is_none() {
                return Err(CollaborateError::NoToken(self.rest));
            }
            if !self.allow_remote_rest {
                return Err(CollaborateError::RemoteDoor(self.rest));
            }
        }
        for address in std::iter::once(self.listen).chain(self.blade_listen) {
            if !address.ip().is_loopback() && !self.allow_remote_tcp {
                return Err(CollaborateError::RemoteTcp(address));
            }
            if self.advertised_ip(address).is_unspecified() {
                return Err(CollaborateError::NoAdvertise(address));
            }
        }
        Ok(())
    }

    /// Where others reach the listener there.
    pub(crate) fn advertised_ip(&self, listen: SocketAddr) -> IpAddr {
        self.advertise.unwrap_or_else(|| listen.ip())
    }
}
