//! Reports as files, which appear as a whole or not at all.

use std::io;
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

/// Writes `bytes` to a new file in `path`'s folder and renames it to `path`; see
/// [`farpool_kernel::write_atomically`].
///
/// # Errors
/// See [`ReportError`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    farpool_kernel::write_atomically(path, bytes).map_err(|source| match source.kind() {
        io::ErrorKind::InvalidInput => ReportError::NoFile { path: path.to_owned() },
        _ => ReportError::Unwritable { path: path.to_owned(), source },
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

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
