//! The directory of a run: its board and the socket of its private blade.
//!
//! Whoever can replace the board can read the program's memory, so the folder of all runs of a user
//! is used only if the user owns it and no other user can write to it: another local user may have
//! made it first, in /tmp for one.

use std::io::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use farpool_board::Board;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::RunError;

/// Name of the board in a run's directory.
pub const BOARD: &str = "board";
/// Name of the private blade's socket in a run's directory.
pub const BLADE_SOCKET: &str = "blade.sock";

/// A run's own directory, removed when the run ends.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
}

impl RunDirectory {
    /// Makes a directory with an unguessable name. Others may pass through root's, so that a
    /// program that changes its user still finds its board.
    pub fn make() -> Result<RunDirectory, RunError> {
        let base = base();
        let folder = open_base(&base)?;
        remove_stale(&base);
        let name = format!("run-{}-{}", std::process::id(), random_name(&base)?);
        let path = base.join(&name);
        rustix::fs::mkdirat(&folder, &name, folder_mode()).map_err(failed(&path))?;
        Ok(RunDirectory { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        // Nothing more can be done about a directory that cannot be removed.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Makes the folder of this user's runs if it is missing.
pub fn make_base() -> Result<PathBuf, RunError> {
    let base = base();
    open_base(&base)?;
    Ok(base)
}

/// Others may pass through root's, so that its programs still find their board after they have
/// changed their user.
fn folder_mode() -> Mode {
    if rustix::process::geteuid().is_root() { Mode::from(0o711) } else { Mode::RWXU }
}

/// True if others can do nothing with a folder of this mode, or, for root's, nothing to its
/// contents: they may pass through it, and add to it where the sticky bit protects what is there,
/// as in a tmpfs that was mounted there.
fn is_closed(mode: Mode) -> bool {
    if rustix::process::geteuid().is_root() {
        return mode.contains(Mode::SVTX) || !mode.intersects(Mode::WGRP | Mode::WOTH);
    }
    !mode.intersects(Mode::RWXG | Mode::RWXO)
}

fn failed(path: &Path) -> impl Fn(Errno) -> RunError {
    let path = path.to_owned();
    move |errno| RunError::Directory { path: path.clone(), error: errno.into() }
}

/// Opens the folder, creating it first if it is missing, and refuses one that is not this user's
/// alone.
fn open_base(base: &Path) -> Result<OwnedFd, RunError> {
    match rustix::fs::mkdir(base, folder_mode()) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed(base)(errno)),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(base, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::LOOP | Errno::NOTDIR => RunError::NoFolder { path: base.to_owned() },
        other => failed(base)(other),
    })?;
    check_owner(base, &folder)?;
    Ok(folder)
}

fn check_owner(base: &Path, folder: impl AsFd) -> Result<(), RunError> {
    let status = rustix::fs::fstat(folder).map_err(failed(base))?;
    let user = rustix::process::geteuid().as_raw();
    let mode = Mode::from_raw_mode(status.st_mode);
    if status.st_uid == user && is_closed(mode) {
        return Ok(());
    }
    let (path, owner, mode) = (base.to_owned(), status.st_uid, mode.bits());
    let elsewhere = if user == 0 { "" } else { ", or set XDG_RUNTIME_DIR to a folder of your own" };
    Err(RunError::SharedFolder { path, owner, mode, user, wanted: folder_mode().bits(), elsewhere })
}

/// A name that cannot be guessed.
fn random_name(base: &Path) -> Result<String, RunError> {
    let failed = |error: Error| RunError::Directory { path: base.to_owned(), error };
    let mut random = [0_u8; 12];
    let mut source = std::fs::File::open("/dev/urandom").map_err(failed)?;
    std::io::Read::read_exact(&mut source, &mut random).map_err(failed)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Removes the directories of keepers that were killed before they could.
fn remove_stale(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        let Some(pid) = keeper_of(&entry.path()) else {
            continue;
        };
        if !Path::new("/proc").join(pid.to_string()).exists() {
            // Another process may be removing it as well.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The keeper of a run, by the name of its directory, which only the keeper's user can choose. (On
/// the board any program of the tree can write another number.) Pure.
pub(crate) fn keeper_of(directory: &Path) -> Option<u32> {
    let name = directory.file_name()?.to_str()?;
    name.strip_prefix("run-")?.split('-').next()?.parse().ok()
}

/// Where this user's runs are.
pub fn base() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/run/farpool".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) => PathBuf::from(directory).join("farpool"),
        None => format!("/tmp/farpool-{}", rustix::process::getuid().as_raw()).into(),
    }
}

/// The boards of this user's runs (root sees only its own, too).
pub fn runs() -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(base()) else {
        return Vec::new();
    };
    let mut boards: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path().join(BOARD))
        .filter(|path| path.exists())
        .collect();
    boards.sort();
    boards
}

/// The board of the run that this process keeps, by its directory's name.
pub fn run_of_keeper(pid: u32) -> Option<PathBuf> {
    runs().into_iter().find(|board| board.parent().and_then(keeper_of) == Some(pid))
}

/// True if a process is on the board of a run other than the one in `own`.
pub(crate) fn is_in_another_run(pid: u32, own: &Path) -> bool {
    let others = runs().into_iter().filter(|path| path.parent() != Some(own));
    let boards = others.filter_map(|path| Board::open(&path, false).ok());
    // The board of a killed keeper stays until the next run, but its sidecars have left.
    let has_keeper = |board: &Board| {
        Path::new(&format!("/proc/{}", board.header().keeper_pid.load(Relaxed))).exists()
    };
    boards
        .filter(has_keeper)
        .any(|board| board.processes().any(|slot| slot.pid.load(Relaxed) == pid))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
    }

    #[test]
    fn a_folder_is_made_and_used_again() {
        let directory = tempfile::tempdir().expect("tempdir");
        let base = directory.path().join("farpool");
        open_base(&base).expect("made");
        open_base(&base).expect("there already");
        let mode = base.metadata().expect("metadata").permissions().mode() & 0o7777;
        assert_eq!(mode, folder_mode().bits());
    }

    #[test]
    fn a_folder_that_others_can_change_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("tempdir");
        for mode in [0o777, 0o720, 0o702] {
            let base = directory.path().join(format!("farpool-{mode:o}"));
            std::fs::create_dir(&base).expect("mkdir");
            set_mode(&base, mode);
            let error = open_base(&base).expect_err("others can write").to_string();
            assert!(error.contains(&format!("mode {mode:o}")), "{error}");
            assert!(error.contains(base.to_str().expect("text")), "{error}");
        }
    }

    #[test]
    fn a_folder_of_somebody_else_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("tempdir");
        let base = directory.path().join("farpool");
        open_base(&base).expect("made");
        if std::os::unix::fs::chown(&base, Some(4242), None).is_err() {
            println!("SKIPPED: only root can give a folder away");
            return;
        }
        let error = open_base(&base).expect_err("of user 4242").to_string();
        assert!(error.contains("user 4242"), "{error}");
    }

    #[test]
    fn a_keeper_is_known_by_the_name_of_its_directory() {
        assert_eq!(keeper_of(Path::new("/run/farpool/run-4711-0a0b")), Some(4711));
        for other in ["run--0a0b", "run-a-0b", "run", "walk-7-0a", "run-5000000000-0a"] {
            assert_eq!(keeper_of(&Path::new("/run/farpool").join(other)), None, "{other}");
        }
    }

    #[test]
    fn a_link_is_not_followed_and_nothing_is_made_above() {
        let directory = tempfile::tempdir().expect("tempdir");
        let (base, link) = (directory.path().join("farpool"), directory.path().join("link"));
        std::fs::create_dir(&base).expect("mkdir");
        std::os::unix::fs::symlink(&base, &link).expect("link");
        assert!(matches!(open_base(&link), Err(RunError::NoFolder { .. })));
        let deep = directory.path().join("missing/farpool");
        assert!(matches!(open_base(&deep), Err(RunError::Directory { .. })));
    }
}
