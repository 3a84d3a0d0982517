//! Files that are there as a whole or not at all: written beside their name, renamed when complete.

use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::TraceError;

/// A file that has no name yet; dropped, it leaves nothing.
#[derive(Debug)]
pub(crate) struct Output {
    /// What takes the place of `target`.
    file: NamedTempFile,
    target: PathBuf,
}

impl Output {
    /// Begins what will stand at `path`. A symbolic link stays one; what it points to is replaced.
    ///
    /// # Errors
    /// The folder cannot be written, or something that is no regular file (`/dev/null`) would be
    /// replaced.
    pub fn begin(path: &Path) -> Result<Self, TraceError> {
        let target = match path.canonicalize() {
            Ok(target) => target,
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(TraceError::io(path)(error)),
        };
        if target.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(TraceError::foreign(path, "no regular file, and not replaced by one"));
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
    pub fn file(&mut self) -> &mut std::fs::File {
        self.file.as_file_mut()
    }

    /// Gives it its name.
    pub fn finish(self) -> Result<(), TraceError> {
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
