//! A home for servers with flash. Files that they keep in memory are removed with it, even if they
//! were killed.

use std::path::Path;

use tempfile::TempDir;

#[derive(Debug)]
pub(crate) struct Home {
    disk: TempDir,
    memory: TempDir,
}

impl Home {
    pub(crate) fn new() -> Self {
        let disk = tempfile::tempdir().expect("a home");
        let memory = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let books = disk.path().join(super::common::BOOKS);
        std::os::unix::fs::symlink(memory.path(), books).expect("a link");
        Self { disk, memory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.disk.path()
    }

    /// The number of files that servers have left in memory.
    pub(crate) fn books(&self) -> usize {
        std::fs::read_dir(self.memory.path()).expect("it is there").count()
    }
}
