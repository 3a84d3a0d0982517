//! Children of the program: each has what was resident at the fork, and gets the rest when it
//! touches it, or a sidecar of its own that takes over.
//!
//! The event of a fork brings the child's userfaultfd. Until that change is applied no page moves,
//! so the page states are those of the fork ([`crate::life::steward`] takes them down); what is far
//! is then frozen, so that nothing of it changes for as long as a child may want it. A thread of
//! its own ([`server`]) answers the faults of all children ([`child`]), by what each still lacks
//! ([`remains`]).
//!
//! A child that the keeper gives a sidecar of its own is handed over: its userfaultfd, and where
//! its pages are ([`handover`]), which its own pager then has ([`inherit`]).

pub mod child;
pub mod elsewhere;
pub mod handover;
pub mod inherit;
mod orders;
pub mod remains;
pub mod server;

pub use orders::{Children, Keeper, SETTLED};
