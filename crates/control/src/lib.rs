//! The rack's controller.
mod core;
mod metrics;
pub mod model;
mod reconcile;
pub mod store;
