//! Any bytes as a catalogue of servers, prices or designs.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/study/plan/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::parse_any_catalog(bytes));
