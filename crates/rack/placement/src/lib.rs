//! The rack as a model: bricks, ports, switches, what is reserved of them, and who gets what next.
//!
//! Pure code: no I/O, no clock, no randomness. The controller asks, stores and carries out what
//! this crate decides.
//!
//! * [`Graph`]: compute bricks, memory bricks, their ports, switches and links, with annotations
//!   (dReDBox, Syrivelis 2017, section V: "system resources are modelled as a directed graph, which
//!   is traversed at allocation requests").
//! * [`topology`]: a graph from TOML and back, generated graphs, a drawing.
//! * [`Allocator`]: walks compute -> ports -> switches -> memory, reserves every vertex on the way
//!   and yields a [`Grant`]: MemPort entries, switch settings, rate limits.
//!
//! Invariants, each proved by a property test:
//! - A circuit switch's port is in one circuit at most; no byte of a memory brick has two owners.
//! - The rate limits granted on a brick or a link never sum to more than it serves.
//! - Release undoes exactly what allocate reserved; an error changes nothing.
//! - A request that any brick and any path could serve is not refused.
//!
//! Words: a segment lies in one memory brick; a client that wants several bricks asks for several
//! segments (crate `pool` makes one memory of them). Sizes are bytes at the interface and
//! superpages of 16 MiB inside; bandwidths are bytes per second, counted per direction: *read*
//! flows from memory to compute, *write* the other way.

mod allocate;
mod builder;
mod graph;
mod ids;
pub mod topology;

pub use allocate::{
    Allocator, Grant, MemPortEntry, Path, PlacementPolicy, RackError, RateLimits, Request,
    Snapshot, SwitchSetting, UnknownPlacementPolicy,
};
pub use builder::{BuildError, GraphBuilder};
pub use graph::{
    ComputeBrick, Graph, Link, MemoryBrick, Port, PowerState, Rack, Switch, SwitchKind, Tray,
    Vertex,
};
pub use ids::{
    CircuitId, ComputeId, DomainId, Epoch, LinkId, MemoryId, PortId, RackId, RequestId, SegmentId,
    SwitchId, TrayId,
};
