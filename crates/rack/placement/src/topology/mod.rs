//! Topologies: a graph from TOML and back, generated graphs, a drawing.
//!
//! ```toml
//! [[rack]]
//! name = "r0"
//! [[tray]]
//! name = "t0"
//! rack = "r0"
//! [[switch]]
//! name = "s0"
//! kind = "circuit"              # or "packet"
//! ports = 4
//! [[compute]]
//! name = "c0"
//! tray = "t0"
//! ports = 2
//! [[memory]]
//! name = "m0"
//! tray = "t0"
//! ports = 2
//! capacity = "64GiB"
//! read_bandwidth = "16GiB/s"
//! write_bandwidth = "16GiB/s"
//! [[link]]
//! from = "c0:0"                 # name:port, ports are numbered from 0
//! to = "s0:0"
//! bandwidth = "1.25GiB/s"
//! [[link]]
//! from = "m0:0"
//! to = "s0:1"
//! bandwidth = "1.25GiB/s"
//! ```
//!
//! Optional: `domain` of a brick (default: its tray's name), `power = "off"`, `power_watts`,
//! `load_permille`, `latency_ns`.

mod draw;
mod generate;
mod read;
mod write;

pub use draw::draw;
pub use generate::{NetworkKind, RackSpec, generate};
pub use read::{Topology, TopologyError, Warning, read};
pub use write::write;
