//! The light protocol between clients and the shards of a key-value server: Gutierrez's KeyVault on
//! today's transports.
//!
//! Small fixed headers, requests that name their shard, credits instead of drops, answers in any
//! order; over TCP, unix sockets and shared memory. docs/contributors/kv-protocol.md describes
//! every byte.
//!
//! [`frame`] and [`message`] are the format, pure; [`ring`] is one direction in shared memory,
//! [`share`] the set-up of that memory between two processes; [`items`] is a server's memory as its
//! clients map it, [`lease`] the values they read there; [`owner`] tells which shard owns a key,
//! [`arbiter`] whose turn it is; [`client`] is the client.

#![warn(missing_docs)]

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
