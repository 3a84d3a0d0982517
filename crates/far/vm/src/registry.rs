//! The VMs of this user, by name: a folder `vm-NAME` each beside the folders of the runs, with the
//! QMP socket and a file that its keeper holds locked.
//!
//! The lock ends with the keeper, however it ends, so a name never belongs to a VM that is gone,
//! and no process number has to be trusted. Whoever finds a folder whose lock is free removes it.
//! Claims and removals happen under one further lock.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::VmError;

/// The longest name: with it, the socket's path stays within what the kernel takes (108 bytes).
pub const NAME_BYTES_MAX: usize = 48;
const PREFIX: &str = "vm-";
const KEEPER: &str = "keeper";
const SOCKET: &str = "qmp.sock";
/// Held while names are claimed and removed.
const LOCK: &str = "vms.lock";
/// Longest path of a socket, with the zero at its end.
const SOCKET_PATH_BYTES_MAX: usize = 108;
/// A process number has at most 10 digits; what is longer was not written by a keeper.
const KEEPER_BYTES_MAX: u64 = 16;

/// The name of a VM: letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmName(String);

impl FromStr for VmName {
    type Err = String;

    fn from_str(text: &str) -> Result<VmName, String> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let starts_well = text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric());
        if starts_well && text.len() <= NAME_BYTES_MAX && text.bytes().all(is_plain) {
            return Ok(VmName(text.to_owned()));
        }
        Err(format!(
            "{text:?} is no name for a VM; write it with letters, digits, '.', '_' and '-', such as \
             web1, and at most {NAME_BYTES_MAX} of them"
        ))
    }
}

impl std::fmt::Display for VmName {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.0)
    }
}

/// A living VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: VmName,
    /// The `farpool vm run` process.
    pub keeper_pid: u32,
    pub socket: PathBuf,
}

impl Entry {
    /// The folder of what belongs to the VM.
    pub fn folder(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new(""))
    }
}

/// A name that is this process's until it is dropped.
#[derive(Debug)]
pub struct Claim {
    base: PathBuf,
    folder: PathBuf,
    _keeper: File,
}

impl Claim {
    /// Claims a name in the folder of this user's runs.
    pub fn make(base: &Path, name: &VmName) -> Result<Claim, VmError> {
        let folder = base.join(format!("{PREFIX}{name}"));
        let socket = folder.join(SOCKET);
        if socket.as_os_str().len() >= SOCKET_PATH_BYTES_MAX {
            return Err(VmError::LongPath { path: socket });
        }
        let _lock = lock(&base.join(LOCK))?;
        let failed = |error| VmError::Registry { path: folder.clone(), error };
        if let Some(keeper_pid) = keeper_of(&folder) {
            return Err(VmError::NameTaken { name: name.clone(), keeper_pid });
        }
        remove(&folder);
        DirBuilder::new().mode(0o700).create(&folder).map_err(failed)?;
        let mut options = OpenOptions::new();
        let made = options.create_new(true).write(true).mode(0o600).open(folder.join(KEEPER));
        let mut keeper = made.map_err(failed)?;
        keeper.lock().map_err(failed)?;
        keeper.write_all(std::process::id().to_string().as_bytes()).map_err(failed)?;
        Ok(Claim { base: base.to_owned(), folder, _keeper: keeper })
    }

    /// The folder of what belongs to the VM.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the VM's QMP socket is to be.
    pub fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Without the lock somebody else may find the folder half removed, and removes the rest.
        let _lock = lock(&self.base.join(LOCK));
        remove(&self.folder);
    }
}

/// The VMs that live, by name. Removes what dead ones have left.
pub fn living(base: &Path) -> Result<Vec<Entry>, VmError> {
    let _lock = lock(&base.join(LOCK))?;
    let mut found = Vec::new();
    let entries = std::fs::read_dir(base);
    let entries = entries.map_err(|error| VmError::Registry { path: base.to_owned(), error })?;
    for folder in entries.flatten().map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX));
        let Some(Ok(name)) = name.map(VmName::from_str) else { continue };
        match keeper_of(&folder) {
            Some(keeper_pid) => {
                found.push(Entry { name, keeper_pid, socket: folder.join(SOCKET) });
            }
            None => remove(&folder),
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// The living VM with this name.
pub fn find(base: &Path, name: &VmName) -> Result<Entry, VmError> {
    let all = living(base)?;
    let names = all.iter().map(|entry| entry.name.to_string()).collect::<Vec<_>>().join(", ");
    let found = all.into_iter().find(|entry| entry.name == *name);
    found.ok_or_else(|| match names.is_empty() {
        true => VmError::NoVm { name: name.clone() },
        false => VmError::NoSuchVm { name: name.clone(), names },
    })
}

/// The keeper that holds a VM's folder. None if nobody does.
fn keeper_of(folder: &Path) -> Option<u32> {
    let mut keeper = File::open(folder.join(KEEPER)).ok()?;
    // Shared: two commands that look at once do not take each other for keepers.
    if !matches!(keeper.try_lock_shared(), Err(TryLockError::WouldBlock)) {
        return None;
    }
    let mut text = String::new();
    keeper.rewind().ok()?;
    keeper.take(KEEPER_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.parse().ok()
}

fn remove(folder: &Path) {
    // What cannot be removed is tried again by the next command, and an error of the next claim.
    let _ = std::fs::remove_dir_all(folder);
}

/// Waits until this process alone holds the file, which is made if it is not there.
pub fn lock(path: &Path) -> Result<File, VmError> {
    let failed = |error| VmError::Registry { path: path.to_owned(), error };
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = options.open(path).map_err(failed)?;
    file.lock().map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> VmName {
        text.parse().expect("a name")
    }

    fn names(base: &Path) -> Vec<String> {
        living(base).expect("a list").iter().map(|entry| entry.name.to_string()).collect()
    }

    #[test]
    fn a_name_is_claimed_once_and_free_again_at_the_end() {
        let base = tempfile::tempdir().expect("a folder");
        let claim = Claim::make(base.path(), &name("web1")).expect("free");
        let other = Claim::make(base.path(), &name("db")).expect("free");
        let taken = Claim::make(base.path(), &name("web1")).expect_err("taken");
        let pid = std::process::id();
        assert!(matches!(taken, VmError::NameTaken { keeper_pid, .. } if keeper_pid == pid));
        assert_eq!(names(base.path()), ["db", "web1"]);
        let entry = find(base.path(), &name("web1")).expect("there");
        assert_eq!((entry.keeper_pid, entry.socket), (pid, claim.socket()));
        drop(claim);
        assert_eq!(names(base.path()), ["db"]);
        drop(other);
        Claim::make(base.path(), &name("web1")).expect("free again");
    }

    #[test]
    fn what_a_dead_keeper_left_is_removed() {
        let base = tempfile::tempdir().expect("a folder");
        for left in ["vm-dead", "vm-half"] {
            std::fs::create_dir(base.path().join(left)).expect("a folder");
        }
        std::fs::write(base.path().join("vm-dead/keeper"), "1").expect("a file");
        let unknown = find(base.path(), &name("dead")).expect_err("dead");
        assert!(matches!(unknown, VmError::NoVm { .. }), "{unknown}");
        assert!(!base.path().join("vm-dead").exists() && !base.path().join("vm-half").exists());
        let _claim = Claim::make(base.path(), &name("web1")).expect("free");
        let unknown = find(base.path(), &name("dead")).expect_err("dead").to_string();
        assert!(unknown.contains("dead") && unknown.contains("web1"), "{unknown}");
    }

    #[test]
    fn names_are_plain() {
        let long = "a".repeat(NAME_BYTES_MAX + 1);
        for text in ["", ".", "..", "-a", "a/b", "a b", "\u{e9}", "a\n", &long] {
            assert!(VmName::from_str(text).is_err(), "{text:?}");
        }
        for text in ["web1", "7", "a.b_c-d", &long[1..]] {
            assert!(VmName::from_str(text).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_told() {
        let base = tempfile::tempdir().expect("a folder");
        let deep = base.path().join("d".repeat(SOCKET_PATH_BYTES_MAX));
        std::fs::create_dir(&deep).expect("a folder");
        let long = Claim::make(&deep, &name("web1")).expect_err("too long");
        assert!(matches!(long, VmError::LongPath { .. }), "{long}");
    }
}
