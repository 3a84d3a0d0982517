//! How much memory a program has resident. The rows' limits are shares of this figure.
//!
//! Anonymous memory only, unlike the bench's own peak: it is what all places can move out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use farpool_bench::stage::is_servant;

/// How often a program's resident memory is read.
const SAMPLE_PERIOD: Duration = Duration::from_millis(20);

/// Watches how much anonymous memory a process has resident, and keeps the maximum.
#[derive(Debug)]
pub struct Peak {
    most_bytes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    /// Starts watching process `id`.
    pub fn watch(id: u32) -> Peak {
        let (most_bytes, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (most, stopped) = (Arc::clone(&most_bytes), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                most.fetch_max(tree_resident_bytes(id), Ordering::Relaxed);
                thread::sleep(SAMPLE_PERIOD);
            }
        });
        Peak { most_bytes, stop, thread: Some(thread) }
    }

    /// The most seen so far.
    pub fn bytes(&self) -> u64 {
        self.most_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic of the watcher only means that the peak stays what it was.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Anonymous memory resident in a process and in all below it. A sidecar's memory is its program's
/// and does not count again.
fn tree_resident_bytes(id: u32) -> u64 {
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
    let children = children.unwrap_or_default();
    let below = children.split_whitespace().filter_map(|id| id.parse().ok());
    resident_bytes(id) + below.map(tree_resident_bytes).sum::<u64>()
}

fn resident_bytes(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if field("Name:").is_some_and(is_servant) {
        return 0;
    }
    let kib =
        field("RssAnon:").and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
