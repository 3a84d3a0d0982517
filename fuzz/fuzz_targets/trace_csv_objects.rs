//! Any bytes as csv of objects' names and sizes.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/study/trace/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::import_any(bytes, &exercise::objects()));
