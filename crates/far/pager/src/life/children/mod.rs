//! Children of the program: each has what was resident at the fork, and gets other pages when it
//! touches them, or through a sidecar of its own that takes over.
//!
//! The event of a fork carries the child's userfaultfd. Until that change is applied no page moves,
//! so the page states are those of the fork ([`crate::life::steward`] records them); the far pages
//! are then frozen, so that they do not change as long as a child may need them. A separate thread
//! ([`server`]) answers the faults of all children ([`child`]), by what each still lacks
//! ([`remains`]).
//!
//! A child that the keeper gives its own sidecar is handed over: its userfaultfd, and the places of
//! its pages ([`handover`]), which its own pager takes over ([`inherit`]).

pub mod child;
pub mod elsewhere;
pub mod handover;
pub mod inherit;
mod orders;
pub mod remains;
pub mod server;

pub use orders::{Children, Keeper, SETTLED};
