//! Files that appear as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a report cannot be written, or an input not hashed.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// An input to be listed with its hash cannot be read.
    #[error("{path} cannot be read")]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file cannot be created or renamed; the old one is unchanged.
    #[error("{path} cannot be written")]
    Unwritable { path: PathBuf, source: io::Error },
    /// `path` is a folder or a device, which a file must not replace.
    #[error("{path} is not a regular file and is not replaced")]
    NoFile { path: PathBuf },
}

/// Writes `bytes` to a new file in `path`'s folder and renames it to `path`. A reader sees the old
/// file or the new one, and an error leaves nothing behind. A symbolic link stays one; its target
/// is replaced.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    let unwritable = |source| ReportError::Unwritable { path: path.to_owned(), source };
    let target = match fs::canonicalize(path) {
        Ok(target) => target,
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        Err(error) => return Err(unwritable(error)),
    };
    if target.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(ReportError::NoFile { path: path.to_owned() });
    }
    let named = || io::Error::new(io::ErrorKind::InvalidInput, "it has no file name");
    let name = target.file_name().ok_or_else(named).map_err(unwritable)?.to_string_lossy();
    let temporary = target.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = write_new(&temporary, bytes).and_then(|()| fs::rename(&temporary, &target));
    if written.is_err() {
        // If this fails too, the first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(unwritable)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_in(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report.html");
        write_atomically(&path, b"one").expect("written");
        write_atomically(&path, b"two").expect("written again");
        assert_eq!(fs::read(&path).expect("readable"), b"two");
        assert_eq!(left_in(folder.path()), ["report.html"]);
    }

    #[test]
    fn folders_and_devices_are_not_replaced_and_links_stay_links() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = write_atomically(folder.path(), b"x");
        assert!(matches!(refused, Err(ReportError::NoFile { .. })), "{refused:?}");
        let refused = write_atomically(Path::new("/dev/null"), b"x");
        assert!(matches!(refused, Err(ReportError::NoFile { .. })), "{refused:?}");
        let missing = folder.path().join("no/such/folder/report.html");
        assert!(matches!(write_atomically(&missing, b"x"), Err(ReportError::Unwritable { .. })));
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").expect("written");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        write_atomically(&link, b"new").expect("written");
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).expect("readable"), b"new");
        assert_eq!(left_in(folder.path()), ["file", "link"]);
    }
}
