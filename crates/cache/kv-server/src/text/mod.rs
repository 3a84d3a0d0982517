//! memcached's text protocol: parsing input in batches, and the keys of a `get`.

pub(crate) mod get;
pub(crate) mod serve;

/// The most requests that are planned together.
pub(crate) const BATCH: usize = 32;
