//! Virtual machines of other monitors than QEMU, restored from far memory: Firecracker and Cloud
//! Hypervisor.

#![allow(unreachable_pub, reason = "a few modules; the root says what leaves the crate")]

pub mod wire;
