//! The tiers below memory, for items that memory has no room for: larger, but slower.
//!
//! A tier keeps [`record`](farpool_kv_store::record)s in zones that are written once and reused in
//! turn ([`log`]). Only the index knows what is in it; a record from a tier is accepted only if
//! checksum, seal and hash are right.

pub mod far;
pub mod flash;
pub mod log;
mod staging;
