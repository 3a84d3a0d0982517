//! Connections that speak KeyVault: over a stream like any other, or through rings in shared
//! memory.

mod frames;
pub(crate) mod gather;
mod lease;
pub(crate) mod light;
mod port;
pub(crate) mod ports;
mod turns;
