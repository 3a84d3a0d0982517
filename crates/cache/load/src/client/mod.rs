//! The client: connections, schedule, replies, latency.

pub mod asked;
mod binary;
pub mod echo;
mod keyvault;
pub mod link;
pub mod measured;
pub mod reply;
pub mod request;
pub mod run;
pub mod value;
