//! A key-value server for very large caches.
pub mod clock;
pub mod heap;
pub mod observe;
pub mod protocol;
pub mod server;
pub mod store;
pub mod tier;
