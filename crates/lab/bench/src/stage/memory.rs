//! What a process tree holds in local memory, counted as for the limit: proportional set sizes
//! summed over all processes (a page shared by three counts a third in each), without the memory of
//! a blade that happens to be on the same machine, which stands for another machine's memory.

use super::tree::tree;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a tree is sampled.
const PERIOD: Duration = Duration::from_millis(20);
/// Each pause is at least this many times as long as the sample before it, since sampling holds the
/// tree's locks.
const DUTY: u32 = 5;
/// Least shared memory of a process for which its mappings are searched for a blade's.
const SHARED_WORTH_ASKING_BYTES: u64 = 1 << 20;
/// Names of a blade's memory in /proc/pid/smaps.
const BLADE_MEMORY: [&str; 2] = ["/memfd:farpool-segment", "/memfd:farpool-hugetlb"];

/// The most memory of a process tree, which a thread of its own samples.
#[derive(Debug)]
pub(crate) struct Peak {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    most_bytes: AtomicU64,
    stop: AtomicBool,
}

impl Peak {
    /// Starts watching the tree below (and with) process `root`.
    pub(crate) fn watch(root: u32) -> Self {
        let state = Arc::new(State::default());
        let watcher = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            while !watcher.stop.load(Relaxed) {
                let start = Instant::now();
                watcher.most_bytes.fetch_max(tree_bytes(root), Relaxed);
                std::thread::park_timeout(PERIOD.max(start.elapsed() * DUTY));
            }
        });
        Self { state, thread: Some(thread) }
    }

    /// Returns the most memory so far, in bytes.
    pub(crate) fn so_far_bytes(&self) -> u64 {
        self.state.most_bytes.load(Relaxed)
    }

    /// Ends the sampling and returns the most memory, in bytes.
    pub(crate) fn stop(mut self) -> u64 {
        self.end();
        self.so_far_bytes()
    }

    fn end(&mut self) {
        self.state.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread cannot panic: it only reads files and adds numbers up.
            let _ = thread.join();
        }
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the memory of the tree now. Processes that end while it is read count as nothing;
/// sidecars are counted with the programs whose memory they share.
pub(crate) fn tree_bytes(root: u32) -> u64 {
    let programs = tree(root).into_iter().filter(|process| !process.is_sidecar);
    programs.map(|process| process_bytes(process.id)).sum()
}

fn process_bytes(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let shared = field_bytes(&rollup, "Pss_Shmem:");
    let blade = if shared >= SHARED_WORTH_ASKING_BYTES {
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        blade_bytes(&smaps)
    } else {
        0
    };
    field_bytes(&rollup, "Pss:").saturating_sub(blade)
}

/// Returns the sum in bytes of a field over all mappings of an smaps text.
fn field_bytes(smaps: &str, name: &str) -> u64 {
    let lines = smaps.lines().filter_map(|line| line.strip_prefix(name));
    let kib = lines.filter_map(|value| value.trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.sum::<u64>() * 1024
}

/// Returns the proportional set size of the mappings that are a blade's memory.
fn blade_bytes(smaps: &str) -> u64 {
    let mut in_blade = false;
    let mut sum = 0;
    for line in smaps.lines() {
        if let Some(name) = mapping_name(line) {
            in_blade = BLADE_MEMORY.iter().any(|blade| name.starts_with(blade));
        } else if in_blade {
            sum += field_bytes(line, "Pss:");
        }
    }
    sum
}

/// Returns the name in the head line of a mapping, which may be empty. Returns None for other
/// lines.
fn mapping_name(line: &str) -> Option<&str> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let is_hex = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
    (is_hex(start) && is_hex(end)).then(|| rest.splitn(5, ' ').nth(4).unwrap_or("").trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Running;
    use std::process::Command;

    const SMAPS: &str = "\
7f0000000000-7f0001000000 rw-s 00000000 00:01 12 /memfd:farpool-segment (deleted)
Size:              16384 kB
Pss:                1000 kB
Pss_Dirty:          1000 kB
7f0001000000-7f0002000000 rw-s 00000000 00:01 13 /dev/shm/other
Pss:                 200 kB
7f0002000000-7f0003000000 rw-p 00000000 00:00 0 
Pss:                  30 kB
";

    #[test]
    fn blade_memory_is_told_from_other_shared_memory() {
        assert_eq!(blade_bytes(SMAPS), 1000 * 1024);
        assert_eq!(field_bytes(SMAPS, "Pss:"), 1230 * 1024);
        assert_eq!(mapping_name("7f00-7f10 rw-p 00000000 00:00 0 "), Some(""));
        assert_eq!(mapping_name("Pss_Anon: 5 kB"), None);
    }

    /// Watches a child: other tests start programs below this process, which would count as its
    /// own.
    #[test]
    fn a_process_is_seen_to_grow() {
        let mut command = Command::new("sh");
        command.args(["-c", "a=$(head -c 32000000 /dev/zero | tr '\\0' x); sleep 100"]);
        let shell = Running::start("sh", &mut command).expect("sh starts");
        let peak = Peak::watch(shell.id());
        let start = Instant::now();
        while peak.so_far_bytes() < 30 << 20 {
            assert!(start.elapsed() < Duration::from_secs(30), "32 MB were not seen");
            std::thread::sleep(PERIOD);
        }
        assert!(peak.stop() >= 30 << 20);
    }
}
