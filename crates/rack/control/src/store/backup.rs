//! Backups: everything in a store as one text, and the way back.
//!
//! A backup is a text of lines, each a JSON object: a header, one line for each record, and an end
//! with the number of records and the SHA-256 of all lines before it. It holds the keys of grants,
//! so it is as secret as the store.
//!
//! Invariants:
//! - A backup that is cut short or damaged is refused as a whole.
//! - A restore leaves the old store or the new one, whenever it is stopped.
//! - Numbers and epochs that were given after the backup are not given again.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;

use farpool_kernel::sync_folder;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::version::{Pair, STORE_VERSION, upgrade, version_of, with_counters_raised};
use super::{Etcd, EtcdStore, KEEP_ALIVE_EVERY, RedbStore, Store, StoreError, StoreOp};

/// The format of a backup, not of the store in it.
const FORMAT: u64 = 1;
/// A store holds the keys of grants.
const SECRET_MODE: u32 = 0o600;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    farpool_backup: u64,
    store_version: u64,
    time_unix_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    key: String,
    value: Value,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    records: u64,
    sha256: String,
}

/// Why a text is no backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A line is not of the format.
    #[error("line {line} of the backup is damaged: {reason}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The last line is missing.
    #[error("the backup is cut short: its last line is missing")]
    Cut,
    /// The text has changed since it was written.
    #[error("the backup has changed since it was written: its checksum does not fit")]
    Changed,
    /// A format that this program does not know.
    #[error("the backup has format {0}; this farpool knows {FORMAT}")]
    Format(u64),
}

fn line(value: &impl Serialize) -> String {
    // Plain data with string keys, which always serialises.
    format!("{}\n", serde_json::to_string(value).unwrap_or_default())
}

fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the backup of a store with this content.
///
/// # Errors
/// A value is no JSON, or the version is damaged: the store is not one of a controller.
pub fn to_text(pairs: &[Pair], time_unix_ms: u64) -> Result<String, StoreError> {
    let store_version = version_of(pairs)?.unwrap_or(STORE_VERSION);
    let mut text = line(&Header { farpool_backup: FORMAT, store_version, time_unix_ms });
    for (key, value) in pairs {
        let value = serde_json::from_slice(value)
            .map_err(|error| StoreError::Io(format!("the record {key} is damaged: {error}")))?;
        text.push_str(&line(&Line { key: key.clone(), value }));
    }
    let (records, sha256) = (pairs.len() as u64, digest(&text));
    text.push_str(&line(&End { records, sha256 }));
    Ok(text)
}

/// Returns the content in a backup.
///
/// # Errors
/// See [`BackupError`].
pub fn from_text(text: &str) -> Result<Vec<Pair>, BackupError> {
    let damaged = |number: usize, error: &dyn std::fmt::Display| BackupError::Line {
        line: number + 1,
        reason: error.to_string(),
    };
    let last = text.trim_end_matches('\n').rfind('\n').ok_or(BackupError::Cut)?;
    let (body, end) = text.split_at(last + 1);
    let end: End = serde_json::from_str(end).map_err(|_| BackupError::Cut)?;
    if !text.ends_with('\n') || digest(body) != end.sha256 {
        return Err(BackupError::Changed);
    }
    let mut lines = body.lines().enumerate();
    let (_, header) = lines.next().ok_or(BackupError::Cut)?;
    let header: Header = serde_json::from_str(header).map_err(|error| damaged(0, &error))?;
    if header.farpool_backup != FORMAT {
        return Err(BackupError::Format(header.farpool_backup));
    }
    let mut pairs = Vec::new();
    for (number, text) in lines {
        let line: Line = serde_json::from_str(text).map_err(|error| damaged(number, &error))?;
        let value = serde_json::to_vec(&line.value).map_err(|error| damaged(number, &error))?;
        pairs.push((line.key, value));
    }
    if pairs.len() as u64 != end.records {
        return Err(BackupError::Cut);
    }
    Ok(pairs)
}

/// Why a store was not restored; it is as before then.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The backup is damaged.
    #[error(transparent)]
    Backup(#[from] BackupError),
    /// The store cannot be read or written, or its version is not known.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record of the backup is not one of a controller.
    #[error("what the backup holds is no controller's state: {0}")]
    Record(#[from] crate::model::record::RecordError),
    /// Something is there already.
    #[error("the store holds {0} records already, which a restore would replace")]
    NotEmpty(usize),
    /// A file cannot be made or renamed.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another controller leads.
    #[error("the controller at {0} leads with this store; stop all controllers first")]
    Led(String),
}

/// Returns what a store holds after the restore of a backup.
///
/// # Errors
/// The backup is damaged or of a newer version.
pub fn restored(text: &str) -> Result<Vec<Pair>, RestoreError> {
    let mut pairs = from_text(text)?;
    upgrade(&mut pairs)?;
    // Everything must be readable before anything is replaced.
    crate::model::Records::read(&pairs)?;
    Ok(with_counters_raised(pairs)?)
}

/// Returns a path beside another, with something after its name.
pub(crate) fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(what);
    PathBuf::from(name)
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> RestoreError + '_ {
    |source| RestoreError::File { path: path.to_owned(), source }
}

/// Restores a redb file from a backup: the new file is written beside it and takes its name; the
/// old one is kept as `NAME.before-restore`. `on_step` is called between any two steps.
///
/// # Errors
/// See [`RestoreError`]; among others, a controller has the file open.
pub fn restore_redb(
    path: &Path,
    text: &str,
    replace: bool,
    on_step: &mut dyn FnMut(&str),
) -> Result<usize, RestoreError> {
    let pairs = restored(text)?;
    on_step("read");
    // Held until the end, so that no controller opens the file meanwhile.
    let _old = match path.exists() {
        false => None,
        true => {
            let mut old = RedbStore::open(path)?;
            let count = old.load()?.len();
            if count > 0 && !replace {
                return Err(RestoreError::NotEmpty(count));
            }
            Some(old)
        }
    };
    on_step("opened");
    let new = beside(path, ".restoring");
    if new.exists() {
        std::fs::remove_file(&new).map_err(file_error(&new))?;
    }
    on_step("cleaned");
    make_like(&new, path).map_err(file_error(&new))?;
    on_step("allotted");
    let count = pairs.len();
    let puts: Vec<StoreOp> =
        pairs.into_iter().map(|(key, value)| StoreOp::Put(key, value)).collect();
    let mut store = RedbStore::open(&new)?;
    on_step("made");
    store.commit(&puts)?;
    drop(store);
    on_step("written");
    let kept = beside(path, ".before-restore");
    if path.exists() {
        if kept.exists() {
            std::fs::remove_file(&kept).map_err(file_error(&kept))?;
        }
        on_step("old copy removed");
        std::fs::hard_link(path, &kept).map_err(file_error(&kept))?;
        on_step("old kept");
    }
    std::fs::rename(&new, path).map_err(file_error(path))?;
    on_step("renamed");
    sync_folder(path).map_err(file_error(path))?;
    on_step("durable");
    Ok(count)
}

/// Makes an empty file with the owner and the mode of another one, so that whoever reads that reads
/// this in its place; if there is no other one, only this process's user may read it.
fn make_like(new: &Path, old: &Path) -> std::io::Result<()> {
    let secret = File::options().write(true).create_new(true).mode(SECRET_MODE).open(new)?;
    let found = match old.metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let own = secret.metadata()?;
    if (own.uid(), own.gid()) != (found.uid(), found.gid()) {
        std::os::unix::fs::fchown(&secret, Some(found.uid()), Some(found.gid())).map_err(
            |error| {
                let (user, group) = (found.uid(), found.gid());
                let why = format!(
                    "it cannot be given to user {user} and group {group}, who own {}: {error}; run \
                     this as that user or as root",
                    old.display()
                );
                std::io::Error::new(error.kind(), why)
            },
        )?;
    }
    secret.set_permissions(found.permissions())
}

/// Keeps a copy of a store of an older version beside it, for the way back: that version opens it
/// as it is. It replaces a copy that was kept before. Returns its path; None if the store is of
/// this version.
///
/// # Errors
/// The version is damaged, or the copy cannot be written or read again.
pub(crate) fn keep_older(
    path: &Path,
    store: &mut RedbStore,
) -> Result<Option<PathBuf>, StoreError> {
    let pairs = store.load()?;
    let Some(version) = version_of(&pairs)?.filter(|version| *version < STORE_VERSION) else {
        return Ok(None);
    };
    let kept = beside(path, &format!(".version-{version}"));
    let new = beside(&kept, ".new");
    let io = |error: std::io::Error| StoreError::Io(format!("{}: {error}", new.display()));
    if new.exists() {
        std::fs::remove_file(&new).map_err(io)?;
    }
    match make_like(&new, path) {
        // It is only a copy: its own user keeps it.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
        made => made.map_err(io)?,
    }
    // Nobody writes meanwhile: this process has the file open, and only one can.
    std::fs::copy(path, &new).map_err(io)?;
    // The copy is of an open file, which is in order again once it was opened and closed.
    let is_same = RedbStore::open(&new)?.load()? == pairs;
    if !is_same {
        return Err(StoreError::Io(format!("{} is not what it was copied from", new.display())));
    }
    File::open(&new).and_then(|copy| copy.sync_all()).map_err(io)?;
    std::fs::rename(&new, &kept).map_err(io)?;
    sync_folder(&kept).map_err(io)?;
    Ok(Some(kept))
}

/// Restores an etcd store from a backup, in one batch, while no controller leads with it. This
/// process leads meanwhile, however long it takes. `on_step` is called between any two steps.
///
/// # Errors
/// See [`RestoreError`].
pub fn restore_etcd(
    endpoints: Vec<String>,
    text: &str,
    replace: bool,
    on_step: &mut dyn FnMut(&str),
) -> Result<usize, RestoreError> {
    let pairs = restored(text)?;
    let etcd = Etcd::new(endpoints);
    let leadership = etcd.campaign("a restore")?.map_err(RestoreError::Led)?;
    let mut store = EtcdStore { etcd: etcd.clone(), leadership };
    let count = pairs.len();
    let (keeper, leads) = (&etcd, &leadership);
    let restored = std::thread::scope(|scope| {
        let (working, ended) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            // Until the work has ended, which drops the other end.
            while ended.recv_timeout(KEEP_ALIVE_EVERY) == Err(RecvTimeoutError::Timeout) {
                match keeper.keep_alive(leads) {
                    // What is written from now on is refused by etcd, as it must be.
                    Err(StoreError::Fenced) => return,
                    Err(error) => tracing::warn!("the lease was not renewed: {error}"),
                    Ok(_) => {}
                }
            }
        });
        let restored = replace_all(&mut store, pairs, replace, on_step);
        drop(working);
        restored
    });
    etcd.resign(&leadership);
    restored.map(|()| count)
}

fn replace_all(
    store: &mut dyn Store,
    pairs: Vec<Pair>,
    replace: bool,
    on_step: &mut dyn FnMut(&str),
) -> Result<(), RestoreError> {
    on_step("led");
    let old = store.load()?;
    on_step("loaded");
    if !old.is_empty() && !replace {
        return Err(RestoreError::NotEmpty(old.len()));
    }
    let deletes = old.into_iter().map(|(key, _)| StoreOp::Delete(key));
    let puts = pairs.into_iter().map(|(key, value)| StoreOp::Put(key, value));
    // Of several changes of a key the last one counts.
    let ops: Vec<StoreOp> = deletes.chain(puts).collect();
    Ok(store.commit(&ops)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs() -> Vec<Pair> {
        let pair = |key: &str, value: &str| (key.to_owned(), value.as_bytes().to_vec());
        vec![
            pair(
                "meta",
                r#"{"epoch_ceiling":2048,"life":3,"number_ceiling":18446744073709551615}"#,
            ),
            pair("version", r#"{"store":2}"#),
        ]
    }

    #[test]
    fn a_backup_is_read_back_as_it_was() {
        let text = to_text(&pairs(), 7).unwrap();
        assert_eq!(from_text(&text).unwrap(), pairs());
        let empty = to_text(&[], 7).unwrap();
        assert_eq!(from_text(&empty).unwrap(), []);
    }

    #[test]
    fn a_backup_that_is_cut_or_changed_anywhere_is_refused() {
        let text = to_text(&pairs(), 7).unwrap();
        for length in 0..text.len() {
            assert!(from_text(&text[..length]).is_err(), "cut to {length} bytes");
        }
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let Ok(changed) = String::from_utf8(bytes) else { continue };
            assert!(from_text(&changed).is_err(), "changed at {at}: {changed}");
        }
        assert!(from_text(&format!("{text}{text}")).is_err());
    }

    #[test]
    fn a_store_that_holds_something_is_replaced_only_when_that_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let text = to_text(&pairs(), 7).unwrap();
        let steps = &mut |_: &str| {};
        assert_eq!(restore_redb(&path, &text, false, steps).unwrap(), 2);
        let again = restore_redb(&path, &text, false, steps);
        assert!(matches!(again, Err(RestoreError::NotEmpty(2))), "{again:?}");
        assert_eq!(restore_redb(&path, &text, true, steps).unwrap(), 2);
        let open = RedbStore::open(&path).unwrap();
        let busy = restore_redb(&path, &text, true, steps);
        assert!(matches!(busy, Err(RestoreError::Store(_))), "a controller has it open");
        drop(open);
        let damaged = restore_redb(&path, &text[1..], true, steps);
        assert!(matches!(damaged, Err(RestoreError::Backup(_))));
    }
}
