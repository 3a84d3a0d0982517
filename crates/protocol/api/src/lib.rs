//! The controller's REST interface: its types, a blocking client, and what a client does about its
//! answers ([`placements`], pure, and [`tenant`]).
//!
//! One place for both sides, so that a field cannot mean two things. Sizes are bytes, rates bytes
//! per second, times milliseconds, each named so. Ids are chosen by the one who creates, so every
//! create can be repeated. The controller turns the types into docs/openapi.json (feature
//! `schema`); clients do without that.
//!
//! Bodies of `PUT` refuse fields they do not know, because a misspelled limit must not pass
//! silently. Reports and answers ignore them, so that an older node understands a newer controller.

mod answers;
mod client;
mod ids;
pub mod placements;
mod problem;
mod rack;
mod segments;
pub mod tenant;

pub use answers::{ApiError, EventStream};
pub use client::{Client, SegmentFilter};
pub use ids::{ClientId, IdError, Key, SegmentId, TaskId};
pub use problem::{Problem, ProblemKind};
pub use rack::{
    Circuit, CircuitList, Event, Health, Node, NodeAnswer, NodeGrant, NodeGrantUse, NodeList,
    NodeReport, NodeSpec, NodeState, Task, TaskList, TaskState, Topology, TopologyBrick,
    TopologyLink, TopologySwitch,
};
pub use segments::{
    Client as ClientView, ClientAnswer, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec,
    MoveRequest, Place, Policy, Segment, SegmentList, SegmentSpec, SegmentState, Target,
};

/// Longest a report waits for news before it is answered; longer waits are shortened to it, so that
/// a dead peer holds a connection no longer.
pub const WAIT_LIMIT_MS: u64 = 30_000;
/// Lease of a client that names none.
pub const DEFAULT_LEASE_MS: u64 = 30_000;
/// Bandwidth of a segment whose creator names none: a tenth of a 10 Gb/s link.
pub const DEFAULT_RATE_BYTES_PER_S: u64 = 125_000_000;
/// What a node's memory serves per direction if it does not say: a 10 Gb/s link.
pub const DEFAULT_NODE_RATE_BYTES_PER_S: u64 = 1_250_000_000;
