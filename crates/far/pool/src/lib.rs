//! The client's view of several blades as one memory: segments, superpages, pages.
//!
//! A [`Pool`] is one client. Its control operations (allocate, freeze, attach ...) take a lock and
//! may wait for a blade; pages travel over a [`Lane`], one per pager thread, which shares nothing
//! with other lanes except read-only access to the map, and takes no lock.
//!
//! After fork the child calls [`Pool::forget_after_fork`] on its copy, connects a pool of its own
//! under a new client id, and attaches the segments its parent froze.

mod account;
mod baton;
mod blades;
mod copies;
mod damage;
mod digests;
mod error;
mod groups;
mod hedging;
mod lane;
mod map;
mod mover;
mod moving;
mod parity;
mod pool;
mod refusals;
mod sealing;
mod seals;
mod shared;
mod sharing;
mod types;

pub use baton::{Baton, Revoked};
pub use copies::COPIES_LIMIT;
pub use error::{BladeIndex, PageError, PoolError};
pub use farpool_fabric::{
    Address, AddressError, Ask, ClientId, ClientLimits, Grant, GrantKey, Meters, Opener, RateLimit,
};
pub use farpool_kernel::Time;
pub use farpool_policy::redundancy::Redundancy;
pub use farpool_wire::FailureDomain;
pub use lane::Lane;
pub use mover::{Damage, DamageOutcome, Mover, Step, VERIFY_LIMIT_PAGES, Verified, VerifyPoint};
pub use parity::PARITY_DOMAINS;
pub use pool::{Pool, Still};
pub use refusals::Refusals;
pub use seals::Seals;
pub use types::{
    Alone, BladeSpec, COPY_PARTS, Completion, CopyDesk, Errand, FrozenToken, LostBlade, MAX_BLADES,
    MAX_SEGMENTS, PageRead, PageWrite, PoolConfig, SUPERPAGE_PAGES, SegmentHandle, SegmentPage,
    TOKEN_PARTS, fresh_client,
};
