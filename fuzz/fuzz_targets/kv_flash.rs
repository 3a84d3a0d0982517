//! Any bytes as parts of a flash file of the key-value server.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cache/kv-tier/tests/exercise_flash/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::decode_any(bytes));
