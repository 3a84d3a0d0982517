//! The file beside a blade's memory that keeps its table: what the blade lends outlives its
//! process.
//!
//! A change is pushed while the table is locked, so that the file has the order of the table, and
//! written by [`Journal::commit`] without that lock, before anybody is told of it and before
//! anything is zeroed because of it. The kernel keeps what a process has written when the process
//! ends; nothing is synced on the way (see [`Unusable::Rebooted`]).
//!
//! Locks: `file`, then the table, then `pending`.

mod text;

use crate::table::{Image, ImageError, Row};
use farpool_kernel::{lock, replace_secret};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
pub(crate) use text::MemoryFile;
use text::{Header, Line, Past, Unusable};

/// The table's file is written anew once it is longer than this, and than [`GROWTH`] times what it
/// was when it was last written anew.
const COMPACTION_MIN_BYTES: u64 = 1 << 20;
/// See [`COMPACTION_MIN_BYTES`]: the file is at most some times longer than need be, and writing it
/// anew is some times rarer than changes.
const GROWTH: u64 = 4;

/// Where a blade's table is kept.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    header: Header,
    file: Mutex<JournalFile>,
    /// Changes that the file does not have yet.
    pending: Mutex<Vec<Vec<Row>>>,
}

#[derive(Debug)]
struct JournalFile {
    file: File,
    /// All before is written; what a write that failed has left there is written over.
    bytes: u64,
    bytes_when_new: u64,
    /// Lines that could not be written.
    unwritten: Vec<u8>,
}

/// What was found of an earlier process.
#[derive(Debug)]
pub(crate) enum Found {
    /// Nothing: there was none.
    Nothing,
    /// What it lent.
    Image(Image),
    /// It cannot be used, and clients are told so by another blade id.
    Lost(String),
}

/// The name of the file that keeps the table, for memory in `path`.
pub(crate) fn path_of(memory: &Path) -> PathBuf {
    let mut name = memory.as_os_str().to_owned();
    name.push(".table");
    PathBuf::from(name)
}

impl Journal {
    /// Reads what an earlier process kept. `new_id` is the blade's if there is nothing to go on
    /// with, or nothing that `check` takes for a table. A file that cannot be used is kept under
    /// another name.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open(
        path: PathBuf,
        memory: MemoryFile,
        is_memory_new: bool,
        new_id: u64,
        check: impl Fn(&Image) -> Result<(), ImageError>,
    ) -> io::Result<(Journal, Found)> {
        let boot = boot()?;
        let usable = match read(&path)? {
            Ok(Some(_)) if is_memory_new => Err(Unusable::OtherMemory),
            past => past.and_then(|past| usable(past, &memory, &boot, check)),
        };
        let (blade_id, starts, found) = match usable {
            Ok(Some(past)) => {
                (past.header.blade_id, past.header.starts + 1, Found::Image(past.image))
            }
            Ok(None) => (new_id, 1, Found::Nothing),
            Err(unusable) => {
                let kept = set_aside(&path)?.unwrap_or_else(|| path.clone());
                (new_id, 1, Found::Lost(format!("{unusable} (kept as {})", kept.display())))
            }
        };
        let header = Header { version: text::VERSION, blade_id, starts, boot, memory };
        let image = match &found {
            Found::Image(image) => image,
            _ => &Image::default(),
        };
        let file = Mutex::new(write_anew(&path, &header, image)?);
        Ok((Journal { path, header, file, pending: Mutex::default() }, found))
    }

    /// Reads what a process keeps that still serves `memory`: nothing if it keeps no table, or why
    /// that cannot be used.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn peek(
        path: &Path,
        memory: &MemoryFile,
        check: impl Fn(&Image) -> Result<(), ImageError>,
    ) -> io::Result<Result<Option<Image>, String>> {
        let boot = boot()?;
        let usable = read(path)?.and_then(|past| usable(past, memory, &boot, check));
        Ok(usable.map(|past| Some(past?.image)).map_err(|unusable| unusable.to_string()))
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The blade's id.
    pub(crate) fn blade_id(&self) -> u64 {
        self.header.blade_id
    }

    /// Processes that have served this blade.
    pub(crate) fn starts(&self) -> u64 {
        self.header.starts
    }

    /// Takes one change. The caller holds the table, or the change does not depend on its order.
    pub(crate) fn push(&self, rows: Vec<Row>) {
        if !rows.is_empty() {
            lock(&self.pending).push(rows);
        }
    }

    /// Returns once all that was pushed before is written.
    ///
    /// # Errors
    /// The system's. What could not be written is tried again by the next call.
    pub(crate) fn commit(&self) -> io::Result<()> {
        let mut file = lock(&self.file);
        let changes = std::mem::take(&mut *lock(&self.pending));
        for rows in changes {
            text::append(&Line::Change(rows), &mut file.unwritten)?;
        }
        file.write()
    }

    /// Writes the file anew if it has become long. `image` is asked for what the table has now,
    /// and for nothing pushed meanwhile: it holds the table while it calls its argument.
    ///
    /// # Errors
    /// The system's; the file is as it was, and is tried again after the next change.
    pub(crate) fn compact(&self, image: impl FnOnce(&dyn Fn()) -> Image) -> io::Result<()> {
        let mut file = lock(&self.file);
        if file.bytes < COMPACTION_MIN_BYTES.max(GROWTH * file.bytes_when_new) {
            return Ok(());
        }
        // Written first, so that an error loses nothing that was pushed.
        let earlier = std::mem::take(&mut *lock(&self.pending));
        for rows in earlier {
            text::append(&Line::Change(rows), &mut file.unwritten)?;
        }
        file.write()?;
        let contained = RefCell::new(Vec::new());
        let image = image(&|| contained.borrow_mut().append(&mut lock(&self.pending)));
        match write_anew(&self.path, &self.header, &image) {
            Ok(anew) => *file = anew,
            Err(error) => {
                // The file as it was lacks what the new one would have had.
                for rows in contained.into_inner() {
                    text::append(&Line::Change(rows), &mut file.unwritten)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Records that the memory is in its file, whatever happens to the machine.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.commit()?;
        let mut file = lock(&self.file);
        text::append(&Line::Closed, &mut file.unwritten)?;
        file.write()?;
        file.file.sync_all()
    }
}

#[cfg(test)]
impl Journal {
    /// Writes to another file from now on. Returns the one before.
    pub(crate) fn exchange(&self, file: File) -> File {
        std::mem::replace(&mut lock(&self.file).file, file)
    }
}

impl JournalFile {
    fn write(&mut self) -> io::Result<()> {
        if self.unwritten.is_empty() {
            return Ok(());
        }
        self.file.write_all_at(&self.unwritten, self.bytes)?;
        self.bytes += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }
}

/// What a file says; nothing if there is none.
fn read(path: &Path) -> io::Result<Result<Option<Past>, Unusable>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(text::read(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Ok(None)),
        Err(error) => Err(error),
    }
}

/// What of it can be gone on with.
fn usable(
    past: Option<Past>,
    memory: &MemoryFile,
    boot: &str,
    check: impl Fn(&Image) -> Result<(), ImageError>,
) -> Result<Option<Past>, Unusable> {
    let Some(mut past) = past else { return Ok(None) };
    past.check(memory, boot)?;
    past.image.drop_unplaced();
    check(&past.image)?;
    Ok(Some(past))
}

/// Replaces the file as a whole; an error leaves the old one.
fn write_anew(path: &Path, header: &Header, image: &Image) -> io::Result<JournalFile> {
    let mut bytes = Vec::new();
    text::append(&Line::Header(header.clone()), &mut bytes)?;
    text::append(&Line::Change(image.rows().collect()), &mut bytes)?;
    let file = replace_secret(path, &bytes)?;
    let length = bytes.len() as u64;
    Ok(JournalFile { file, bytes: length, bytes_when_new: length, unwritten: Vec::new() })
}

/// Keeps a file that cannot be used, or that is not of this blade, for whoever wants to know.
/// Returns its new name, if there is one.
///
/// # Errors
/// The system's.
pub(crate) fn set_aside(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut name = path.as_os_str().to_owned();
    name.push(".unusable");
    match std::fs::rename(path, &name) {
        Ok(()) => Ok(Some(name.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The kernel's name for the time since the machine was started.
fn boot() -> io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(id: u64) -> Row {
        Row::SegmentEnded { id }
    }

    /// The file cannot be written anew: nothing that the new one would have had is forgotten.
    #[test]
    fn a_file_that_cannot_be_written_anew_goes_on_with_all_changes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("table");
        let memory = MemoryFile { device: 1, inode: 1, born_ns: None };
        let opened = Journal::open(path.clone(), memory, true, 1, |_| Ok(()));
        let (journal, _) = opened.expect("a journal");
        lock(&journal.file).bytes_when_new = 0;
        let next = |client, segment| Row::Next { client, segment };
        while lock(&journal.file).bytes < COMPACTION_MIN_BYTES {
            journal.push(vec![segment(7); 10_000]);
            journal.commit().expect("room");
        }
        let temporary = folder.path().join(format!(".table.{}.tmp", std::process::id()));
        std::fs::create_dir(&temporary).expect("in the way");
        let image = |forget_pending: &dyn Fn()| {
            journal.push(vec![next(41, 1)]);
            forget_pending();
            journal.push(vec![next(1, 42)]);
            Image::default()
        };
        journal.compact(image).expect_err("a folder is in the way");
        let kept = || {
            let past = text::read(&std::fs::read(&path).expect("a file")).expect("as written");
            past.expect("a past").image.rows().next()
        };
        journal.commit().expect("room");
        assert_eq!(kept(), Some(next(41, 42)), "from before the image, and from after it");
        std::fs::remove_dir(&temporary).expect("it is out of the way");
        journal
            .compact(|forget_pending| {
                forget_pending();
                let mut image = Image::default();
                image.apply(next(43, 44)).expect("a row");
                image
            })
            .expect("written anew");
        assert_eq!(kept(), Some(next(43, 44)));
        assert!(lock(&journal.file).bytes < COMPACTION_MIN_BYTES);
    }
}
