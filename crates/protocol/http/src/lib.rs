//! The HTTP toolkit of the REST interfaces, for the servers behind them.
//!
//! * `extract`: turns requests into types: JSON bodies, the parameter of a path, the query.
//! * `refusal`: turns refusals and JSON into answers.
//! * [`access`]: what each role may ask, and how a server is protected.
//! * [`bearer`]: the token that requests present.
//! * [`origin`]: which hosts and sites may ask.
//! * [`serve`]: connections, their limits and times; `connections` counts them.
//! * `bare`: words for refusals that the HTTP library makes by itself.
//! * [`tls`]: certificates below HTTP.
//! * [`events`]: events as an endless stream.
//! * [`metrics`]: figures for Prometheus.
//!
//! Invariants:
//! - Every refusal is a problem document (RFC 9457), those of the extractors included.
//! - A token is compared in a time that depends on lengths only.
//! - Beyond loopback nothing is served in the clear, unless the operator insists.
//! - Nothing here knows what a server serves: routes, limits and state are its own. Only [`access`]
//!   names paths: who may ask them is one table for all servers.

#![warn(missing_docs)]

pub mod access;
mod audit;
mod bare;
pub mod bearer;
mod connections;
pub mod events;
mod extract;
pub mod metrics;
pub mod origin;
mod refusal;
pub mod serve;
pub mod tls;

pub use access::{Asker, Protection, Unprotected};
pub use extract::{Asked, Body, Name};
pub use refusal::{PROBLEM_TYPE, Refusal, json};
