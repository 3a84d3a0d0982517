//! The controller's REST interface: its types, a blocking client, and how a client acts on its
//! answers ([`placements`], pure, and [`tenant`]).
//!
//! Both sides share these types, so that a field cannot have two meanings. Sizes are bytes, rates
//! bytes per second, times milliseconds, as the names say. The creator of an object chooses its id,
//! so every create can be retried. The controller turns the types into docs/openapi.json (feature
//! `schema`); clients need not.
//!
//! Bodies of `PUT` reject unknown fields, because a misspelled limit must not pass silently.
//! Reports and answers ignore them, so that an older node understands a newer controller.

#![warn(missing_docs)]

mod access;
mod answers;
mod client;
mod ids;
pub mod placements;
mod problem;
mod rack;
mod segments;
pub mod tenant;
mod tenants;
mod transport;

pub use access::Access;
pub use answers::{ApiError, EventStream};
pub use client::{Client, REQUEST_HEADER, SegmentFilter};
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

pub use tenants::{DEFAULT_TENANT, Tenant, TenantList, TenantSpec};

/// Longest time that a report waits for news; longer waits are shortened to it, so that a dead peer
/// holds a connection no longer.
pub const WAIT_LIMIT_MS: u64 = 30_000;
/// Default lease of a client.
pub const DEFAULT_LEASE_MS: u64 = 30_000;
/// Default bandwidth of a segment: a tenth of a 10 Gb/s link.
pub const DEFAULT_RATE_BYTES_PER_S: u64 = 125_000_000;
/// Default bandwidth of a node's memory per direction: a 10 Gb/s link.
pub const DEFAULT_NODE_RATE_BYTES_PER_S: u64 = 1_250_000_000;
