//! The per-server daemon in a rack with a controller: it lends this machine's memory through a
//! blade as the controller says, and takes it back when the machine's own programs need it.
//!
//! * [`intent`]: from what shall stand and what stands to what is to be done; pure.
//! * [`pressure`]: how much may be lent, in the steps of the collaborative protocol; pure.
//!   [`farpool_host`] reads what it decides from.
//! * `agent`: registers, reports, obeys. `link`: what errors mean and when to try again; pure.
//! * `lender`: watches memory. `daemon`: all of it put together.
//!
//! Invariants: the blade goes on without a controller, and grants change only by its word. The
//! offer never exceeds what the machine's own programs leave, also while no controller answers.

mod agent;
mod daemon;
pub mod intent;
mod lender;
mod link;
mod observe;
pub mod pressure;
mod shared;

pub use daemon::{Ended, NodeDaemon, NodeError, NodeHandle, NodeOptions};
