//! Any bytes as a collaboration datagram: decoded, handed to a node with a right checksum, and
//! handed to a node with a rack key, which refuses them.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/rack/acms/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::decode_any(bytes);
    exercise::feed_any(bytes);
    exercise::refuse_any(bytes);
});
