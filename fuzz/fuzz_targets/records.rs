//! Any bytes as records, and any sealed content that was changed.
#![no_main]

#[path = "../../crates/far/record/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::receive_any(bytes));
