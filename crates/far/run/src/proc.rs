//! What /proc reports of a process: when it started, whether it has ended, its children, its
//! memory.

use farpool_units::PAGE_BYTES_U64;

use crate::holder::Holder;

/// True if a process has ended with all its threads and waits to be reaped: its memory is gone.
pub(crate) fn is_zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().next());
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    state == Some("Z") && threads() <= 1
}

pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The children of all threads of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of_task = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let texts = tasks.flatten().filter_map(|task| of_task(task).ok());
    texts.flat_map(|text| numbers(&text)).collect()
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// None if there is no such process, or it has ended.
pub(crate) fn anonymous_bytes(pid: u32) -> Option<u64> {
    Holder::of(pid).map(|holder| holder.resident().anonymous_pages * PAGE_BYTES_U64)
}
