//! What the server reports about itself: to clients that ask, to watchers, to Prometheus.

pub(crate) mod admin;
pub(crate) mod conns;
pub(crate) mod dump;
pub(crate) mod journal;
pub(crate) mod metrics;
pub(crate) mod report;
pub(crate) mod stats;
pub(crate) mod tuning;
pub(crate) mod watchers;
