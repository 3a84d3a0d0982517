//! Any bytes as an audit log.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(verified) = farpool_audit::verify(bytes, None) {
        assert!(verified.end.number >= verified.first);
    }
});
