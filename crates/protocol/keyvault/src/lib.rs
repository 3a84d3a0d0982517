//! The light protocol between clients and the shards of a key-value server: Gutierrez's KeyVault on
//! today's transports.
//!
//! Small fixed headers, requests that name their shard, credits instead of drops, answers in any
//! order; over TCP, unix sockets and shared memory. docs/contributors/kv-protocol.md describes
//! every byte.
//!
//! [`frame`] and [`message`] are the format, pure; [`ring`] is shared memory's two directions,
//! [`share`] how two processes come to have it; [`items`] is a server's memory as its clients read
//! it, [`lease`] what they read there; [`owner`] says which shard has a key, [`arbiter`] whose turn
//! it is; [`client`] is the client.

pub mod arbiter;
mod checksum;
pub mod client;
pub mod frame;
pub mod items;
pub mod lease;
pub mod message;
pub mod owner;
pub mod ring;
pub mod share;
