//! Any bytes with their checksum put right, so that the fuzzer gets past it.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/protocol/wire/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::decode_repaired(&mut bytes.to_vec());
});
