//! What a node wants done: datagrams to send and actions for the shell, in order.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use crate::classify::Class;
use crate::config::Config;
use crate::ids::{ClusterId, GrantId, GrantKey, Incarnation, NodeId, Peer};
use crate::message::{Header, Message};
use crate::rack_key::RackKeys;
use crate::ratio::Side;

/// Why a server's memory came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RevokeReason {
    /// The client has moved out.
    Released,
    /// The reclaim's deadline passed.
    Deadline,
    /// The client stopped renewing.
    LeaseEnded,
    /// The client is in a new life.
    ClientRestarted,
}

/// Why a client has to move out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveReason {
    /// The server reclaims; there is a deadline.
    Reclaimed,
    /// The client needs less; no hurry.
    NotNeeded,
}

/// What the shell has to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Lender: the blade has to serve this grant.
    GrantMade {
        /// The grant.
        grant: GrantId,
        /// The client that receives it.
        client: Peer,
        /// Bytes granted.
        bytes: u64,
        /// Key that the client will present with the grant's epoch.
        key: GrantKey,
    },
    /// Borrower: the blade at `blade` may be added to the pool.
    GrantUsable {
        /// The grant; its epoch is the fencing number.
        grant: GrantId,
        /// Address of the blade.
        blade: SocketAddr,
        /// Key to present.
        key: GrantKey,
        /// Bytes granted.
        bytes: u64,
    },
    /// Borrower: move the data to another grant, to local memory or, as a last resort, to a spill
    /// file, then call `on_evacuated`. Repeated with a deadline if the server reclaims a grant that
    /// is being moved out of without one.
    MoveOut {
        /// The grant.
        grant: GrantId,
        /// Time at which the memory is gone in any case, on the node's clock.
        deadline: Option<Duration>,
        /// The reason.
        reason: MoveReason,
    },
    /// Lender: take the memory back now; the blade refuses this epoch from here on.
    Revoke {
        /// The grant.
        grant: GrantId,
        /// The reason.
        reason: RevokeReason,
    },
    /// Borrower: the memory is gone, with all data still in it.
    GrantLost {
        /// The grant.
        grant: GrantId,
    },
    /// The node's class changed.
    ClassChanged {
        /// The former class.
        from: Class,
        /// The new class.
        to: Class,
    },
    /// By the node's estimate, the other side broadcasts now.
    SideChanged {
        /// The side that broadcasts.
        side: Side,
    },
    /// Membership: a node is alive, or lives again.
    PeerUp(Peer),
    /// Membership: a node is gone.
    PeerDown(NodeId),
}

/// A datagram or an action.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// Send `bytes` to `to`.
    Send {
        /// The address.
        to: SocketAddr,
        /// The datagram.
        bytes: Vec<u8>,
    },
    /// Carry out an action.
    Act(Action),
}

/// Outputs in order, the sender named in datagrams, and how they are signed.
#[derive(Debug)]
pub(crate) struct Outbox {
    cluster: ClusterId,
    pub(crate) node: NodeId,
    incarnation: Incarnation,
    /// Number of the next datagram.
    number: u64,
    pub(crate) keys: RackKeys,
    queue: VecDeque<Output>,
}

impl Outbox {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            cluster: config.cluster,
            node: config.node,
            incarnation: config.incarnation,
            number: config.first_number,
            keys: config.keys.clone(),
            queue: VecDeque::new(),
        }
    }

    pub(crate) fn send(&mut self, to: &Peer, message: &Message) {
        self.send_as(to.addr, to.node, to.incarnation, message);
    }

    pub(crate) fn send_anyone(&mut self, addr: SocketAddr, message: &Message) {
        self.send_as(addr, NodeId::ANYONE, Incarnation(0), message);
    }

    fn send_as(&mut self, addr: SocketAddr, to: NodeId, life: Incarnation, message: &Message) {
        let header = Header {
            cluster: self.cluster,
            from: self.node,
            from_incarnation: self.incarnation,
            to,
            to_incarnation: life,
            number: self.number,
        };
        self.number += 1;
        let bytes = message.encode(&header, &self.keys);
        self.queue.push_back(Output::Send { to: addr, bytes });
    }

    pub(crate) fn act(&mut self, action: Action) {
        self.queue.push_back(Output::Act(action));
    }

    pub(crate) fn pop(&mut self) -> Option<Output> {
        self.queue.pop_front()
    }
}
