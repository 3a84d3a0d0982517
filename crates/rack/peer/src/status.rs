//! The state of the node, as shown to people.

use std::time::Duration;

use farpool_acms::{GrantId, NodeId, Peer, Side};
use farpool_api::{ClientId, Node, NodeList, NodeState};
use farpool_units::at_most;
use serde::{Deserialize, Serialize};

use crate::core::{Core, State, class_name};
use crate::ledger::HoldingState;
use crate::rack_key;

/// A node at one moment. Sizes are in bytes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Its id, 16 hexadecimal digits.
    pub node: String,
    /// The number of its present life.
    pub incarnation: u32,
    /// Where others reach it.
    pub address: String,
    /// Its blade's addresses.
    pub blade: Vec<String>,
    /// `client`, `neutral` or `server`.
    pub class: String,
    /// Which side broadcasts, by this node's estimate: `clients` or `servers`.
    pub side: String,
    /// True if it is ending and lends no more.
    pub ending: bool,
    /// Bytes that its programs need, memory on other nodes included.
    pub own_bytes: u64,
    /// Memory that the node has.
    pub total_bytes: u64,
    /// Memory that it would lend in all.
    pub offered_bytes: u64,
    /// Memory that it has lent.
    pub lent_bytes: u64,
    /// Lent memory that holds data.
    pub lent_used_bytes: u64,
    /// Bytes that its programs want from others.
    pub wanted_bytes: u64,
    /// Memory that its programs have on other nodes and need not leave.
    pub borrowed_bytes: u64,
    /// Borrowed memory that holds data.
    pub borrowed_used_bytes: u64,
    /// Memory granted to its own programs on its own blade.
    pub here_bytes: u64,
    /// Grants to others.
    pub lent: Vec<GrantStatus>,
    /// Grants of its programs, here and elsewhere.
    pub borrowed: Vec<GrantStatus>,
    /// Nodes that it knows.
    pub peers: Vec<PeerStatus>,
    /// Its programs.
    pub clients: Vec<ClientStatus>,
    /// Numbers of its rack keys, 8 hexadecimal digits; the first one signs.
    #[serde(default)]
    pub rack_keys: Vec<String>,
    /// Counts of datagrams.
    pub datagrams: DatagramCounts,
    /// Grants to others since the start.
    pub grants_made: u64,
    /// Grants of others that became usable since the start.
    pub grants_used: u64,
    /// Grants to others that ended since the start.
    pub grants_revoked: u64,
    /// Grants to others that ended before they were left.
    pub grants_cut_off: u64,
    /// Grants to others that were taken back because they held no data.
    #[serde(default)]
    pub grants_unused: u64,
    /// Grants that programs here had to leave.
    pub moves: u64,
    /// Grants of others whose memory was lost.
    pub grants_lost: u64,
}

/// A grant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GrantStatus {
    /// Its name.
    pub grant: String,
    /// The other node: the one where the grant lies, or the one that has it; this node's name for
    /// its own.
    pub node: String,
    /// Its size.
    pub bytes: u64,
    /// The program here that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// `ready`, `moving` or `lost`.
    pub state: String,
    /// Bytes that hold data, as the program reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Time until its memory is gone, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// A known node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its id.
    pub node: String,
    /// Where it is reached.
    pub address: String,
    /// The number of its present life.
    pub incarnation: u32,
    /// Bytes that it offers, if known.
    pub offered_bytes: u64,
}

/// A program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its id.
    pub id: ClientId,
    /// Its name for people.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// Bytes that it wants.
    pub wanted_bytes: u64,
}

/// Datagrams since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DatagramCounts {
    /// Sent.
    pub sent: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Received.
    pub received: u64,
    /// Not readable.
    pub damaged: u64,
    /// Of another version.
    #[serde(default)]
    pub other_version: u64,
    /// Not made with a rack key that this node has.
    #[serde(default)]
    pub unauthentic: u64,
    /// Signed, but received before.
    #[serde(default)]
    pub replayed: u64,
    /// Of a life that begins in the future.
    #[serde(default)]
    pub ahead: u64,
    /// For another node, life or cluster.
    pub misdirected: u64,
    /// Refused by the network.
    pub failed: u64,
}

fn hex(node: NodeId) -> String {
    format!("{:016x}", node.0)
}

fn millis(time: Duration) -> u64 {
    at_most(time.as_millis())
}

/// Returns the present status.
pub(crate) fn status(core: &Core) -> Status {
    core.read(|state, now| {
        let (member, counts) = (&state.member, state.counts);
        let config = member.config();
        let usage = state.usage;
        let wanted = |(client, wanted_bytes): (farpool_api::ClientView, u64)| {
            let farpool_api::ClientView { id, name, pid, .. } = client;
            ClientStatus { id, name, pid, wanted_bytes }
        };
        Status {
            name: core.here.node.clone(),
            node: hex(config.node),
            incarnation: config.incarnation.0,
            address: config.addr.to_string(),
            blade: core.here.addresses.clone(),
            class: class_name(member.class()).to_owned(),
            side: side_name(member.side()).to_owned(),
            ending: state.is_ending,
            own_bytes: usage.map_or(0, |usage| usage.used_bytes),
            total_bytes: usage.map_or(0, |usage| usage.total_bytes),
            offered_bytes: member.offered_bytes(),
            lent_bytes: member.bound_bytes(),
            lent_used_bytes: state.lent_used_bytes,
            wanted_bytes: member.wanted_bytes(),
            borrowed_bytes: member.usable_bytes(),
            borrowed_used_bytes: state.ledger.far_bytes(),
            here_bytes: state.ledger.here_bytes(),
            lent: lent(state),
            borrowed: borrowed(core, state, now),
            peers: peers(state, now),
            clients: state.ledger.clients().map(wanted).collect(),
            rack_keys: rack_key::numbers(&config.keys),
            datagrams: datagrams(state),
            grants_made: counts.grants_made,
            grants_used: counts.grants_used,
            grants_revoked: counts.grants_revoked,
            grants_cut_off: counts.grants_cut_off,
            grants_unused: member.unused_count(),
            moves: counts.moves,
            grants_lost: counts.grants_lost,
        }
    })
}

pub(crate) fn datagrams(state: &State) -> DatagramCounts {
    let counted = state.member.counters();
    DatagramCounts {
        sent: counted.sent,
        sent_bytes: counted.sent_bytes,
        received: counted.received,
        damaged: counted.damaged,
        other_version: counted.other_version,
        unauthentic: counted.unauthentic,
        replayed: counted.replayed,
        ahead: counted.ahead,
        misdirected: counted.misdirected,
        failed: state.counts.sends_failed,
    }
}

fn lent(state: &State) -> Vec<GrantStatus> {
    let of = |(grant, lent): (&GrantId, &crate::core::Lent)| GrantStatus {
        grant: grant.to_string(),
        node: hex(lent.client),
        bytes: lent.bytes,
        client: None,
        state: "ready".to_owned(),
        used_bytes: None,
        deadline_ms: None,
    };
    state.lent.iter().map(of).collect()
}

fn borrowed(core: &Core, state: &State, now: Duration) -> Vec<GrantStatus> {
    let mut all = Vec::new();
    for (grant, holding) in state.ledger.holdings() {
        let (name, deadline) = match holding.state {
            HoldingState::Ready => ("ready", None),
            HoldingState::Moving { deadline } => ("moving", deadline),
            HoldingState::Lost => ("lost", None),
        };
        let own = || core.here.node.clone();
        all.push(GrantStatus {
            grant: grant.to_string(),
            node: holding.blade.map_or_else(own, |blade| blade.to_string()),
            bytes: holding.bytes,
            client: Some(holding.client),
            state: name.to_owned(),
            used_bytes: Some(holding.used_bytes),
            deadline_ms: deadline.map(|at| millis(at.saturating_sub(now))),
        });
    }
    all
}

fn offer_of(state: &State, node: NodeId, now: Duration) -> u64 {
    state.member.offers(now).find(|(origin, _)| *origin == node).map_or(0, |(_, bytes)| bytes)
}

fn peers(state: &State, now: Duration) -> Vec<PeerStatus> {
    let of = |peer: &Peer| PeerStatus {
        node: hex(peer.node),
        address: peer.addr.to_string(),
        incarnation: peer.incarnation.0,
        offered_bytes: offer_of(state, peer.node, now),
    };
    state.member.peers().iter().map(of).collect()
}

pub(crate) fn side_name(side: Side) -> &'static str {
    match side {
        Side::Clients => "clients",
        Side::Servers => "servers",
    }
}

/// Returns this node and those it knows, in the controller's format. Figures that nodes do not tell
/// each other are 0 or missing.
pub(crate) fn nodes(core: &Core) -> NodeList {
    let blade_id = core.blade().id();
    let capacity_bytes = core.blade().capacity_bytes();
    core.read(|state, now| {
        let (member, config) = (&state.member, state.member.config());
        let own = Node {
            name: core.here.node.clone(),
            state: if state.is_ending { NodeState::Draining } else { NodeState::Up },
            draining: state.is_ending,
            addresses: core.here.addresses.clone(),
            donate_bytes: member.offered_bytes(),
            granted_bytes: member.bound_bytes(),
            segments: state.lent.len() as u64,
            incarnation: u64::from(config.incarnation.0),
            blade_id,
            capacity_bytes: Some(capacity_bytes),
            lendable_bytes: Some(member.offered_bytes()),
            used_bytes: Some(state.lent_used_bytes),
            load_permille: None,
            read_bytes_total: None,
            write_bytes_total: None,
            report_age_ms: Some(0),
        };
        let other = |peer: &Peer| {
            let offered = offer_of(state, peer.node, now);
            Node {
                name: peer.addr.to_string(),
                state: NodeState::Up,
                draining: false,
                addresses: vec![format!("udp://{}", peer.addr)],
                donate_bytes: offered,
                granted_bytes: 0,
                segments: 0,
                incarnation: u64::from(peer.incarnation.0),
                blade_id: 0,
                capacity_bytes: None,
                lendable_bytes: Some(offered),
                used_bytes: None,
                load_permille: None,
                read_bytes_total: None,
                write_bytes_total: None,
                report_age_ms: None,
            }
        };
        let mut nodes = vec![own];
        nodes.extend(member.peers().iter().map(other));
        nodes[1..].sort_by(|a, b| a.name.cmp(&b.name));
        NodeList { nodes }
    })
}
