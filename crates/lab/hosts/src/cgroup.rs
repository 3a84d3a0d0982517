//! A memory control group for one program or one host: the limit under which the kernel swaps.
//!
//! Versions 1 and 2 are distinguished by their files; if neither can be used, the error says why. A
//! group outlives a process that is killed, so its name ends in the id of the process that made it,
//! and [`remove_leftovers`] finds those whose process is gone.

use crate::HostsError;
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

/// A group with a limit. It is removed when this is dropped.
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
    reader: Option<Reader>,
}

/// Reads a group's statistics all the time, which makes the kernel update its own.
///
/// Without it, reclaim uses counters that are up to a few seconds old (6.18, lists of active and
/// inactive pages). If these show inactive pages although there are none left, reclaim does not
/// scan active pages either, and the kernel kills the program although all of its memory is
/// reclaimable. Small groups that swap fast get there within seconds; the kernel is to be measured
/// at its best, not in that state.
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
                // The content and an error do not matter here.
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
    /// Makes a group of that name whose memory is limited to `limit_bytes`, swap not counted.
    ///
    /// # Errors
    /// This machine has no memory control groups, or does not let this process make one.
    pub fn with_limit(name: &str, limit_bytes: u64) -> Result<Self, HostsError> {
        let (root, limit_file) = memory_controller()?;
        let folder = root.join(name);
        // A group that an interrupted run with the same process id left is taken over.
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

    /// Returns where a group of that name is, or would be.
    pub(crate) fn folder_of(name: &str) -> Result<PathBuf, HostsError> {
        Ok(memory_controller()?.0.join(name))
    }

    /// Bytes of memory that its processes hold now, as the kernel counts them. None if the kernel
    /// does not report them.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        let files = ["memory.usage_in_bytes", "memory.current"].map(|name| self.folder.join(name));
        let text = files.iter().find_map(|file| fs::read_to_string(file).ok())?;
        text.trim().parse().ok()
    }

    /// Whether the kernel killed a process of the group because it found nothing more to reclaim.
    #[must_use]
    pub fn has_killed(&self) -> bool {
        // The files of versions 1 and 2 have the same line for it.
        let files = ["memory.oom_control", "memory.events"].map(|name| self.folder.join(name));
        let texts = files.map(|file| fs::read_to_string(file).unwrap_or_default());
        let counts = texts.iter().flat_map(|text| text.lines());
        counts.filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count != "0")
    }

    fn kill_members(&self) {
        let members = fs::read_to_string(self.members_file()).unwrap_or_default();
        let ids = members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
        for id in ids {
            // A process that has ended meanwhile needs no signal.
            let _ = kill_process(id, Signal::KILL);
        }
    }

    /// The file into which a process writes its id to join.
    #[must_use]
    pub fn members_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
            // The group has only what its maker started.
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

/// Removes the groups whose names are `prefix` and the id of a process that is gone, with what runs
/// in them.
pub fn remove_leftovers(prefix: &str) {
    let roots = [V1_ROOT, V2_ROOT].map(Path::new);
    for folder in roots.into_iter().flat_map(|root| leftovers(root, prefix)) {
        drop(Cgroup { folder, reader: None });
    }
}

/// Entries in `folder` named by `prefix` and the id of a process that is gone.
pub fn leftovers(folder: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let is_left = move |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let id = name.strip_prefix(prefix).and_then(|id| id.parse::<u32>().ok());
        id.is_some_and(|id| !Path::new(&format!("/proc/{id}")).exists())
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_left)
}

fn refused(path: &Path, error: &io::Error) -> HostsError {
    HostsError::Lacking(format!(
        "no memory control group can be made here ({}: {error})",
        path.display()
    ))
}

/// The folder of groups and the name of the limit's file.
fn memory_controller() -> Result<(PathBuf, &'static str), HostsError> {
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
        return Err(HostsError::Lacking("this machine has no memory control groups".to_owned()));
    }
    let control = v2.join("cgroup.subtree_control");
    if !has_memory("cgroup.subtree_control") {
        fs::write(&control, "+memory").map_err(|error| refused(&control, &error))?;
    }
    Ok((v2.to_owned(), "memory.max"))
}
