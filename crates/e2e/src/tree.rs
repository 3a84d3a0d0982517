//! The processes below one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Ended, and nobody has asked for its status yet.
const ZOMBIE: &str = "Z";

/// Process ids of all living descendants of a process, not itself.
pub fn descendants(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        if let Some((_, parent)) = state_and_parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut found, mut next) = (Vec::new(), vec![root]);
    while let Some(pid) = next.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        next.extend(&below);
        found.extend(below);
    }
    found
}

/// Whether a process is there and not only waiting to be asked for its status.
pub fn is_alive(pid: u32) -> bool {
    state_and_parent(pid).is_some_and(|(state, _)| state != ZOMBIE)
}

fn state_and_parent(pid: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// Sends a signal to one process; one that is gone is no error.
pub fn signal(pid: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(pid)
        && pid > 1
    {
        // SAFETY: sends a signal to a process of this test's own.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Stops all descendants of a process for a while (SIGSTOP), or lets them go on (SIGCONT).
pub fn pause_below(root: u32, paused: bool) {
    let all = descendants(root);
    all.iter().for_each(|pid| signal(*pid, if paused { libc::SIGSTOP } else { libc::SIGCONT }));
}

/// Ends a process and all its descendants, whatever sessions they moved to.
pub fn end(root: u32) {
    let below = descendants(root);
    signal(root, libc::SIGKILL);
    below.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
}

/// What a process and its descendants are at, thread by thread: name, state and where the kernel has it wait.
pub fn describe(root: u32) -> String {
    let mut lines = String::new();
    for pid in std::iter::once(root).chain(descendants(root)) {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in tasks.map(|entry| entry.path()) {
            let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
            let stat = read("stat");
            let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
            let (name, place) = (read("comm"), read("wchan"));
            lines += &format!("\n  {pid} {} {} {place}", name.trim(), state.unwrap_or("?"));
        }
    }
    lines
}

/// Proportional set size of all descendants of a process together, in bytes, and how many they are.
pub fn proportional_set_bytes(root: u32) -> u64 {
    let of = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find(|line| line.starts_with("Pss:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    descendants(root).into_iter().filter_map(of).sum::<u64>() * 1024
}

/// What a process tree held at its peak, looked at again and again.
#[derive(Debug)]
pub struct Peak {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<(u64, u32)>>,
}

impl Peak {
    /// Between two looks. Each costs the kernel a walk over the page tables, so the real pause is longer.
    const STEP: Duration = Duration::from_millis(20);

    /// Watches the descendants of `root`.
    pub fn watch(root: u32) -> Peak {
        use std::sync::atomic::Ordering::Relaxed;
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut peak_bytes, mut looks) = (0, 0);
            while !flag.load(Relaxed) {
                let started = Instant::now();
                peak_bytes = peak_bytes.max(proportional_set_bytes(root));
                looks += 1;
                std::thread::sleep(Peak::STEP.saturating_sub(started.elapsed()));
            }
            (peak_bytes, looks)
        });
        Peak { stop, thread: Some(thread) }
    }

    /// Ends the watch; the peak in bytes and how often it was looked.
    pub fn end(mut self) -> (u64, u32) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
