//! Any bytes as a trace file.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/study/trace/tests/exercise/mod.rs"]
mod exercise;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::LazyLock;

/// A file in memory, without a name, that every input goes through.
static FILE: LazyLock<File> =
    LazyLock::new(|| tempfile::tempfile_in("/dev/shm").expect("a file in memory"));

fn place() -> PathBuf {
    format!("/proc/self/fd/{}", FILE.as_raw_fd()).into()
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = exercise::read_any(&place(), bytes);
});
