//! A memory control group for one program: the limit under which the kernel swaps.
//!
//! Versions 1 and 2 are told apart by their files; where neither may be made the reason is given.

use super::lacking;
use crate::BenchError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const V1_ROOT: &str = "/sys/fs/cgroup/memory";
const V2_ROOT: &str = "/sys/fs/cgroup";
/// A group can be removed only after the kernel has noticed that its last process is gone.
const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// A group with a limit; removed when dropped.
#[derive(Debug)]
pub(super) struct Cgroup {
    folder: PathBuf,
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
        let group = Self { folder };
        let limit = group.folder.join(limit_file);
        fs::write(&limit, limit_bytes.to_string()).map_err(|error| refused(&limit, &error))?;
        Ok(group)
    }

    /// The file into which a process writes its id to join.
    pub(super) fn members_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for _ in 0..REMOVE_TRIES {
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
        // Best effort: a group that is still in use stays.
        let _ = fs::remove_dir(folder);
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
