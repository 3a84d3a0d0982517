//! Any bytes as a client's stream, executed on a small shard that is full.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cache/kv-protocol/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The first bytes say which policy the store has, and how fast time goes.
    if let Some((&[policy, step_s], stream)) = bytes.split_first_chunk() {
        exercise::execute_any(stream, step_s, exercise::policy_of(policy));
    }
});
