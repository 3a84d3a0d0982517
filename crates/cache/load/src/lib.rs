//! The load generator of `farpool kv bench`.
//!
//! `workload` generates the requests: keys, operations, lengths of keys and values, all as
//! functions of a seed. `client` sends them: connections, schedule, replies, latency. A value is a
//! function of its key and its length, so that every reply is checked to the byte.

pub mod client;
pub mod latency;
pub mod sweep;
pub mod workload;
