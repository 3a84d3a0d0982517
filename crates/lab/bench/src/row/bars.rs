//! Bars that several rows have.

/// Time to evict a page, divided by the time to move and copy it.
pub(super) const EVICT_RATIO: f64 = 1.5;
