//! A trace file with any changes in its footer, its digest put right, so that the fuzzer gets past
//! it.
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

static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| exercise::whole_file());

libfuzzer_sys::fuzz_target!(|edits: &[u8]| {
    let whole = &*WHOLE;
    let _ = exercise::open_repaired(&place(), whole, edits);
});
