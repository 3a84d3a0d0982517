//! A node of a collaboration: it lends its idle memory to others and borrows theirs, without a
//! controller.
//!
//! * [`ledger`]: which program of this node has which grant; pure.
//! * `core`: the protocol's [`Member`](farpool_acms::Member), the ledger and the blade behind one
//!   lock; carries out their actions.
//! * `daemon`: sockets, threads, start and end.
//! * `rest`: HTTP for the programs of this node (`farpool run --pool`) and for people.
//!
//! Invariants:
//! - A datagram that announces a grant to a client is sent after the blade knows the grant.
//! - Reclaimed memory is free at the deadline, whatever its clients do.
//! - No program is given a grant that another one has or had.
//! - Beyond loopback no datagram is believed that was not made with the rack key, unless the
//!   operator has allowed it.

mod core;
mod daemon;
pub mod ledger;
mod names;
mod options;
mod rack_key;
mod rest;
mod status;

use std::io;

pub use daemon::{Collaborator, Ending, Farewell};
pub use names::{cluster_id, node_id};
pub use options::{CollaborateError, CollaborateOptions};
pub use rack_key::RackKeyError;
pub use rest::{BODY_LIMIT_BYTES, REPORT_LIMIT_BYTES};
pub use status::{ClientStatus, DatagramCounts, GrantStatus, PeerStatus, Status};

/// One sample of the node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Observation {
    /// Memory of the machine, or of the daemon's control group, in bytes.
    pub total_bytes: u64,
    /// Bytes that programs can still get.
    pub available_bytes: u64,
    /// Share of the time in which some program waited for memory, in thousandths, if known.
    pub pressure_permille: Option<u16>,
}

/// Samples the node's memory. Called four times a second.
pub trait Observe: FnMut() -> io::Result<Observation> + Send + 'static {}

impl<F: FnMut() -> io::Result<Observation> + Send + 'static> Observe for F {}
