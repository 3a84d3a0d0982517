//! Any bytes as an address a line.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/study/trace/tests/exercise/mod.rs"]
mod exercise;

use farpool_trace::import::Format;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::import_any(bytes, &Format::Ramulator));
