//! Files that appear as a whole or not at all: written under a temporary name, renamed when
//! complete.

use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::TraceError;

/// A file without its final name; dropping it deletes it.
#[derive(Debug)]
pub(crate) struct Output {
    /// The file that will replace `target`.
    file: NamedTempFile,
    target: PathBuf,
}

impl Output {
    /// Begins the file that will be at `path`. A symbolic link stays one; its target is replaced.
    ///
    /// # Errors
    /// The folder cannot be written, or `path` is not a regular file (`/dev/null`) and must not be
    /// replaced.
    pub(crate) fn begin(path: &Path) -> Result<Self, TraceError> {
        let target = match path.canonicalize() {
            Ok(target) => target,
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(TraceError::io(path)(error)),
        };
        if target.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(TraceError::foreign(path, "not a regular file, and not replaced"));
        }
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new()
            .prefix(".farpool-trace-")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .tempfile_in(folder)
            .map_err(TraceError::io(path))?;
        Ok(Self { file, target })
    }

    /// The file's content.
    pub(crate) fn file(&mut self) -> &mut std::fs::File {
        self.file.as_file_mut()
    }

    /// Gives the file its final name.
    pub(crate) fn finish(self) -> Result<(), TraceError> {
        self.file.as_file().sync_all().map_err(TraceError::io(&self.target))?;
        let Self { file, target } = self;
        file.persist(&target).map_err(|error| TraceError::io(&target)(error.error))?;
        Ok(())
    }
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
