//! Nodes, their reports and the answers, and the rack around them.

use serde::{Deserialize, Serialize};

use crate::DEFAULT_NODE_RATE_BYTES_PER_S;
use crate::ids::{Key, SegmentId, TaskId};

fn default_rate() -> u64 {
    DEFAULT_NODE_RATE_BYTES_PER_S
}

/// A node's registration, sent by its agent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// The blade's addresses, best first, such as `tcp://10.0.0.7:7070`. At most 16, and at least
    /// one if it lends memory.
    #[cfg_attr(feature = "schema", schema(max_items = 16))]
    pub addresses: Vec<String>,
    /// Memory that it may lend, rounded down to whole superpages of 16 MiB; 0 for a node that only
    /// uses memory.
    pub donate_bytes: u64,
    /// Random at each start of the node's daemon.
    pub incarnation: u64,
    /// Random at each start of its blade: a change means that the blade's memory is lost.
    pub blade_id: u64,
    /// Bandwidth of reads from its memory; used only without a topology.
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(default = "default_rate")]
    pub read_bytes_per_s: u64,
    /// Bandwidth of writes to its memory; used only without a topology.
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(default = "default_rate")]
    pub write_bytes_per_s: u64,
    /// The node's compute brick in the topology; by default the one with the node's name, if there
    /// is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_brick: Option<String>,
    /// The node's memory brick in the topology; by default the one with the node's name, if there
    /// is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_brick: Option<String>,
}

impl NodeSpec {
    /// Creates a node with the default bandwidth whose bricks have the node's name.
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

/// State of a node.
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
    /// It reports, and is being drained.
    Draining,
}

/// A node, as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: NodeState,
    /// True if it is to be drained, even while it does not report.
    pub draining: bool,
    /// Its blade's addresses.
    pub addresses: Vec<String>,
    /// Memory that it may lend, in whole superpages.
    pub donate_bytes: u64,
    /// Memory granted on it.
    pub granted_bytes: u64,
    /// Segments on it or moving to it.
    pub segments: u64,
    /// Its daemon's incarnation.
    pub incarnation: u64,
    /// Its blade's id.
    pub blade_id: u64,
    /// Its blade's memory, as it reports; absent before its first report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The most that it lends now, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lendable_bytes: Option<u64>,
    /// Memory that holds data, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Its load, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_permille: Option<u16>,
    /// Bytes its blade has sent, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_total: Option<u64>,
    /// Bytes its blade has received, as it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bytes_total: Option<u64>,
    /// Time since its last report; absent before the first report to this controller process.
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

/// A node's report to the controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeReport {
    /// The registration's incarnation; a report with another one is refused: register again.
    pub incarnation: u64,
    /// Greater in each report of an incarnation; a report where it is not changes nothing.
    pub sequence: u64,
    /// The registration's blade id; a report with another one is refused: register again.
    pub blade_id: u64,
    /// The blade's memory; at most `donate_bytes`.
    pub capacity_bytes: u64,
    /// Memory that holds data.
    pub used_bytes: u64,
    /// The most that it lends now; if more is granted, the controller moves segments away.
    pub lendable_bytes: u64,
    /// Bytes sent since the blade started.
    #[serde(default)]
    pub read_bytes_total: u64,
    /// Bytes received since the blade started.
    #[serde(default)]
    pub write_bytes_total: u64,
    /// Load in thousandths, 0 to 1000.
    #[serde(default)]
    pub load_permille: u16,
    /// The blade's grants once the answer of `known_version` is carried out.
    #[serde(default)]
    pub grants: Vec<NodeGrantUse>,
    /// `version` of the last answer carried out; 0 before the first.
    #[serde(default)]
    pub known_version: u64,
    /// How long the controller may wait for something newer than `known_version`.
    #[serde(default)]
    pub wait_ms: u64,
    /// True in a daemon's last report: another daemon may take the name at once.
    #[serde(default)]
    pub ending: bool,
}

/// One grant in a node's report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeGrantUse {
    /// Its segment.
    pub segment: SegmentId,
    /// Its epoch.
    pub epoch: u64,
    /// Memory that holds data.
    #[serde(default)]
    pub used_bytes: u64,
    /// Its size on the blade, if the node says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Open connections to it.
    #[serde(default)]
    pub connections: u32,
}

/// The answer to a node's report: all grants that the node must have. Any other must be removed
/// before a new one is set up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeAnswer {
    /// To be returned as `known_version`.
    pub version: u64,
    /// True if the node is to be drained.
    pub draining: bool,
    /// All grants on it.
    pub grants: Vec<NodeGrant>,
}

/// A grant that a node must have.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NodeGrant {
    /// Its segment.
    pub segment: SegmentId,
    /// Fencing number: of two grants of a segment, the one with the lower number is stale.
    pub epoch: u64,
    /// The secret that opens it.
    pub key: Key,
    /// Its size.
    pub bytes: u64,
    /// Rate limit from the node to the client.
    pub read_bytes_per_s: u64,
    /// Rate limit from the client to the node.
    pub write_bytes_per_s: u64,
}

/// A circuit that a switch must have.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Circuit {
    /// The switch.
    pub switch: String,
    /// One port.
    pub from_port: u32,
    /// The other port.
    pub to_port: u32,
    /// Number of segments that use it.
    pub segments: u32,
    /// True if the switch reports that it is connected.
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
    /// Its failure domain.
    pub domain: String,
    /// Number of its transceivers.
    pub ports: u32,
    /// Memory it lends; memory bricks only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<u64>,
    /// The node registered as this brick.
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
    /// Number of its ports.
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
    /// Its bandwidth per direction.
    pub bandwidth_bytes_per_s: u64,
}

/// An event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Event {
    /// Increases with every event, even across restarts of the controller.
    pub id: u64,
    /// Its kind, such as `segment-created`.
    pub kind: String,
    /// The object affected: a node's name, or an id.
    pub subject: String,
    /// In words.
    pub detail: String,
    /// Time since the controller's start.
    pub uptime_ms: u64,
    /// The controller's clock, since 1970 in UTC; 0 from a controller before 0.3.
    #[serde(default)]
    pub time_unix_ms: u64,
}

/// State of a task.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// Not finished.
    Running,
    /// Finished successfully.
    Done,
    /// Failed; `detail` gives the reason.
    Failed,
}

/// A long-running operation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// `drain` or `move`.
    pub kind: String,
    /// The node or segment.
    pub subject: String,
    /// Its state.
    pub state: TaskState,
    /// In words.
    pub detail: String,
}

/// All remembered tasks, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TaskList {
    /// All tasks.
    pub tasks: Vec<Task>,
}

/// Health of the controller.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Health {
    /// True if it answers requests; a standby does not.
    pub leader: bool,
    /// The leader's address, if another controller leads and its address is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_address: Option<String>,
    /// Its version.
    pub version: String,
}
