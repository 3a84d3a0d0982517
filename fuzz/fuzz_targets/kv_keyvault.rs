//! Any bytes as KeyVault frames, answered by a small shard that is full, and as a server's answers.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cache/kv-protocol/tests/exercise/mod.rs"]
mod exercise;
#[path = "../../crates/cache/kv-protocol/tests/exercise_keyvault/mod.rs"]
mod exercise_keyvault;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The first byte says which policy the store has.
    if let Some((&policy, frames)) = bytes.split_first() {
        exercise_keyvault::answer_any(frames, exercise::policy_of(policy));
    }
});
