//! Far memory: taken at the start or as a pool grants it, kept, and given back on request.
//!
//! [`keeper`] is the thread that does this, [`plan`] decides how to respond to the pool, [`rack`]
//! is the thread that talks to the pool, [`shard`] is each serving thread's part.

mod away;
mod keeper;
mod news;
pub(crate) mod order;
mod plan;
mod rack;
pub(crate) mod shard;

use farpool_api::ApiError;
use farpool_identity::Refusal;
use farpool_pool::PoolError;

pub use crate::settings::{FarSettings, FarSource, PoolOptions};
pub(crate) use keeper::Keeper;

/// Why there is no far memory.
#[derive(Debug, thiserror::Error)]
pub enum FarError {
    #[error("far memory: {0}")]
    Pool(#[from] PoolError),
    #[error("the certificate is of no use to far memory: {0}")]
    Certificate(Refusal),
    #[error("far memory")]
    Api(#[from] ApiError),
    #[error(
        "{bytes} bytes of far memory are too few for {shards} threads: give at least {least} bytes"
    )]
    TooSmall { bytes: u64, shards: usize, least: u64 },
    #[error("{bytes} bytes are more far memory than a server can take at a time")]
    TooLarge { bytes: u64 },
    #[error("no address that could be used among {addresses:?}")]
    Address { addresses: String },
}
