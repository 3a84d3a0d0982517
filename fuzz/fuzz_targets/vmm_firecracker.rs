//! Any bytes as Firecracker's message to the process that serves its guest's page faults.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/far/vmm/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::read_message(bytes));
