//! The per-server daemon in a rack with a controller: it lends this machine's memory through a
//! blade as the controller says, and takes it back when the machine's own programs need it.
//!
//! * [`intent`]: computes what has to be done from the intended and the standing grants; pure.
//! * [`pressure`]: how much may be lent, in the steps of the collaborative protocol; pure.
//!   [`farpool_host`] reads the memory use from which that follows.
//! * `agent`: registers, reports, carries out. `link`: what errors mean and when to retry; pure.
//! * `lender`: watches memory. `daemon`: puts all of this together.
//!
//! Invariants: the blade keeps serving without a controller, and grants change only on the
//! controller's order. The offer never exceeds what the machine's own programs leave, even while no
//! controller answers.

mod agent;
mod daemon;
pub mod intent;
mod lender;
mod link;
mod observe;
pub mod pressure;
mod shared;

pub use daemon::{Ended, NodeDaemon, NodeError, NodeHandle, NodeOptions};
