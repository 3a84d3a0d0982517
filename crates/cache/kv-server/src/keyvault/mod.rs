//! Connections that speak KeyVault: over a byte stream, or through rings in shared memory.

mod frames;
pub(crate) mod gather;
mod lease;
mod ring_client;
pub(crate) mod ring_clients;
pub(crate) mod state;
mod turns;
