//! Answers as pages: the findings, tables and plots of each.

mod cost;
mod dense;
mod pack;
mod pool;
mod reproduction;

pub use cost::cost;
pub use dense::dense;
pub use pack::pack;
pub use pool::pool;
pub use reproduction::{errata_table, reproduction, reproduction_table};

const GIB: f64 = farpool_units::GIB as f64;

/// A count on an axis.
#[allow(clippy::cast_precision_loss)] // of machines and servers, far below 2^53
fn place(count: usize) -> f64 {
    count as f64
}
