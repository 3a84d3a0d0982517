//! Connections that speak KeyVault: over a stream like any other, or through rings in shared
//! memory.

mod frames;
pub(crate) mod gather;
mod lease;
mod ring_client;
pub(crate) mod ring_clients;
pub(crate) mod state;
mod turns;
