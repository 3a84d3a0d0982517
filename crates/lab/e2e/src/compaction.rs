//! Memory compaction as noise: the kernel keeps migrating pages, as kcompactd, huge pages and NUMA
//! balancing do on a busy server.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::skip;

const COMPACT_MEMORY: &str = "/proc/sys/vm/compact_memory";
/// Pause between two compactions of the whole machine. Each takes some milliseconds.
const PAUSE: Duration = Duration::from_millis(20);

/// Compacts the machine's memory until it is dropped.
#[derive(Debug)]
pub struct Compaction {
    over: Arc<AtomicBool>,
    rounds: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Compaction {
    /// Starts compacting. Returns None, and skips the test with the reason, if this kernel or this
    /// user cannot compact memory.
    pub fn start() -> Option<Compaction> {
        match OpenOptions::new().write(true).open(COMPACT_MEMORY) {
            Ok(file) => Some(Compaction::with(file)),
            Err(error) => {
                skip(&format!("{COMPACT_MEMORY} cannot be written to: {error}"));
                None
            }
        }
    }

    fn with(mut file: File) -> Compaction {
        let over = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU32::new(0));
        let (is_over, counted) = (over.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            while !is_over.load(SeqCst) {
                if file.write_all(b"1").is_ok() {
                    counted.fetch_add(1, SeqCst);
                }
                std::thread::sleep(PAUSE);
            }
        });
        Compaction { over, rounds, thread: Some(thread) }
    }

    /// Number of compactions so far.
    pub fn rounds(&self) -> u32 {
        self.rounds.load(SeqCst)
    }
}

impl Drop for Compaction {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
