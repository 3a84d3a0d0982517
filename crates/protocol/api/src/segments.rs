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
    /// As few powered bricks as possible.
    Pack,
    /// Spread over failure domains.
    Spread,
    /// The same tray, else the same rack, else any other.
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
    #[cfg_attr(feature = "schema", schema(pattern = "^[A-Za-z0-9._-]{1,64}$"))]
    pub host: String,
    /// Its name, for people: 1 to 256 characters, none of which moves a terminal's cursor.
    #[cfg_attr(feature = "schema", schema(min_length = 1, max_length = 256))]
    pub name: String,
    /// Its process ID on that host.
    pub pid: u32,
    /// Silence in milliseconds after which its segments are released, 1,000 to 3,600,000.
    #[cfg_attr(feature = "schema", schema(minimum = 1000, maximum = 3600000))]
    #[serde(default = "default_lease_ms")]
    pub lease_ms: u64,
    /// The tenant whose promise and quota it counts towards; that of the certificate, or `default`,
    /// if left out. With certificates a program gives its own only; without them whoever may ask
    /// the controller may give any.
    #[cfg_attr(feature = "schema", schema(pattern = "^[A-Za-z0-9._-]{1,64}$"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

/// A client, as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Client {
    /// Its id.
    pub id: ClientId,
    /// The compute brick it runs on.
    pub host: String,
    /// Its name, for people.
    pub name: String,
    /// Its process ID on that host.
    pub pid: u32,
    /// Silence in milliseconds after which its segments are released.
    pub lease_ms: u64,
    /// The tenant that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Its segments.
    pub segments: Vec<SegmentId>,
}

/// A client's report to the controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientReport {
    /// Greater in each report; a report where it is not changes nothing.
    pub sequence: u64,
    /// Its segments.
    #[serde(default)]
    pub segments: Vec<ClientSegmentUse>,
    /// `version` of the last answer acted on; 0 before the first.
    #[serde(default)]
    pub known_version: u64,
    /// How long the controller may wait for something newer than `known_version`.
    #[serde(default)]
    pub wait_ms: u64,
}

/// One segment in a client's report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientSegmentUse {
    /// The segment's id.
    pub id: SegmentId,
    /// Bytes of it that hold data.
    pub used_bytes: u64,
    /// The epoch of the place in use; with `evacuated`, that of the target, or of the place to be
    /// left if there is no target.
    pub epoch: u64,
    /// All data is at the target (or elsewhere, if there was no target), and nothing will be sent
    /// to the old place any more.
    #[serde(default)]
    pub evacuated: bool,
}

/// The answer to a client's report: all its segments.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientAnswer {
    /// To be returned as `known_version`.
    pub version: u64,
    /// All segments of the client.
    pub segments: Vec<ClientSegment>,
}

/// One segment in the answer to a client.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ClientSegment {
    /// Its id.
    pub id: SegmentId,
    /// Fencing number of `place`.
    pub epoch: u64,
    /// Its state.
    pub state: SegmentState,
    /// Its place.
    pub place: Place,
    /// The place it is moving to: present once the new node has confirmed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// With `moving`: there will be no target, so leave the place for any other. Once no process
    /// uses it, report `evacuated` with this very epoch. Sent by nodes that lend each other memory
    /// without a controller, and by a controller that has found no target for memory that a donor
    /// needs back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leave: bool,
    /// With `pending`: what it waits for, in words for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Time left until the donor reclaims the old place; absent if there is no deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// The place of a segment, and how to reach it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Place {
    /// The node.
    pub node: String,
    /// The failure domain that its memory is in; absent without a topology: then it is the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Its blade's addresses, best first.
    pub addresses: Vec<String>,
    /// The secret that opens the segment there. Sent only to its client, absent elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    /// Its size: whole superpages of 16 MiB.
    pub bytes: u64,
    /// Rate limit from the node to the client.
    pub read_bytes_per_s: u64,
    /// Rate limit from the client to the node.
    pub write_bytes_per_s: u64,
}

impl Place {
    /// Returns the name of the failure domain that its memory is in.
    #[must_use]
    pub fn failure_domain(&self) -> &str {
        self.domain.as_deref().unwrap_or(&self.node)
    }
}

/// The place that a segment is moving to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Target {
    /// Fencing number of the new place.
    pub epoch: u64,
    /// The new place.
    pub place: Place,
}

/// State of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SegmentState {
    /// Granted and stored, but its node has not confirmed it, or a circuit is not connected yet.
    Pending,
    /// Usable.
    Ready,
    /// Usable at the old place; the new one is granted or sought.
    Moving,
    /// Released, but still held by its node.
    Releasing,
    /// Its memory is lost.
    Lost,
}

/// A request for a segment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// Its client, with which it lives. Either this or `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// The compute brick that will use it, if there is no client: it lives until it is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its size, rounded up to whole superpages of 16 MiB: 1 byte takes 16 MiB.
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    pub bytes: u64,
    /// Bandwidth from memory to client.
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(default = "default_rate")]
    pub read_bytes_per_s: u64,
    /// Bandwidth from client to memory.
    #[cfg_attr(feature = "schema", schema(minimum = 1))]
    #[serde(default = "default_rate")]
    pub write_bytes_per_s: u64,
    /// How its brick is chosen.
    #[serde(default)]
    pub policy: Policy,
    /// Failure domains to avoid; a node is one, under its own name, unless a topology says
    /// otherwise. At most 64.
    #[cfg_attr(feature = "schema", schema(max_items = 64))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoid: Vec<String>,
    /// It may consist of several pieces of its brick.
    #[serde(default)]
    pub may_split: bool,
    /// It has copies of what other segments of its client have: it is moved to failure domains with
    /// none of these only, if need be to one that `avoid` has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub apart: bool,
}

impl SegmentSpec {
    /// Creates a request of a client with the default bandwidth and policy.
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
            apart: false,
        }
    }
}

/// A segment, as the controller sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Segment {
    /// Its id.
    pub id: SegmentId,
    /// Its client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientId>,
    /// The compute brick that uses it.
    pub host: String,
    /// Its state.
    pub state: SegmentState,
    /// Fencing number of `place`.
    pub epoch: u64,
    /// Increases with every change of the intent; the `ETag`.
    pub revision: u64,
    /// The request that made it what it is; `place.bytes` has what it takes, in whole superpages of
    /// 16 MiB. Sent again with other `bytes` it changes the size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<SegmentSpec>,
    /// Its place; without the key.
    pub place: Place,
    /// The place it is moving to, confirmed or not; without the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// With `pending`, or with a target that is not ready: what it waits for, in words for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Bytes of it that hold data, as its client reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Time left until the donor reclaims the old place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
}

/// A page of segments, by id.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SegmentList {
    /// Its segments.
    pub segments: Vec<Segment>,
    /// The token for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_page_token: Option<String>,
}

/// A request to move a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// How the new brick is chosen.
    #[serde(default)]
    pub policy: Policy,
    /// Failure domains to avoid. At most 64.
    #[cfg_attr(feature = "schema", schema(max_items = 64))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoid: Vec<String>,
}
