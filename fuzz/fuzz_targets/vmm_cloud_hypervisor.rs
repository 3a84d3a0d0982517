//! Any bytes as a hand-off, an answer, a fault and a configuration of Cloud Hypervisor's.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/far/vmm/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::read_migration(bytes));
