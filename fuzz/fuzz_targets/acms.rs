//! Any bytes as a collaboration datagram: decoded, and handed to a node with a right checksum.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/rack/acms/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::decode_any(bytes);
    exercise::feed_any(bytes);
});
