//! The audit log: a line of JSON for each change that was asked for and each request that was
//! refused, in which each line has the hash of the one before it.
//!
//! Who changes, removes, inserts or reorders lines in the middle has to make all later hashes anew,
//! and then the last hash is another: whoever has noted one somewhere else can tell
//! ([`Verified::contains`]). A log without its last lines is a right log; only such a note tells.
//!
//! What changes who may use what can be announced by a line before it is done ([`Stage::Intent`]):
//! then no crash leaves it without one, and [`Verified::open`] names what was announced and has no
//! outcome.
//!
//! * [`chain`] makes and verifies lines; pure;
//! * [`log`] keeps them in a file.

pub mod chain;
pub mod log;

pub use chain::{Broken, Chain, Entry, Hash, Stage, Verified, verify};
pub use log::{AuditError, AuditLog};
