//! Any bytes as a stream's beginning.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/protocol/wire/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::decode_any(bytes));
