//! Handshakes of TLS 1.3 between clients and blades: rustls verifies both ends by the rack's
//! certificates (`farpool-identity`), and its keys are handed to the record layer
//! (`farpool-record`), which needs nothing else from then on.
//!
//! [`Dialer`] connects for clients: for pagers that ask a keeper, and, as a
//! [`farpool_fabric::Opener`], for the process that it is in. [`Accept`] is the blade's side, step
//! by step. A connection that a [`Dialer`] has handed over is watched as long as it is there:
//! within a second its user is told that its blade is not to be trusted any more.
//!
//! Invariants:
//! - Keys leave a handshake only when it is complete: both ends were verified, and a blade is a
//!   node whose certificate names the address that was dialed.
//! - rustls is given one record at a time, so that nothing of what follows the handshake is lost in
//!   its buffers.

#![warn(missing_docs)]

mod accept;
mod dial;
mod keys;
mod record;
mod watch;

pub use accept::{Accept, AcceptError, Accepted};
pub use dial::Dialer;
