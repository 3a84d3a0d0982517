//! Where items go that memory has no room for: below it lie tiers that are larger and answer later.
//!
//! A tier keeps [`record`](farpool_kv_store::record)s in zones that are written once and reused in
//! turn ([`log`]). The index alone knows what is in it; what a tier gives back is believed only if
//! checksum, seal and hash are right.

pub mod far;
pub mod flash;
pub mod log;
pub mod pages;
mod staging;
