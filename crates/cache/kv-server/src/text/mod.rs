//! memcached's text protocol: what a client sent, in batches, and the keys of a `get`.

pub(crate) mod get;
pub(crate) mod serve;

/// Requests that are looked at together.
pub(crate) const BATCH: usize = 32;
