//! The directory of a run: its board and the socket of its private blade.

use std::fs::DirBuilder;
use std::io::Error;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

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
    /// Makes a directory with a name nobody can guess. Root's is passable for others, so that a
    /// program that changes its user still finds its board.
    pub fn make() -> Result<RunDirectory, RunError> {
        let base = base();
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error: Error| RunError::Directory { path, error }
        };
        let mode = if rustix::process::geteuid().is_root() { 0o711 } else { 0o700 };
        DirBuilder::new().recursive(true).mode(mode).create(&base).map_err(failed(&base))?;
        remove_stale(&base);
        let mut random = [0_u8; 12];
        std::io::Read::read_exact(
            &mut std::fs::File::open("/dev/urandom").map_err(failed(&base))?,
            &mut random,
        )
        .map_err(failed(&base))?;
        let name: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = base.join(format!("run-{}-{name}", std::process::id()));
        DirBuilder::new().mode(mode).create(&path).map_err(failed(&path))?;
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

/// Removes the directories of keepers that were killed before they could.
fn remove_stale(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("run-")?.split('-').next());
        let Some(pid) = pid.filter(|pid| pid.parse::<u32>().is_ok()) else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() {
            // Somebody else may be removing it as well.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
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

/// The boards of this user's runs (root sees its own too, not other users').
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
