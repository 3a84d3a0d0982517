//! Our identity to a blade, and why it could not be reached.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use farpool_wire::{Address, ClientId, ErrorCode, Grant, Purpose};
use rustix::io::Errno;

use crate::descriptor::DescriptorSet;
use crate::limits::ClientLimits;

/// One client's use of one blade: what all its connections have in common.
#[derive(Clone, Debug)]
pub struct Session {
    /// Where the blade is.
    pub address: Address,
    /// The client's id on the blade.
    pub client: ClientId,
    /// The client's name for display; cut to the protocol's limit.
    pub client_name: String,
    /// The grant of memory that the client shows, on a blade that requires one.
    pub grant: Option<Grant>,
    /// Limits on the client's request rate; requests over it wait until they may be sent, and their
    /// deadline begins then. To be no more than what the blade grants: a request that waits there
    /// counts as unanswered.
    pub limits: Option<Arc<ClientLimits>>,
    /// What the connections are for.
    pub purpose: Purpose,
    /// The most memory that the client would like, in bytes; counts when the blade first sees the
    /// client.
    pub quota_bytes: u64,
    /// A request older than this means that the blade is lost.
    pub deadline: Duration,
    /// Permits TCP to other hosts, which is not encrypted.
    pub allow_remote_tcp: bool,
    /// Opens the connections in this process's stead, if set.
    pub asks: Option<Ask>,
    /// The set that holds the connections' descriptors.
    pub descriptors: Arc<DescriptorSet>,
}

/// Why there is no connection to a blade. Each message names the blade and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// It cannot be reached, or no longer.
    #[error("blade {address} is lost: {reason}; check that it runs and can be reached")]
    Lost {
        /// The blade's address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// It may be there, but the user that opens the connection may not use it.
    #[error(
        "user {user} may not connect to blade {address} ({reason}): open its socket and the \
         folders above it to that user (chmod, or a group), or run farpool as one who may"
    )]
    Forbidden {
        /// The blade's address.
        address: String,
        /// The user that connects.
        user: u32,
        /// The kernel's error.
        reason: String,
    },
    /// The process that opens connections does not know this blade.
    #[error(
        "blade {address} is none of those that farpool was given, and it connects this program to \
         no others; name it with --blade, or add it with `farpool blades --add`"
    )]
    NotMeant {
        /// The blade's address.
        address: String,
    },
    /// It can be reached but refuses this client.
    #[error("blade {address} refuses this client: {code}")]
    Refused {
        /// The blade's address.
        address: String,
        /// The reason.
        code: ErrorCode,
    },
    /// A TCP address beyond loopback without permission.
    #[error(
        "blade {address} is on another host and TCP is not encrypted; allow remote TCP explicitly \
         if you mean it"
    )]
    RemoteTcp {
        /// The blade's address.
        address: String,
    },
    /// The blade behind a unix socket is run by a user that this user did not choose.
    #[error(
        "blade {address} is run by user {owner}, neither root nor this user ({user}), and could \
         read the memory: have it listen in a folder that is user {owner}'s and that nobody else \
         may write to, if that blade is meant"
    )]
    Stranger {
        /// The blade's address.
        address: String,
        /// The user that runs it.
        owner: u32,
        /// The user that connects.
        user: u32,
    },
    /// This process may hold no more descriptors.
    #[error("no descriptor is left for a connection to blade {address}; raise `ulimit -n`")]
    Descriptors {
        /// The blade's address.
        address: String,
    },
}

/// Asks for a connection to an address; the answer arrives on the socket. None if there is no
/// process left to ask, and the connection is opened here.
pub type Ask = fn(&Address) -> Result<Option<OwnedFd>, Errno>;
