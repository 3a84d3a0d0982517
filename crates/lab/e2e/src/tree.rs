//! The descendants of a process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// State of a process that has ended and has not been waited for.
const ZOMBIE: &str = "Z";
/// The process name of a sidecar.
const SIDECAR_NAME: &str = "farpool-sidecar";
/// The process name of a warden.
const WARDEN_NAME: &str = "farpool-warden";

/// Process ids of all living descendants of a process, without the process itself.
pub fn descendants(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for pid in all() {
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

/// The living children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    all().filter(|pid| state_and_parent(*pid).is_some_and(|(_, of)| of == parent)).collect()
}

/// The programs: [`descendants`] without sidecars and their wardens.
pub fn programs(root: u32) -> Vec<u32> {
    descendants(root).into_iter().filter(|pid| !is_sidecar(*pid) && !is_warden(*pid)).collect()
}

/// The programs below a process that have their own memory, without the process itself.
pub fn forked(program: u32) -> Vec<u32> {
    owners(vec![program], program).split_off(1)
}

/// `owners`, and the programs below `root` that share memory with none of the processes before
/// them. This excludes a sidecar that is being injected and does not have its name yet, and a child
/// of vfork.
fn owners(mut owners: Vec<u32>, root: u32) -> Vec<u32> {
    for pid in programs(root) {
        if !owners.iter().any(|owner| share_memory(*owner, pid)) {
            owners.push(pid);
        }
    }
    owners
}

/// The sidecars of a program. They are not its descendants, but share its memory.
pub fn sidecars_in(program: u32) -> Vec<u32> {
    all().filter(|pid| is_sidecar(*pid) && share_memory(program, *pid)).collect()
}

/// The wardens of a program's sidecars.
pub fn wardens_in(program: u32) -> Vec<u32> {
    all().filter(|pid| is_warden(*pid) && share_memory(program, *pid)).collect()
}

fn share_memory(one: u32, other: u32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    let (Some(one), Some(other)) = (holder(one), holder(other)) else { return false };
    // SAFETY: kcmp compares two tasks by numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) == 0 }
}

/// A thread of a process that has its memory: not the first thread if that has ended.
fn holder(pid: u32) -> Option<u32> {
    let has_memory = |task: &u32| {
        let statm = std::fs::read_to_string(format!("/proc/{pid}/task/{task}/statm"));
        statm.is_ok_and(|statm| !statm.starts_with("0 "))
    };
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).find(has_memory)
}

fn is_sidecar(pid: u32) -> bool {
    is_called(pid, SIDECAR_NAME)
}

fn is_warden(pid: u32) -> bool {
    is_called(pid, WARDEN_NAME)
}

fn is_called(pid: u32, name: &str) -> bool {
    let called = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    called.is_ok_and(|called| called.trim_end() == name)
}

/// The program and arguments that a process was executed with. Returns None if it has ended.
pub fn command_line(pid: u32) -> Option<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/cmdline")).ok().filter(|line| !line.is_empty())
}

/// The ids of all processes.
pub fn all() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The living processes that have this variable with this value. A sidecar has its program's
/// environment, as it shares its memory.
pub fn bearers(variable: &str, value: &str) -> Vec<u32> {
    let word = format!("{variable}={value}\0");
    let bears = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(word.len()).any(|part| part == word.as_bytes())
    };
    all().filter(bears).collect()
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    state_and_parent(pid).is_some_and(|(state, _)| state != ZOMBIE)
}

fn state_and_parent(pid: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// Sends a signal to a process. It is no error if the process has ended.
pub fn signal(pid: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(pid)
        && pid > 1
    {
        // SAFETY: sends a signal to a process of this test's own.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Pauses all descendants of a process (SIGSTOP) or resumes them (SIGCONT).
pub fn pause_below(root: u32, paused: bool) {
    let all = descendants(root);
    all.iter().for_each(|pid| signal(*pid, if paused { libc::SIGSTOP } else { libc::SIGCONT }));
}

/// Kills a process and all its descendants, whatever sessions they have moved to.
pub fn end(root: u32) {
    let below = descendants(root);
    signal(root, libc::SIGKILL);
    below.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
}

/// Describes a process and its descendants, thread by thread: name, state and the kernel function
/// that it waits in.
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

/// Resident memory of a process, of any kind, in bytes. Returns None if there is no such process.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let task = holder(pid)?;
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{task}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// The mappings of a process, as text: ranges with access rights, inodes and names. Neighbours are
/// joined if these are equal.
pub fn mappings(pid: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut joined: Vec<(u64, u64, String)> = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(6, ' ');
        let mut next = || fields.next().unwrap_or_default();
        let (range, rights, _offset, _device, inode, name) =
            (next(), next(), next(), next(), next(), next());
        let (start, end) = range.split_once('-').unwrap_or_default();
        let number = |text| u64::from_str_radix(text, 16).unwrap_or_default();
        let (start, end, kind) =
            (number(start), number(end), format!("{rights} {inode} {}", name.trim_start()));
        match joined.last_mut() {
            Some(last) if last.1 == start && last.2 == kind => last.1 = end,
            _ => joined.push((start, end, kind)),
        }
    }
    joined.iter().map(|(start, end, kind)| format!("{start:x}-{end:x} {kind}")).collect()
}

/// Processor time that a process has used, in user and kernel mode.
pub fn processor_time(pid: u32) -> Option<Duration> {
    const TICKS_PER_SECOND: u64 = 100;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * 1000 / TICKS_PER_SECOND))
}

/// Sum of the proportional set sizes of all programs below a process, in bytes. A sidecar's memory
/// is its program's.
pub fn proportional_set_bytes(root: u32) -> u64 {
    let of = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find(|line| line.starts_with("Pss:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    owners(Vec::new(), root).into_iter().filter_map(of).sum::<u64>() * 1024
}

/// The peak memory of a process tree, sampled by a thread.
#[derive(Debug)]
pub struct Peak {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<(u64, u32)>>,
}

impl Peak {
    /// Interval of the samples. Each makes the kernel walk the page tables, so the real interval
    /// can be longer.
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

    /// Stops sampling. Returns the peak in bytes and the number of samples.
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
