//! The log's file: appended to, and on the disk before anything is answered.
//!
//! Invariants:
//! - One process writes a log (`flock`).
//! - An entry that could not be written is kept, and written before all others; until then
//!   [`AuditLog::is_ready`] refuses, so at most what was under way is missing.
//! - A file that is not what was written is not continued.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use farpool_kernel::{lock, sync_folder, unix_ms};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use crate::chain::{Broken, Chain, Entry, Hash, Stage, verify};

/// A file of more bytes is renamed, with the number of its last line at its end, and a new one
/// goes on with the chain: some 200,000 lines.
pub const FILE_LIMIT_BYTES: u64 = 64 << 20;
/// Entries kept while the log cannot be written. Changes are refused then; these are refusals, of
/// which more are counted and not kept.
const KEPT_LIMIT: usize = 1000;
/// Whoever reads it sees who does what.
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);

/// Why the log cannot be used. Each message names the file.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file is not what was written.
    #[error(
        "the audit log {path} is not continued: {source}; keep it for whoever looks into that, and \
         begin another: move it away (farpool audit verify tells more)"
    )]
    Broken {
        /// The file.
        path: String,
        /// What is wrong.
        source: Broken,
    },
    /// Another process writes it.
    #[error("the audit log {path} is in use by another process; give each process its own")]
    InUse {
        /// The file.
        path: String,
    },
    /// The system refuses.
    #[error("the audit log {path} cannot be {what}: {source}")]
    System {
        /// The file.
        path: String,
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A log that is written to.
#[derive(Debug)]
pub struct AuditLog {
    path: PathBuf,
    limit_bytes: u64,
    writing: Mutex<Writing>,
}

#[derive(Debug)]
struct Writing {
    file: File,
    chain: Chain,
    bytes: u64,
    /// There may be a part of a line after these bytes.
    is_torn: bool,
    /// Entries that could not be written, oldest first.
    kept: Vec<(Entry, Stage)>,
    /// Entries that were not even kept.
    lost: u64,
}

impl AuditLog {
    /// Opens or begins a log. An unfinished last line, as of a machine that stopped, is removed,
    /// and an entry says so.
    ///
    /// # Errors
    /// The file is not what was written, another process has it, or the system refuses.
    pub fn open(path: &Path) -> Result<AuditLog, AuditError> {
        Self::open_with_limit(path, FILE_LIMIT_BYTES)
    }

    /// Like [`AuditLog::open`], with another limit than [`FILE_LIMIT_BYTES`].
    ///
    /// # Errors
    /// As there.
    pub fn open_with_limit(path: &Path, limit_bytes: u64) -> Result<AuditLog, AuditError> {
        let name = || path.display().to_string();
        let system = |what| move |source| AuditError::System { path: name(), what, source };
        let broken = |path: &Path| {
            let path = path.display().to_string();
            move |source| AuditError::Broken { path, source }
        };
        let file = open(path).map_err(system("opened"))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| AuditError::InUse { path: name() })?;
        let mut bytes = file.metadata().map_err(system("looked at"))?.len();
        let (chain, removed_bytes) = match verify(BufReader::new(&file), None) {
            Ok(verified) => (verified.end, 0),
            Err(Broken::Unfinished { bytes: unfinished_bytes, .. }) => {
                bytes -= unfinished_bytes;
                file.set_len(bytes).map_err(system("shortened"))?;
                (&file).seek(SeekFrom::Start(0)).map_err(system("read"))?;
                let verified = verify(BufReader::new(&file), None);
                (verified.map_err(broken(path))?.end, unfinished_bytes)
            }
            Err(source) => return Err(broken(path)(source)),
        };
        // It ended between the end of one file and the first line of the next.
        let before = if bytes == 0 { last_before(path) } else { Ok(None) };
        let chain = match before.map_err(system("looked for"))? {
            Some((number, before)) => {
                let file = File::open(&before).map_err(system("read"))?;
                let end = verify(BufReader::new(file), None).map_err(broken(&before))?.end;
                let (line, reason) = (end.number, "it is the last one, and the name tells another");
                let fits = (end.number == number).then_some(end);
                fits.ok_or(Broken::Line { line, reason }).map_err(broken(&before))?
            }
            None => chain,
        };
        let (kept, is_torn) = (Vec::new(), false);
        let writing = Writing { file, chain, bytes, is_torn, kept, lost: 0 };
        let (path, writing) = (path.to_owned(), Mutex::new(writing));
        let log = AuditLog { path, limit_bytes, writing };
        let what = match removed_bytes {
            0 => "the log is opened".to_owned(),
            bytes => format!("the log is opened; {bytes} bytes of an unfinished line are removed"),
        };
        log.record(own_entry(what)).map_err(|source| log.system("written", source))?;
        Ok(log)
    }

    fn system(&self, what: &'static str, source: std::io::Error) -> AuditError {
        AuditError::System { path: self.path.display().to_string(), what, source }
    }

    /// Writes to the disk what is going to be done. Returns the number of its line, to which the
    /// outcome refers.
    ///
    /// # Errors
    /// The system's. No line says then that it is going to be done.
    pub fn intend(&self, entry: Entry) -> Result<u64, std::io::Error> {
        let mut writing = lock(&self.writing);
        self.write_kept(&mut writing)?;
        writing.kept.push((entry, Stage::Intent));
        match self.write_kept(&mut writing) {
            Ok(()) => Ok(writing.chain.number),
            Err(error) => {
                writing.kept.clear(); // it was all there was
                Err(error)
            }
        }
    }

    /// Writes an entry to the disk. One that cannot be written is kept for later.
    ///
    /// # Errors
    /// The system's.
    pub fn record(&self, entry: Entry) -> Result<(), std::io::Error> {
        self.record_all([(entry, Stage::Done)])
    }

    /// Writes entries to the disk, at once. Those that cannot be written are kept for later.
    ///
    /// # Errors
    /// The system's.
    pub fn record_all(
        &self,
        entries: impl IntoIterator<Item = (Entry, Stage)>,
    ) -> Result<(), std::io::Error> {
        let mut writing = lock(&self.writing);
        for entry in entries {
            if writing.kept.len() < KEPT_LIMIT {
                writing.kept.push(entry);
            } else {
                writing.lost += 1;
            }
        }
        self.write_kept(&mut writing)
    }

    /// Writes what is kept, if anything is.
    ///
    /// # Errors
    /// The log cannot be written: nothing that belongs into it may be done.
    pub fn is_ready(&self) -> Result<(), std::io::Error> {
        self.write_kept(&mut lock(&self.writing))
    }

    /// The hash of the last line on the disk.
    pub fn last_hash(&self) -> Hash {
        lock(&self.writing).chain.hash
    }

    fn write_kept(&self, writing: &mut Writing) -> Result<(), std::io::Error> {
        if writing.kept.is_empty() {
            return Ok(());
        }
        if writing.bytes >= self.limit_bytes {
            self.begin_another(writing)?;
        }
        let (mut text, mut chain) = (String::new(), writing.chain);
        let lost = (writing.lost > 0).then(|| {
            let what = format!("{} entries could not be written and are lost", writing.lost);
            (own_entry(what), Stage::Done)
        });
        for (entry, stage) in writing.kept.iter().chain(&lost) {
            let (line, next) = chain.line(entry, *stage);
            text.push_str(&line);
            chain = next;
        }
        if writing.is_torn {
            writing.file.set_len(writing.bytes)?;
        }
        writing.is_torn = true;
        writing.file.write_all(text.as_bytes())?;
        writing.file.sync_data()?;
        (writing.chain, writing.is_torn) = (chain, false);
        writing.bytes += text.len() as u64;
        writing.kept.clear();
        writing.lost = 0;
        Ok(())
    }

    fn begin_another(&self, writing: &mut Writing) -> Result<(), std::io::Error> {
        let mut old = self.path.clone().into_os_string();
        old.push(format!(".{}", writing.chain.number));
        match std::fs::rename(&self.path, old) {
            // An earlier attempt came this far.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            renamed => renamed?,
        }
        let file = open(&self.path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        if file.metadata()?.len() > 0 {
            return Err(std::io::Error::other("another process has begun the next file"));
        }
        sync_folder(&self.path)?;
        (writing.file, writing.bytes) = (file, 0);
        Ok(())
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, FILE_MODE)?))
}

/// The last file of the log before the one at `path`, if there is one, with the number of its last
/// line by its name: see [`FILE_LIMIT_BYTES`].
fn last_before(path: &Path) -> std::io::Result<Option<(u64, PathBuf)>> {
    let Some(name) = path.file_name() else { return Ok(None) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut last = None;
    for file in std::fs::read_dir(folder.unwrap_or(Path::new(".")))? {
        let file = file?;
        let rest = file.file_name().into_encoded_bytes();
        let number =
            rest.strip_prefix(name.as_encoded_bytes()).and_then(|it| it.strip_prefix(b"."));
        let number = number.and_then(|it| std::str::from_utf8(it).ok()?.parse::<u64>().ok());
        last = last.max(number.map(|number| (number, file.path())));
    }
    Ok(last)
}

fn own_entry(what: String) -> Entry {
    Entry { unix_ms: unix_ms(), who: "farpool".into(), from: None, what, outcome: 0 }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn entry(number: u64) -> Entry {
        let what = format!("PUT /v1/nodes/{number}");
        Entry { unix_ms: number, who: "operator ann".into(), from: None, what, outcome: 201 }
    }

    #[test]
    fn what_is_intended_is_on_the_disk_before_it_is_done() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open(&path).expect("a new log");
        let (one, two) = (log.intend(entry(1)), log.intend(entry(2)));
        assert_eq!((one.expect("written"), two.expect("written")), (2, 3));
        assert_eq!(verified(&path).open.into_keys().collect::<Vec<_>>(), [2, 3]);
        log.record_all([(entry(2), Stage::OutcomeOf(3))]).expect("written");
        drop(log);
        // The process has ended in between.
        let log = AuditLog::open(&path).expect("the same log");
        let open = verified(&path).open;
        assert_eq!(open.into_iter().collect::<Vec<_>>(), [(2, entry(1).what)]);
        log.record_all([(entry(1), Stage::OutcomeOf(2))]).expect("written");
        assert!(verified(&path).open.is_empty());
    }

    /// The file's folder is gone, and the file has reached its limit: there is no next one.
    #[test]
    fn what_could_not_be_announced_is_not_said_later_to_have_been() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open_with_limit(&path, 1).expect("a new log");
        std::fs::remove_dir_all(folder.path()).expect("removed");
        log.intend(entry(1)).expect_err("there is no place for it");
        std::fs::create_dir(folder.path()).expect("there again");
        log.record(entry(2)).expect("written");
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.contains(&entry(2).what) && !text.contains(&entry(1).what), "{text}");
        assert!(verified(&path).open.is_empty());
    }

    fn verified(path: &Path) -> crate::Verified {
        let file = File::open(path).expect("a log");
        verify(BufReader::new(file), None).expect("as written")
    }

    #[test]
    fn a_log_goes_on_where_it_ended_and_one_process_writes_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open(&path).expect("a new log");
        log.record(entry(1)).expect("written");
        assert!(matches!(AuditLog::open(&path), Err(AuditError::InUse { .. })));
        drop(log);
        let log = AuditLog::open(&path).expect("the same log");
        log.record(entry(2)).expect("written");
        assert_eq!(verified(&path).end, Chain { number: 4, hash: log.last_hash() });
        let mode = std::fs::metadata(&path).expect("a log").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn an_unfinished_line_is_removed_and_told_and_a_changed_one_refuses_the_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        AuditLog::open(&path).expect("a new log").record(entry(1)).expect("written");
        let whole = std::fs::read_to_string(&path).expect("text");
        std::fs::write(&path, format!("{whole}{{\"number\":3,")).expect("written");
        drop(AuditLog::open(&path).expect("it is repaired"));
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(text.starts_with(&whole) && text.contains("12 bytes of an unfinished line"));
        assert_eq!(verified(&path).end.number, 3);
        std::fs::write(&path, text.replace("operator ann", "operator bob")).expect("written");
        let error = AuditLog::open(&path).expect_err("it was changed").to_string();
        assert!(error.contains("line 2 is broken") && error.contains("audit.log"), "{error}");
    }

    #[test]
    fn a_long_log_is_continued_in_another_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open_with_limit(&path, 1000).expect("a new log");
        (1..=10).for_each(|number| log.record(entry(number)).expect("written"));
        let mut files: Vec<_> = std::fs::read_dir(folder.path()).expect("files").collect();
        assert!(files.len() > 2, "{files:?}");
        let number =
            |name: &str| name.rsplit('.').next().expect("a part").parse().unwrap_or(u64::MAX);
        files.sort_by_key(|file| {
            number(file.as_ref().expect("a file").file_name().to_str().expect("UTF-8"))
        });
        let text = |file: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(file.expect("a file").path()).expect("text")
        };
        let all: String = files.into_iter().map(text).collect();
        let verified = verify(all.as_bytes(), None).expect("one chain");
        assert_eq!((verified.first, verified.end.number), (1, 11));
    }

    #[test]
    fn a_log_that_ended_between_two_files_goes_on_with_its_chain() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open(&path).expect("a new log");
        log.record(entry(1)).expect("written");
        drop(log);
        let [older, before, other] =
            ["1", "2", "10"].map(|end| folder.path().join(format!("audit.log.{end}")));
        std::fs::write(older, "").expect("written");
        std::fs::rename(&path, &other).expect("renamed");
        let error = AuditLog::open(&path).expect_err("its last line is 2").to_string();
        assert!(error.contains("audit.log.10"), "{error}");
        std::fs::rename(&other, &before).expect("renamed");
        drop(AuditLog::open(&path).expect("the next file"));
        assert_eq!(verified(&path).first, 3);
        let both = [before, path].map(|file| std::fs::read_to_string(file).expect("text"));
        assert_eq!(verify(both.concat().as_bytes(), None).expect("one chain").end.number, 3);
    }

    #[test]
    fn a_renamed_file_without_a_next_one_is_no_end_of_the_log() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open_with_limit(&path, 1).expect("a new log");
        std::fs::rename(&path, folder.path().join("audit.log.1")).expect("renamed");
        log.record(entry(1)).expect("an earlier attempt came this far");
        assert_eq!(verified(&path).first, 2);
    }

    #[test]
    fn what_is_lost_while_nothing_can_be_written_is_counted_and_takes_no_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open(&path).expect("a new log");
        let full = File::options().write(true).open("/dev/full").expect("a full disk");
        let file = std::mem::replace(&mut lock(&log.writing).file, full);
        let entries = 1..=KEPT_LIMIT as u64 + 50;
        for number in entries {
            log.record(entry(number)).expect_err("the disk is full");
        }
        assert_eq!(lock(&log.writing).kept.len(), KEPT_LIMIT);
        lock(&log.writing).file = file;
        log.is_ready().expect("there is room");
        let text = std::fs::read_to_string(&path).expect("text");
        let last = text.lines().next_back().expect("a line");
        assert!(last.contains("50 entries could not be written and are lost"), "{last}");
        assert_eq!(verified(&path).end.number, KEPT_LIMIT as u64 + 2);
    }

    #[test]
    fn what_cannot_be_written_is_kept_and_written_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.log");
        let log = AuditLog::open(&path).expect("a new log");
        let full = File::options().write(true).open("/dev/full").expect("a full disk");
        let file = std::mem::replace(&mut lock(&log.writing).file, full);
        log.record(entry(1)).expect_err("the disk is full");
        log.is_ready().expect_err("it still is");
        lock(&log.writing).file = file;
        log.is_ready().expect("there is room");
        log.record(entry(2)).expect("written");
        let text = std::fs::read_to_string(&path).expect("text");
        let at = |what: &str| text.find(what).expect("it is there");
        assert!(at("nodes/1\"") < at("nodes/2\""));
        assert_eq!(verified(&path).end.number, 3);
    }
}
