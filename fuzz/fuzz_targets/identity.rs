//! Any bytes as certificates, keys, lists of revoked certificates, and names of who is who.
#![no_main]

#[path = "../../crates/protocol/identity/tests/common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../../crates/protocol/identity/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::read_outside(bytes));
