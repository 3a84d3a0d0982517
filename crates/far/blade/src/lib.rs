//! The memory blade: memory in superpages, lent to clients over sockets or shared memory.
//!
//! From the inside out: [`table`] decides (pure: who has what, quotas, freezing, leases; time is an
//! argument), [`Store`] holds the bytes, [`Blade`] joins the two, [`Server`] puts them on sockets.
//!
//! Invariants:
//! - Memory lent under a grant can be taken back at any time: no other process holds a descriptor
//!   of it.
//! - A page is reachable only through a segment that its client uses; every access is checked in
//!   the table.
//! - Memory that a client freed is zeroed before it counts as free again.
//! - There is no global state and no signal handling, so that a blade can live inside another
//!   program (`farpool run` embeds one).

mod audit;
mod blade;
mod config;
mod donor_protection;
mod gate;
mod journal;
mod memory;
mod server;
mod sources;
mod sys;
pub mod table;
mod takeover;

pub use blade::{Blade, BladeStat, CapacityError, Lent, Past, Revoked};
pub use config::{BackingKind, BackingKindError, BladeConfig, FlashConfig, PackConfig, Persist};
pub use farpool_wire::GrantKey;
pub use memory::{FlashStat, PackStat, SegmentMemory, Store};
pub use server::{ServeError, Server, Serving, ShutdownHandle, SteppedServer};
pub use table::{GrantError, GrantId, GrantSpec, GrantStat};
pub use takeover::{Predecessor, TakeoverError};
