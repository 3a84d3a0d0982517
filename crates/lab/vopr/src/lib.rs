//! A viewstamped-operation style simulator, after TigerBeetle's VOPR: the pool, the fabric and the
//! blades, all of them the product's own code, in one thread, with a virtual clock and a network
//! that fails as a seed says. The same seed gives the same trial.
//!
//! Two questions are asked of each trial. *Safety*: under any faults, no read returns bytes that
//! were not the last written ([`Model`]); it may fail, and that is said. *Liveness*: while blades
//! live and only the network fails, and not for long, nothing fails and nothing takes long; and a
//! blade that is full is not asked again and again, but gets what it did not take once it has room.
//!
//! What is simulated: time ([`farpool_kernel::Time`]), the network between socket pairs
//! ([`network`]), the ends and pauses of blades ([`world`]), their refusals of writes, and other
//! pages in the place of those that they hold, to clients that seal theirs. What is not: the pager,
//! but for what its evictor does with blades that take no pages ([`farpool_pool::Refusals`]),
//! shared memory, and threads that run at the same time.
//!
//! * [`clock`] holds the virtual time;
//! * [`network`] carries bytes between a client's and a blade's socket, and spoils them;
//! * `liar` makes other pages of a blade's;
//! * [`world`] holds hosts and flows, and passes the time while the product's code waits;
//! * [`model`] knows the bytes that a page may have;
//! * `lent` is a lane with the memory that it is lent;
//! * [`program`] reads, writes, allocates, forks and moves, and asks the model;
//! * [`trial`] turns a seed into all of that.

pub mod clock;
mod lent;
mod liar;
pub mod model;
pub mod network;
pub mod program;
pub mod trial;
pub mod world;

pub use model::Model;
pub use trial::{Flaws, Mode, Report, run, run_with};
