//! A node of a collaboration: it lends its idle memory to others and borrows theirs, without a
//! controller.
//!
//! * [`ledger`]: which program of this node has which grant; pure.
//! * `core`: the protocol's [`Member`](farpool_acms::Member), the ledger and the blade behind one
//!   lock; carries out what they want.
//! * `daemon`: sockets, threads, the beginning and the end.
//! * `rest`: HTTP for the programs of this node (`farpool run --pool`) and for people.
//!
//! Invariants:
//! - A datagram that tells a client of a grant leaves after the blade knows the grant.
//! - Reclaimed memory is free at the deadline, whatever its clients do.
//! - No program is given memory that another one has or had.

mod core;
mod daemon;
pub mod ledger;
mod names;
mod options;
mod rest;
mod status;

use std::io;

pub use daemon::{Collaborator, Ending, Farewell};
pub use names::{cluster_id, node_id};
pub use options::{CollaborateError, CollaborateOptions};
pub use rest::{BODY_LIMIT_BYTES, REPORT_LIMIT_BYTES};
pub use status::{ClientStatus, DatagramCounts, GrantStatus, PeerStatus, Status};

/// One look at the node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Observation {
    /// What there is: of the machine, or of the daemon's control group.
    pub total_bytes: u64,
    /// Bytes that programs could still get.
    pub available_bytes: u64,
    /// Share of the time in which some program waited for memory, thousandths, where that is known.
    pub pressure_permille: Option<u16>,
}

/// Looks at the node's memory; called four times a second.
pub trait Observe: FnMut() -> io::Result<Observation> + Send + 'static {}

impl<F: FnMut() -> io::Result<Observation> + Send + 'static> Observe for F {}
