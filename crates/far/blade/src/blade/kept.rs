//! What a blade lends outlives its process: each change of the table is kept before anybody is told
//! of it, and before anything is zeroed because of it ([`crate::journal`]).
//!
//! Pages need no care: their file has them from the moment that a client's bytes are received, and
//! a write that was under way when the process ended was not answered. Its client sends it again.

use super::{Blade, Memory, Store, backing, limits_of, random};
use crate::config::{BackingKind, BladeConfig, Persist};
use crate::journal::{Found, Journal, path_of};
use crate::memory::{SegmentMemory, identity_at};
use crate::table::{Image, ImageError, Limits, Refused, Row, SegmentImage, Table};
use crate::takeover::KEEPS_NO_TABLE;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::SegmentId;
use std::io;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// What a blade has of an earlier process with the same memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Past {
    /// Processes that have served this blade, this one included; 0 for a blade that nothing is kept
    /// of.
    pub starts: u64,
    /// Its clients when it started, which have a lease to come back.
    pub clients: usize,
    /// Their segments.
    pub segments: usize,
    /// Their memory.
    pub bytes: u64,
    /// Why what it lent before is lost, if there was something.
    pub loss: Option<String>,
}

/// A blade's parts that may be older than its process.
pub(super) struct Kept {
    pub(super) id: u64,
    pub(super) table: Table<Memory>,
    pub(super) journal: Option<Journal>,
    pub(super) past: Past,
}

/// Why an image is not the table of this memory.
#[derive(Debug, Error)]
enum RestoreError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(
        "segment {segment} has memory that lies behind the blade's {capacity_bytes} bytes, or \
         memory of another one; start the blade with as much memory as before"
    )]
    Memory { segment: u64, capacity_bytes: u64 },
}

/// Makes the blade's table: the one that an earlier process has left, or a new one.
pub(super) fn open(config: &BladeConfig, store: &Store, limits: Limits) -> io::Result<Kept> {
    let new_id = u64::from_le_bytes(random()?);
    if config.persist.is_none() {
        let (table, past) = (Table::new(limits), without_table(&config.backing)?);
        return Ok(Kept { id: new_id, table, journal: None, past });
    }
    let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
    let BackingKind::File(path) = &config.backing else {
        return Err(invalid("only memory in a file or device outlives the process"));
    };
    let (memory, is_new) = store.identity().ok_or_else(|| invalid("the memory has no file"))?;
    let (journal, found) = Journal::open(path_of(path), memory, is_new, new_id, is_table(limits))?;
    let (image, loss) = match found {
        Found::Nothing => (Image::default(), None),
        Found::Image(image) => (image, None),
        Found::Lost(reason) => (Image::default(), Some(reason)),
    };
    let restored = restore(store, limits, &image);
    let mut table =
        restored.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    table.record_changes();
    let (clients, segments) = image.counts();
    let bytes = image.superpages() * SUPERPAGE_BYTES;
    let past = Past { starts: journal.starts(), clients, segments, bytes, loss };
    Ok(Kept { id: journal.blade_id(), table, journal: Some(journal), past })
}

/// Checks, while another process serves the memory in `path`, that a blade with this configuration
/// could go on with what it lends. Returns what is in the way.
pub(crate) fn check_successor(config: &BladeConfig, path: &Path) -> Result<(), String> {
    let text = |error: io::Error| format!("{}: {error}", path.display());
    let limits = limits_of(config);
    let memory = identity_at(path).map_err(text)?;
    let image = Journal::peek(&path_of(path), &memory, is_table(limits)).map_err(text)?;
    let image = image?.ok_or(KEEPS_NO_TABLE)?;
    let file = std::fs::metadata(path).map_err(text)?;
    if file.is_file() && file.len() > config.memory_bytes {
        // It may have lent more since the table was read.
        let bytes = file.len();
        return Err(format!(
            "its memory has {bytes} bytes; give at least as much (--memory, a node: --donate)"
        ));
    }
    let outside = image
        .segments()
        .find(|segment| segment.places.values().any(|place| *place >= limits.capacity_superpages));
    outside.map_or(Ok(()), |segment| Err(misplaced(segment, limits).to_string()))
}

/// Checks that a table can have left an image.
fn is_table(limits: Limits) -> impl Fn(&Image) -> Result<(), ImageError> {
    move |image| Table::restore(limits, image, |_| Ok(())).map(|_: Table<()>| ())
}

fn misplaced(segment: &SegmentImage, limits: Limits) -> RestoreError {
    let capacity_bytes = u64::from(limits.capacity_superpages) * SUPERPAGE_BYTES;
    RestoreError::Memory { segment: segment.row.id, capacity_bytes }
}

/// The past of a blade that keeps no table: one that lies beside its file is not of what it lends,
/// and is set aside.
fn without_table(backing: &BackingKind) -> io::Result<Past> {
    let BackingKind::File(path) = backing else { return Ok(Past::default()) };
    let kept = crate::journal::set_aside(&path_of(path))?;
    let loss = kept.map(|kept| {
        format!("this blade is started without --persist (its table is kept as {})", kept.display())
    });
    Ok(Past { loss, ..Past::default() })
}

fn restore(store: &Store, limits: Limits, image: &Image) -> Result<Table<Memory>, RestoreError> {
    let make = |segment: &SegmentImage| {
        let memory: io::Result<SegmentMemory> = store.restore_segment(segment);
        memory.map(Arc::new).map_err(|_| misplaced(segment, limits))
    };
    Table::restore(limits, image, make)
}

impl Blade {
    /// What it has of an earlier process.
    pub fn past(&self) -> &Past {
        &self.past
    }

    /// Changes the table. What was changed is pushed to the journal in the table's order.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Table<Memory>) -> R) -> R {
        let mut table = self.write();
        let result = change(&mut table);
        if let Some(journal) = &self.journal {
            journal.push(table.take_changes());
        }
        result
    }

    /// Records where a segment's superpages lie.
    pub(super) fn keep_places(&self, segment: SegmentId, pairs: Vec<(u32, u32)>) {
        if let Some(journal) = &self.journal
            && !pairs.is_empty()
        {
            journal.push(vec![Row::Placed { segment: segment.0, pairs }]);
        }
    }

    /// Returns once all changes so far are kept.
    pub(super) fn keep_changes(&self) -> Result<(), Refused> {
        let Some(journal) = &self.journal else { return Ok(()) };
        journal.commit().map_err(|error| {
            if self.journal_log.may_write(self.now()) {
                tracing::error!(
                    %error,
                    path = %journal.path().display(),
                    "the blade's table cannot be kept; until it can, nothing is lent or freed"
                );
            }
            backing(&error)
        })
    }

    /// Keeps the table's file short. To be called now and then.
    pub(crate) fn compact(&self) {
        let Some(journal) = &self.journal else { return };
        let image = |forget_pending: &dyn Fn()| {
            let table = self.read();
            forget_pending();
            let mut image = table.image();
            table.memories().for_each(|(id, memory)| image.set_places(id, memory.places()));
            image
        };
        if let Err(error) = journal.compact(image)
            && self.journal_log.may_write(self.now())
        {
            tracing::warn!(%error, "the blade's table cannot be written anew; it grows");
        }
    }

    /// Ends serving in good order: with [`Persist::Reboot`], all memory is in its file when this
    /// returns. To be called when no connection is left.
    ///
    /// # Errors
    /// The memory or the table could not be written; both still outlive the process.
    pub fn finish(&self) -> io::Result<()> {
        match (&self.journal, self.config.persist) {
            (Some(journal), Some(Persist::Reboot)) => {
                self.store.sync()?;
                journal.close()
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Blade {
    fn drop(&mut self) {
        if self.journal.is_some() {
            self.store.keep();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Origin;
    use farpool_wire::{ClientId, ErrorCode, Hello, SuperpageNumber};
    use std::fs::File;

    fn blade(memory: &std::path::Path) -> Blade {
        let config = BladeConfig {
            memory_bytes: 4 * SUPERPAGE_BYTES,
            backing: BackingKind::File(memory.to_owned()),
            persist: Some(Persist::Restart),
            ..BladeConfig::default()
        };
        Blade::new(config).expect("a blade")
    }

    /// While the table's file is full nothing is promised and nothing zeroed; what was done all the
    /// same is kept once there is room.
    #[test]
    fn nothing_is_promised_that_cannot_be_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = folder.path().join("memory");
        let first = blade(&memory);
        let connect = |id| {
            let hello = Hello::first(ClientId(id), "");
            first.connect(&hello, Origin::Loopback).map(|connected| connected.number)
        };
        let client = connect(1).expect("a client");
        let (segment, _) = first.create_segment(client, 4).expect("a segment");
        let (at, mut pairs) = (SuperpageNumber, Vec::new());
        first.allocate(client, segment, at(0), 2, &mut pairs).expect("memory");
        let journal = first.journal.as_ref().expect("a journal");
        let file = journal.exchange(File::options().write(true).open("/dev/full").expect("full"));
        let full = |result: Result<(), Refused>| result.map_err(|refused| refused.code);
        let refused = Err(ErrorCode::Backing);
        assert_eq!(full(first.allocate(client, segment, at(2), 1, &mut pairs)), refused);
        assert_eq!(full(first.free(client, segment, at(1), 1)), refused);
        assert_eq!(full(connect(2).map(drop)), refused);
        first.run_scrubs();
        let scrubbed = || first.stat(first.now()).totals.superpages_scrubbed.get();
        assert_eq!(scrubbed(), 0, "the next process would take it for the client's");
        journal.exchange(file);
        first.run_scrubs();
        assert_eq!(scrubbed(), 1);
        drop(first);
        let second = blade(&memory);
        let expected =
            Past { starts: 2, clients: 2, segments: 1, bytes: 2 * SUPERPAGE_BYTES, loss: None };
        assert_eq!(second.past(), &expected);
    }
}
