//! Any bytes as requests to the key-value server, in any pieces.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cache/kv-protocol/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The first bytes say how the others are cut.
    if let Some((cuts, stream)) = bytes.split_first_chunk::<4>() {
        exercise::scan_any(stream, cuts);
    }
});
