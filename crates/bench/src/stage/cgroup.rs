//! A memory control group for one program: the limit under which the kernel swaps.
//!
//! Versions 1 and 2 are told apart by their files; where neither may be made the reason is given.

use super::lacking;
use crate::BenchError;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

const V1_ROOT: &str = "/sys/fs/cgroup/memory";
const V2_ROOT: &str = "/sys/fs/cgroup";
/// A group can be removed only after the kernel has noticed that its last process is gone.
const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// How often the group's statistics are read; a reading takes some 30 us.
const READ_PERIOD: Duration = Duration::from_millis(10);

/// A group with a limit; removed when dropped.
#[derive(Debug)]
pub(super) struct Cgroup {
    folder: PathBuf,
    reader: Option<Reader>,
}

/// Reads a group's statistics all the time: that makes the kernel bring its own up to date.
///
/// Reclaim without it takes them from counters that are up to some seconds old (6.18, lists of active
/// and inactive pages). When these say that there are inactive pages although there are none left, it
/// looks at no active one either, and kills the program with all of its memory reclaimable. Small groups
/// that swap fast get there within seconds; the kernel is to be measured at its best, not at that.
#[derive(Debug)]
struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start(file: PathBuf) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Relaxed) {
                // What it says is of no interest, nor that it cannot be read.
                let _ = fs::read(&file);
                std::thread::park_timeout(READ_PERIOD);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread cannot panic: it only reads a file.
            let _ = thread.join();
        }
    }
}

impl Cgroup {
    /// A group whose memory is limited to `limit_bytes`, swap not counted.
    pub(super) fn with_limit(limit_bytes: u64) -> Result<Self, BenchError> {
        let (root, limit_file) = memory_controller()?;
        let folder = root.join(super::own_name());
        // One that an interrupted run of the same process id left is taken over.
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(refused(&folder, &error));
            }
            _ => {}
        }
        let mut group = Self { folder, reader: None };
        let limit = group.folder.join(limit_file);
        fs::write(&limit, limit_bytes.to_string()).map_err(|error| refused(&limit, &error))?;
        group.reader = Some(Reader::start(group.folder.join("memory.stat")));
        Ok(group)
    }

    /// Whether the kernel killed a process of the group because it found nothing more to reclaim.
    pub(super) fn has_killed(&self) -> bool {
        // The file of version 1 and that of version 2 have the same line for it.
        let files = ["memory.oom_control", "memory.events"].map(|name| self.folder.join(name));
        let texts = files.map(|file| fs::read_to_string(file).unwrap_or_default());
        let counts = texts.iter().flat_map(|text| text.lines());
        counts.filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count != "0")
    }

    fn kill_members(&self) {
        let members = fs::read_to_string(self.members_file()).unwrap_or_default();
        let ids = members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
        for id in ids {
            // One that ended meanwhile is what is wanted.
            let _ = kill_process(id, Signal::KILL);
        }
    }

    /// The file into which a process writes its id to join.
    pub(super) fn members_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
            // Only what this process started is in it.
            self.kill_members();
            match fs::remove_dir(&self.folder) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    std::thread::sleep(REMOVE_PAUSE);
                }
                _ => return,
            }
        }
    }
}

/// Removes the groups of processes that were killed.
pub(super) fn remove_leftovers() {
    for folder in [V1_ROOT, V2_ROOT].into_iter().flat_map(|root| super::leftovers(Path::new(root)))
    {
        drop(Cgroup { folder, reader: None });
    }
}

fn refused(path: &Path, error: &io::Error) -> BenchError {
    lacking(format!("no memory control group can be made here ({}: {error})", path.display()))
}

/// The folder of groups and the name of the limit's file.
fn memory_controller() -> Result<(PathBuf, &'static str), BenchError> {
    let v1 = Path::new(V1_ROOT);
    if v1.join("memory.limit_in_bytes").exists() {
        return Ok((v1.to_owned(), "memory.limit_in_bytes"));
    }
    let v2 = Path::new(V2_ROOT);
    let has_memory = |file: &str| {
        let names = fs::read_to_string(v2.join(file)).unwrap_or_default();
        names.split_whitespace().any(|name| name == "memory")
    };
    if !has_memory("cgroup.controllers") {
        return Err(lacking("this machine has no memory control groups"));
    }
    let control = v2.join("cgroup.subtree_control");
    if !has_memory("cgroup.subtree_control") {
        fs::write(&control, "+memory").map_err(|error| refused(&control, &error))?;
    }
    Ok((v2.to_owned(), "memory.max"))
}
