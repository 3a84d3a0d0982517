//! Slows a node's blade while its host's own programs use all processors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use farpool_blade::Blade;
use farpool_host::processors::ProcessorFiles;
use farpool_policy::RateLimit;

/// Time between two checks: a program that wakes up has its processors back within two of them.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Checks the processors until the process ends.
///
/// # Errors
/// No thread can be started.
pub fn keep(blade: Arc<Blade>, busy_bytes_per_s: u64) -> anyhow::Result<()> {
    if busy_bytes_per_s == RateLimit::UNLIMITED_BYTES_PER_S {
        return Ok(());
    }
    let mut files = ProcessorFiles::default();
    let look = move || loop {
        if let Some(sight) = files.look(Instant::now()) {
            blade.consider(&sight, busy_bytes_per_s);
        }
        std::thread::sleep(LOOK_INTERVAL);
    };
    let thread = std::thread::Builder::new().name("fp-donor".into()).spawn(look);
    thread.map(drop).context("the processors cannot be watched")
}
