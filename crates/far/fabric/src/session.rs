//! Who we are to a blade, and why it could not be reached.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use farpool_wire::{Address, ClientId, ErrorCode, Grant, Purpose};
use rustix::io::Errno;

use crate::descriptor::DescriptorSet;
use crate::limits::ClientLimits;

/// One client's dealings with one blade: what every connection of it has in common.
#[derive(Clone, Debug)]
pub struct Session {
    /// Where the blade is.
    pub address: Address,
    /// The client's name to the blade.
    pub client: ClientId,
    /// The client's name to people; cut to what the protocol holds.
    pub client_name: String,
    /// The grant of memory that the client shows, on a blade that asks for one.
    pub grant: Option<Grant>,
    /// How fast the client asks, at most; requests over it wait until they may be sent, and their
    /// deadline begins then. To be no more than what the blade grants: a request that waits there
    /// is one without an answer.
    pub limits: Option<Arc<ClientLimits>>,
    /// What the connections are for.
    pub purpose: Purpose,
    /// The memory the client would like at most, in bytes; counts when the blade first sees the
    /// client.
    pub quota_bytes: u64,
    /// A request older than this means that the blade is lost.
    pub deadline: Duration,
    /// Permits TCP to other hosts, which is not encrypted.
    pub allow_remote_tcp: bool,
    /// Who opens the connections in this process's stead, if somebody does.
    pub asks: Option<Ask>,
    /// Where the connections' descriptors are kept.
    pub descriptors: Arc<DescriptorSet>,
}

/// Why there is no connection to a blade. Each message names the blade and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// It cannot be reached, or not any more.
    #[error("blade {address} is lost: {reason}; check that it runs and can be reached")]
    Lost {
        /// The blade's address.
        address: String,
        /// What happened.
        reason: String,
    },
    /// It may be there, but who opens the connection may not.
    #[error(
        "user {user} may not connect to blade {address} ({reason}): open its socket and the \
         folders above it to that user (chmod, or a group), or run farpool as one who may"
    )]
    Forbidden {
        /// The blade's address.
        address: String,
        /// Who asks.
        user: u32,
        /// What the kernel said.
        reason: String,
    },
    /// Whoever opens the connections was not told of it.
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
        /// Why.
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
    /// The blade behind a unix socket is run by somebody whom this user did not choose.
    #[error(
        "blade {address} is run by user {owner}, neither root nor this user ({user}), and could \
         read the memory: have it listen in a folder that is user {owner}'s and that nobody else \
         may write to, if that blade is meant"
    )]
    Stranger {
        /// The blade's address.
        address: String,
        /// Who runs it.
        owner: u32,
        /// Who asks.
        user: u32,
    },
    /// This process may hold no more descriptors.
    #[error("no descriptor is left for a connection to blade {address}; raise `ulimit -n`")]
    Descriptors {
        /// The blade's address.
        address: String,
    },
}

/// Asks for a connection to an address; the answer comes on the socket. None: nobody is there any
/// more who could be asked, and the connection is opened here.
pub type Ask = fn(&Address) -> Result<Option<OwnedFd>, Errno>;
