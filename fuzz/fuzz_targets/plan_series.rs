//! Any bytes as utilisation in text.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/study/plan/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::read_any_series(bytes));
