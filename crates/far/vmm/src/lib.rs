//! Virtual machines of other monitors than QEMU, restored from far memory: Firecracker and Cloud
//! Hypervisor.
//!
//! A snapshot's memory is written to the pool once (`store`); guests that are restored from it get
//! each page when they touch it. `wire` is what the monitors say, `guest` what a guest lacks (both
//! pure); `firecracker` and `cloud_hypervisor` serve them. Memory only comes back to a guest this
//! way: nobody can take it from another process. For that, the monitor itself is run under
//! `farpool run`.

#![allow(unreachable_pub, reason = "a few modules; the root says what leaves the crate")]

pub mod cloud_hypervisor;
pub mod firecracker;
mod guest;
mod page_set;
mod socket;
mod store;
mod sys;
pub mod wire;

pub use socket::{ListenError, Listening, SocketError, Stop};
pub use store::{Image, Loader, Store, StoreError};
