//! Bars that several rows are held to.

/// Time of a page beside that of moving and copying it.
pub(super) const EVICT_RATIO: f64 = 1.5;
