//! Any bytes as requests of memcached's binary protocol: read in any pieces, and executed.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cache/kv-protocol/tests/exercise/mod.rs"]
mod exercise;
#[path = "../../crates/cache/kv-protocol/tests/exercise_binary/mod.rs"]
mod exercise_binary;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The first bytes say which rules and which policy apply, how fast time goes, and how the
    // others are cut.
    if let Some((&[rules, policy, step_s, cuts @ ..], stream)) = bytes.split_first_chunk::<7>() {
        exercise_binary::scan_any(stream, rules, &cuts);
        exercise_binary::execute_any(stream, step_s, exercise::policy_of(policy));
    }
});
