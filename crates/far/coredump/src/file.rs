//! The file: for its owner only, under a temporary name until it is complete, removed if it never
//! is.

use std::fs::{File, OpenOptions};
use std::io::Error;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};

use crate::copy::Sink;
use crate::error::CoreError;

/// A core that is being written.
#[derive(Debug)]
pub struct Draft {
    file: File,
    path: PathBuf,
    partial: PathBuf,
    pub written_bytes: u64,
}

impl Draft {
    /// Memory may hold secrets: no other user may read the file at any time.
    pub fn create(path: &Path) -> Result<Draft, CoreError> {
        if path.symlink_metadata().is_ok() {
            return Err(CoreError::Exists { path: path.to_owned() });
        }
        let not_made = |error| CoreError::NotMade { path: path.to_owned(), error };
        let Some(name) = path.file_name() else {
            return Err(not_made(Error::from_raw_os_error(libc::EISDIR)));
        };
        let mut partial_name = name.to_owned();
        partial_name.push(format!(".partial-{}", std::process::id()));
        let partial = path.with_file_name(partial_name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial);
        let file = file.map_err(not_made)?;
        Ok(Draft { file, path: path.to_owned(), partial, written_bytes: 0 })
    }

    /// Sets its length and gives it its name.
    pub fn complete(mut self, bytes: u64) -> Result<(), CoreError> {
        self.file.set_len(bytes).map_err(|error| self.failed(error))?;
        let partial = std::mem::take(&mut self.partial);
        let flags = RenameFlags::NOREPLACE;
        let renamed = rustix::fs::renameat_with(CWD, &partial, CWD, &self.path, flags);
        if let Err(errno) = renamed {
            self.partial = partial;
            return Err(match errno {
                rustix::io::Errno::EXIST => CoreError::Exists { path: self.path.clone() },
                errno => self.failed(errno.into()),
            });
        }
        Ok(())
    }

    /// Its temporary name until it is complete.
    pub fn partial_name(&self) -> PathBuf {
        self.partial.clone()
    }

    fn failed(&self, error: Error) -> CoreError {
        let path = self.path.clone();
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                CoreError::NoRoom { path, written_bytes: self.written_bytes }
            }
            _ => CoreError::NotWritten { path, error },
        }
    }
}

impl Sink for Draft {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CoreError> {
        self.file.write_all_at(bytes, offset).map_err(|error| self.failed(error))?;
        self.written_bytes += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.partial.as_os_str().is_empty() {
            // It may have been removed already.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn names(directory: &Path) -> usize {
        std::fs::read_dir(directory).expect("a folder").count()
    }

    #[test]
    fn a_file_is_there_when_it_is_whole_and_for_its_owner() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("core");
        let mut draft = Draft::create(&path).expect("a draft");
        draft.write(1 << 20, b"x").expect("room");
        assert!(!path.exists());
        draft.complete(2 << 20).expect("a name");
        let metadata = path.metadata().expect("a file");
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (2 << 20, 0o600));
        assert!(metadata.blocks() * 512 < 1 << 20, "holes take no room");
        assert_eq!(names(directory.path()), 1);
        assert!(matches!(Draft::create(&path), Err(CoreError::Exists { .. })));
    }

    #[test]
    fn a_file_that_is_not_whole_is_removed() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("core");
        drop(Draft::create(&path).expect("a draft"));
        assert_eq!(names(directory.path()), 0);
        let nowhere = Draft::create(&directory.path().join("missing/core"));
        assert!(nowhere.expect_err("no folder").to_string().contains("missing/core"));
    }

    #[test]
    fn a_full_file_system_is_told_with_a_remedy() {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("a full device");
        let path = PathBuf::from("/x/core");
        let mut draft = Draft { file: full, path, partial: PathBuf::new(), written_bytes: 0 };
        let error = draft.write(0, b"x").expect_err("no room").to_string();
        assert!(error.contains("/x/core") && error.contains("Free some space"), "{error}");
    }
}
