//! Files that appear as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Mode of a file that everybody may read whom the process's umask lets.
const OPEN_MODE: u32 = 0o666;
/// Mode of a file that only its owner may read.
const SECRET_MODE: u32 = 0o600;

/// Writes `bytes` to a new file in `path`'s folder and renames it to `path`: a reader sees the old
/// file or the new one, and an error leaves nothing behind. A symbolic link stays one; its target
/// is replaced.
///
/// # Errors
/// The system's; [`ErrorKind::InvalidInput`] if `path` is a folder or a device, which a file must
/// not replace.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_as(path, bytes, OPEN_MODE).map(drop)
}

/// As [`write_atomically`], also after a power failure, and only the file's owner may read it.
///
/// # Errors
/// As [`write_atomically`]; or the file is there, but may not be after a power failure.
pub fn write_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    sync_folder(&write_as(path, bytes, SECRET_MODE)?.0)
}

/// As [`write_secret`], and returns the file, open for writing. It is never at its place with an
/// error returned; so whether it is there after a power failure is not certain.
///
/// # Errors
/// As [`write_atomically`].
pub fn replace_secret(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let (target, file) = write_as(path, bytes, SECRET_MODE)?;
    let _ = sync_folder(&target);
    Ok(file)
}

/// Returns the path that was written, which is not `path` if that is a link, and the file.
fn write_as(path: &Path, bytes: &[u8], mode: u32) -> io::Result<(PathBuf, File)> {
    let target = match fs::canonicalize(path) {
        Ok(target) => target,
        Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
        Err(error) => return Err(error),
    };
    if target.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let name = target.file_name().ok_or(ErrorKind::NotFound)?.to_string_lossy();
    let temporary = target.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let written = write_new(&temporary, bytes, mode)
        .and_then(|file| fs::rename(&temporary, &target).map(|()| file));
    if written.is_err() {
        // If this fails too, the first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written.map(|file| (target, file))
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<File> {
    // One that a process of the same number has left may have another mode.
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(file)
}

/// Makes the entries of a file's folder durable.
///
/// # Errors
/// The system's.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_its_owners_whatever_was_there_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let temporary = folder.path().join(format!(".secret.{}.tmp", std::process::id()));
        for open in [&path, &temporary] {
            fs::write(open, "for everybody").expect("written");
            fs::set_permissions(open, fs::Permissions::from_mode(0o644)).expect("it is ours");
        }
        write_secret(&path, b"one").expect("written");
        write_secret(&path, b"two").expect("written again");
        assert_eq!(fs::read(&path).expect("readable"), b"two");
        let mode = path.metadata().expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, SECRET_MODE);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
