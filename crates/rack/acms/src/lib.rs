//! Nodes that lend each other memory without a controller: ACMS, the Autonomous Collaborative
//! Memory System (Samih 2011), made safe for a network that loses, repeats and reorders.
//!
//! Pure code: no I/O, no clock, no randomness of its own. [`Member`] takes time, datagrams and
//! memory use, and gives datagrams to send and [`Action`]s for the shell.
//!
//! * [`Thresholds`]: client, neutral or server (section 4.2, Figure 3).
//! * [`next_harvest`]: how much a server lends.
//! * [`Message`]: the datagrams (section 4.3); [`limits`]: the timers.
//! * [`Member`]: membership (foca) and the protocol of one node.
//! * `sim` (feature `sim`): many nodes on a seeded network, with the invariants checked.
//!
//! Invariants, checked by properties and by the simulation:
//! - No byte of a server has two owners, and only offered memory is lent.
//! - A client stops using a grant before the server can lend its memory to another, except where a
//!   reclaim's deadline cut it off; then the blade refuses the grant's epoch.
//! - A server has its memory back at the reclaim's deadline, whatever its clients do.
//! - Lost, repeated, delayed, reordered datagrams, earlier lives and clocks that jump break none of
//!   these.
//! - With a rack key, a datagram that no node of the cluster has just made changes nothing.

mod arbitration;
mod borrower;
mod broadcast_timing;
mod bytes_io;
mod classify;
mod config;
mod datagram;
mod harvest;
mod identity;
mod ids;
mod lender;
pub mod limits;
mod membership;
pub mod message;
mod node;
mod outbox;
mod peers;
mod rack_key;
mod ratio;
mod replay;
mod rng;
mod rumours;
#[cfg(feature = "sim")]
pub mod sim;

pub use arbitration::{Arbitration, Candidate, UnknownArbitration};
pub use classify::{
    Band, Class, MemoryUse, PRESSURE_RESUME_PERMILLE, PRESSURE_STOP_PERMILLE, ThresholdError,
    Thresholds,
};
pub use config::{
    BORROWER_PERCENT, Config, ConfigError, LEASE_MS, LEASE_MS_MIN, RECLAIM_DEADLINE_MS,
    RECLAIM_DEADLINE_MS_MIN, UNUSED_MS, UNUSED_MS_MIN,
};
pub use datagram::DecodeError;
pub use harvest::{
    HARVEST_HOLD_MS, HARVEST_INTERVAL_MS, HARVEST_MARGIN_PERMILLE, HARVEST_STEP_PERMILLE, Harvest,
    lend_limit_bytes, look_interval, next_harvest,
};
pub use ids::{ClusterId, Epoch, GrantId, GrantKey, Incarnation, NodeId, Peer, RequestNo, Zone};
pub use membership::{Counters, Member};
pub use message::{Header, Message, Mood, NackReason, Rumour, RumourKind};
pub use outbox::{Action, MoveReason, Output, RevokeReason};
pub use rack_key::{RACK_KEY_BYTES, RACK_KEYS_MAX, RackKey, RackKeys};
pub use ratio::Side;
pub use rng::Rng;
