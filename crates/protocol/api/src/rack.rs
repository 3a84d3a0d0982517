//! Nodes, what they report and are told, and the rack round them.

use serde::{Deserialize, Serialize};

use crate::DEFAULT_NODE_RATE_BYTES_PER_S;
use crate::ids::{Key, SegmentId, TaskId};

fn default_rate() -> u64 {
    DEFAULT_NODE_RATE_BYTES_PER_S
}

/// What a node's agent registers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// Where its blade listens, best first, such as `tcp://10.0.0.7:7070`. 16 at most.
    pub addresses: Vec<String>,
    /// Memory it may lend, rounded down to whole superpages of 16 MiB; 0 for a node that only uses
    /// memory.
    pub donate_bytes: u64,
    /// Random at each start of the node's daemon.
    pub incarnation: u64,
    /// Random at each start of its blade: another one means that the blade's memory is gone.
    pub blade_id: u64,
    /// What its memory serves to readers; heeded without a topology.
    #[serde(default = "default_rate")]
    pub read_bytes_per_s: u64,
    /// What its memory takes from writers; heeded without a topology.
    #[serde(default = "default_rate")]
    pub write_bytes_per_s: u64,
    /// The topology's compute brick it is; the node's name if left out and there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_brick: Option<String>,
    /// The topology's memory brick it is; the node's name if left out and there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_brick: Option<String>,
}

impl NodeSpec {
    /// A node with the usual bandwidth, named as its bricks are.
    #[must_use]
    pub fn new(addresses: Vec<String>, donate_bytes: u64, incarnation: u64, blade_id: u64) -> Self {
        Self {
            addresses,
            donate_bytes,
            incarnation,
            blade_id,
            read_bytes_per_s: DEFAULT_NODE_RATE_BYTES_PER_S,
            write_bytes_per_s: DEFAULT_NODE_RATE_BYTES_PER_S,
            compute_brick: None,
            memory_brick: None,
        }
    }
}

/// How a node stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// It reports.
    Up,
    /// No report for 5 s: nothing new is placed on it.
    Late,
    /// No report for 30 s.
    Lost,
    /// It reports, and shall be emptied.
    Draining,
}

/// A node as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Node {
    /// Its name.
    pub name: String,
    /// How it stands.
    pub state: NodeState,
    /// Whether it shall be emptied, also while it does not report.
    pub draining: bool,
    /// Where its blade listens.
    pub addresses: Vec<String>,
    /// Memory it may lend, in whole superpages.
    pub donate_bytes: u64,
    /// Memory granted on it.
    pub granted_bytes: u64,
    /// Segments on it or moving to it.
    pub segments: u64,
    /// Its daemon's incarnation.
    pub incarnation: u64,
    /// Its blade's id.
    pub blade_id: u64,
    /// Memory its blade has, as it reports; none before its first report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// What it lends at most now, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lendable_bytes: Option<u64>,
    /// What holds data, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Its load, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_permille: Option<u16>,
    /// Bytes its blade has sent, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_total: Option<u64>,
    /// Bytes its blade has taken, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bytes_total: Option<u64>,
    /// Time since its last report; none before the first since the controller started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_age_ms: Option<u64>,
}

/// All nodes, by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeList {
    /// All nodes.
    pub nodes: Vec<Node>,
}

/// What a node tells the controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeReport {
    /// That of the registration; a report with another one is refused: register again.
    pub incarnation: u64,
    /// Grows by one or more with each report of an incarnation; one that does not changes nothing.
    pub sequence: u64,
    /// That of the registration; a report with another one is refused: register again.
    pub blade_id: u64,
    /// Memory the blade has; not above `donate_bytes`.
    pub capacity_bytes: u64,
    /// What holds data.
    pub used_bytes: u64,
    /// What it lends at most now; below what is granted the controller moves segments away.
    pub lendable_bytes: u64,
    /// Bytes sent since the blade started.
    #[serde(default)]
    pub read_bytes_total: u64,
    /// Bytes taken since the blade started.
    #[serde(default)]
    pub write_bytes_total: u64,
    /// Load in thousandths, 0 to 1000.
    #[serde(default)]
    pub load_permille: u16,
    /// The grants that stand at the blade once the answer of `known_version` is carried out.
    #[serde(default)]
    pub grants: Vec<NodeGrantUse>,
    /// `version` of the last answer that is carried out; 0 before the first.
    #[serde(default)]
    pub known_version: u64,
    /// How long the answer may wait for something newer than `known_version`.
    #[serde(default)]
    pub wait_ms: u64,
}

/// One grant in a node's report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeGrantUse {
    /// Its segment.
    pub segment: SegmentId,
    /// Its epoch.
    pub epoch: u64,
    /// What holds data.
    #[serde(default)]
    pub used_bytes: u64,
    /// Connections open to it.
    #[serde(default)]
    pub connections: u32,
}

/// The answer to a node's report: everything that shall stand on it. What is not in it must go,
/// before anything new is set up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeAnswer {
    /// To be given back as `known_version`.
    pub version: u64,
    /// It shall be emptied.
    pub draining: bool,
    /// All grants on it.
    pub grants: Vec<NodeGrant>,
}

/// One grant that shall stand on a node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeGrant {
    /// Its segment.
    pub segment: SegmentId,
    /// Fencing number: of two grants of a segment the one with the lower is stale.
    pub epoch: u64,
    /// Opens it.
    pub key: Key,
    /// Its size.
    pub bytes: u64,
    /// Rate limit from the node to the client.
    pub read_bytes_per_s: u64,
    /// Rate limit from the client to the node.
    pub write_bytes_per_s: u64,
}

/// A circuit that shall stand in a switch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Circuit {
    /// The switch.
    pub switch: String,
    /// One port.
    pub from_port: u32,
    /// The other port.
    pub to_port: u32,
    /// Segments over it.
    pub segments: u32,
    /// Whether the switch says that it stands.
    pub standing: bool,
}

/// All circuits.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CircuitList {
    /// All circuits.
    pub circuits: Vec<Circuit>,
}

/// The rack's graph.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Topology {
    /// Bricks that use memory.
    pub compute: Vec<TopologyBrick>,
    /// Bricks that lend memory.
    pub memory: Vec<TopologyBrick>,
    /// Switches.
    pub switches: Vec<TopologySwitch>,
    /// Cables.
    pub links: Vec<TopologyLink>,
}

/// A brick of the topology.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TopologyBrick {
    /// Its name.
    pub name: String,
    /// Its tray.
    pub tray: String,
    /// Its rack.
    pub rack: String,
    /// What it fails with.
    pub domain: String,
    /// Its transceivers.
    pub ports: u32,
    /// Memory it lends; memory bricks only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The node that has registered as it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// A switch of the topology.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TopologySwitch {
    /// Its name.
    pub name: String,
    /// `circuit` or `packet`.
    pub kind: String,
    /// Its ports.
    pub ports: u32,
}

/// A cable of the topology.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TopologyLink {
    /// One end, `name:port`.
    pub from: String,
    /// The other end.
    pub to: String,
    /// What it carries per direction.
    pub bandwidth_bytes_per_s: u64,
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Event {
    /// Grows with every event, also over restarts of the controller.
    pub id: u64,
    /// What, such as `segment-created`.
    pub kind: String,
    /// To whom: a node's name, or an id.
    pub subject: String,
    /// In words.
    pub detail: String,
    /// When, counted from the controller's start.
    pub uptime_ms: u64,
}

/// How a task stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// Not ended.
    Running,
    /// Ended well.
    Done,
    /// Ended otherwise; `detail` says why.
    Failed,
}

/// Something that takes long.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// `drain` or `move`.
    pub kind: String,
    /// The node or segment.
    pub subject: String,
    /// How it stands.
    pub state: TaskState,
    /// In words.
    pub detail: String,
}

/// All tasks that are remembered, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TaskList {
    /// All tasks.
    pub tasks: Vec<Task>,
}

/// How the controller is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Health {
    /// Whether it answers requests; a standby does not.
    pub leader: bool,
    /// The leader's address, if another one leads and is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_address: Option<String>,
    /// Its version.
    pub version: String,
}
