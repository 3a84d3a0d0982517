//! Clients and their segments.

use serde::{Deserialize, Serialize};

use crate::ids::{ClientId, Key, SegmentId};
use crate::{DEFAULT_LEASE_MS, DEFAULT_RATE_BYTES_PER_S};

fn default_lease_ms() -> u64 {
    DEFAULT_LEASE_MS
}

fn default_rate() -> u64 {
    DEFAULT_RATE_BYTES_PER_S
}

/// How the memory brick is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The first in the order of the topology.
    FirstFit,
    /// Few powered bricks.
    Pack,
    /// Over failure domains.
    Spread,
    /// Same tray, same rack, elsewhere.
    Nearest,
    /// The lowest load.
    #[default]
    LeastLoaded,
}

/// A program that uses far memory (one `farpool run`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ClientSpec {
    /// The compute brick it runs on.
    pub host: String,
    /// What people call it.
    pub name: String,
    /// Its process on that host.
    pub pid: u32,
    /// Silence after which its segments are released, 1,000 to 3,600,000.
    #[serde(default = "default_lease_ms")]
    pub lease_ms: u64,
}

/// A client as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Client {
    /// Its id.
    pub id: ClientId,
    /// The compute brick it runs on.
    pub host: String,
    /// What people call it.
    pub name: String,
    /// Its process on that host.
    pub pid: u32,
    /// Silence after which its segments are released.
    pub lease_ms: u64,
    /// Its segments.
    pub segments: Vec<SegmentId>,
}

/// What a client tells the controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientReport {
    /// Grows by one or more with each report; one that does not changes nothing.
    pub sequence: u64,
    /// Its segments.
    #[serde(default)]
    pub segments: Vec<ClientSegmentUse>,
    /// `version` of the last answer it has acted on; 0 before the first.
    #[serde(default)]
    pub known_version: u64,
    /// How long the answer may wait for something newer than `known_version`.
    #[serde(default)]
    pub wait_ms: u64,
}

/// One segment in a client's report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientSegmentUse {
    /// Which.
    pub id: SegmentId,
    /// How much of it holds data.
    pub used_bytes: u64,
    /// The epoch of the place it uses; with `evacuated`, that of the target, or of the place that
    /// was to be left without one.
    pub epoch: u64,
    /// All data is at the target (elsewhere, if there was none to name), and nothing will be sent
    /// to the old place any more.
    #[serde(default)]
    pub evacuated: bool,
}

/// The answer to a client's report: all its segments.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientAnswer {
    /// To be given back as `known_version`.
    pub version: u64,
    /// All segments of the client.
    pub segments: Vec<ClientSegment>,
}

/// One segment in the answer to a client.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientSegment {
    /// Which.
    pub id: SegmentId,
    /// Fencing number of `place`.
    pub epoch: u64,
    /// How it stands.
    pub state: SegmentState,
    /// Where it lies.
    pub place: Place,
    /// Where it shall be moved: present once the new node has confirmed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// With `moving`: no target will come, so leave the place for any other that there is. When
    /// nobody is there any more, the report says `evacuated` with this very epoch. Said by nodes
    /// that lend each other memory without a controller, and by a controller that has found no
    /// target for memory that a donor needs back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leave: bool,
    /// With `pending`: what it waits for, in words for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Time left until the donor takes the old place back; none if there is no hurry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// Where a segment lies and how to reach it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Place {
    /// The node.
    pub node: String,
    /// Its blade's addresses, best first.
    pub addresses: Vec<String>,
    /// Opens the segment there. Only its client is told; elsewhere it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    /// Its size: whole superpages of 16 MiB.
    pub bytes: u64,
    /// Rate limit from the node to the client.
    pub read_bytes_per_s: u64,
    /// Rate limit from the client to the node.
    pub write_bytes_per_s: u64,
}

/// Where a segment is moving to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Target {
    /// Fencing number of the new place.
    pub epoch: u64,
    /// The new place.
    pub place: Place,
}

/// How a segment stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SegmentState {
    /// Granted and stored; its node has not confirmed it, or a circuit does not stand yet.
    Pending,
    /// Usable.
    Ready,
    /// Usable at the old place; the new one is granted or sought.
    Moving,
    /// Nobody's any more; its node has not let go of it yet.
    Releasing,
    /// Its memory is gone.
    Lost,
}

/// A segment wanted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// Whose it is: it lives as long as the client. Either this or `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// The compute brick that will use it, if no client does: it lives until it is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its size, rounded up to whole superpages of 16 MiB.
    pub bytes: u64,
    /// Bandwidth from memory to client.
    #[serde(default = "default_rate")]
    pub read_bytes_per_s: u64,
    /// Bandwidth from client to memory.
    #[serde(default = "default_rate")]
    pub write_bytes_per_s: u64,
    /// How its brick is chosen.
    #[serde(default)]
    pub policy: Policy,
    /// Failure domains that will not do; a node is one, named as itself, unless a topology says
    /// otherwise. 64 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoid: Vec<String>,
    /// It may lie in several pieces of its brick.
    #[serde(default)]
    pub may_split: bool,
}

impl SegmentSpec {
    /// A segment of a client with the usual bandwidth and policy.
    #[must_use]
    pub fn of_client(client: ClientId, bytes: u64) -> Self {
        Self {
            client: Some(client),
            host: None,
            bytes,
            read_bytes_per_s: DEFAULT_RATE_BYTES_PER_S,
            write_bytes_per_s: DEFAULT_RATE_BYTES_PER_S,
            policy: Policy::default(),
            avoid: Vec::new(),
            may_split: false,
        }
    }
}

/// A segment as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Segment {
    /// Its id.
    pub id: SegmentId,
    /// Whose it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// The compute brick that uses it.
    pub host: String,
    /// How it stands.
    pub state: SegmentState,
    /// Fencing number of `place`.
    pub epoch: u64,
    /// Grows with every change of what is wanted; the `ETag`.
    pub revision: u64,
    /// Where it lies; the key is left out.
    pub place: Place,
    /// Where it is moving to, confirmed or not; the key is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// With `pending`, or with a target that is not ready: what it waits for, in words for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// How much of it holds data, as its client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Time left until the donor takes the old place back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// A page of segments, by id.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SegmentList {
    /// The page.
    pub segments: Vec<Segment>,
    /// Gives the next page; none on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_page_token: Option<String>,
}

/// A segment shall lie elsewhere.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// How the new brick is chosen.
    #[serde(default)]
    pub policy: Policy,
    /// Failure domains that will not do. 64 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoid: Vec<String>,
}
