//! The load generator of `farpool kv bench`.
//!
//! `workload` says what is asked: which key, which operation, how long keys and values are, all as
//! functions of a seed. `client` asks it: connections, schedule, replies, latency. A value is a
//! function of its key and its length, so that every reply is checked to the byte.

pub mod client;
pub mod latency;
pub mod sweep;
pub mod workload;
