//! The sidecar as bytes: a static position-independent executable, made by `build.rs`.
//!
//! A crate of its own, because a package that only wants to inject something else (a test program)
//! should not build the sidecar.

/// The ELF file of `farpool-sidecar`.
pub static SIDECAR_ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/farpool-sidecar"));
