//! A flash file as a whole: opening it, taking it into use, closing it cleanly.
//!
//! The order of writes keeps promises however the process ends. To take it into use: the
//! bookkeeping is found and checked as a whole, a memory file is filled with it and named, then the
//! superblock on the device says where it is; only then does anything else change. To close it:
//! zones and bookkeeping are written to the device, then the superblock says so, then the memory
//! file is removed. docs/contributors/kv-flash.md discusses every way to end.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use farpool_kv_store::key::HashSeed;
use farpool_units::{PAGE_BYTES, exactly};

use super::control::Control;
use super::device::{self, random_id, random_nonce, random_seed};
use super::layout::{
    self, CLOSING_SUM_AT, ClosingSum, Geometry, Nonce, Superblock, Use, ZONE_BYTES,
};
use super::live::{Identity, LiveFile, LiveHeader, remove_stale};
use super::opening::{Dropped, Held, Said, Side, Source, Testimony, decide};
use super::settings::{Bookkeeping, FlashError, FlashSettings};
use super::shared_map::SharedMap;
use super::witness::{LastUse, Witness};

use farpool_disk::Pages;

/// The steps of opening and closing: a process may end at each of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The bookkeeping was found, or is to begin anew; space is allocated.
    Chosen,
    /// The bookkeeping was checked, and is where it will be used.
    Prepared,
    /// The memory file has its name.
    Named,
    /// The witness names the use that begins, or the closing, beside the one before.
    Witnessed,
    /// The superblock says that the flash is in use.
    InUse,
    /// The device has all of the bookkeeping.
    BookWritten,
    /// The superblock says that the flash was closed.
    Closed,
}

/// An open and locked flash file.
#[derive(Debug)]
pub struct FlashFile {
    path: PathBuf,
    /// Through the page cache: for the superblock and the bookkeeping.
    file: File,
    /// Direct I/O: for zones.
    direct: OwnedFd,
    superblock: Superblock,
    geometry: Geometry,
    /// The bookkeeping in memory; None if it is in the flash file.
    live: Option<LiveFile>,
    /// None for a device.
    witness: Option<Witness>,
    /// Why the earlier content was dropped, if it was.
    dropped: Option<Dropped>,
    /// Shards that begin empty because their bookkeeping could not be trusted.
    emptied: Vec<bool>,
}

/// One shard's part of the file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) control: Control<SharedMap>,
    pub(super) direct: OwnedFd,
    /// A request to a regular file may block its caller in the file system.
    pub(super) is_regular: bool,
    pub(super) zones_at: u64,
    pub(super) geometry: Geometry,
    pub(super) is_emptied: bool,
}

/// Why a flash was not closed cleanly.
#[derive(Debug, thiserror::Error)]
pub enum Unclosed {
    #[error(
        "the device did not take the book-keeping ({0}): it stays in memory, where the next start \
         finds it unless the machine goes down"
    )]
    Kept(std::io::Error),
    #[error("the device did not take the book-keeping ({0}): the next start begins empty")]
    GivenUp(std::io::Error),
    #[error(
        "the device took neither the book-keeping nor a note of that ({0}): begin with \
         --flash-reset"
    )]
    Unsure(std::io::Error),
}

/// The state in which a flash was found, before anything is written.
struct Found {
    known: Option<Superblock>,
    source: Source,
    /// The memory file, if it holds the valid bookkeeping.
    live: Option<LiveFile>,
    witness: Option<Witness>,
    identity: Identity,
    boot_id: [u8; 16],
}

impl FlashFile {
    /// Opens or creates the file for `shards` shards. `now_unix_s` is the present time.
    pub fn open(
        settings: &FlashSettings,
        shards: usize,
        now_unix_s: i64,
    ) -> Result<Self, FlashError> {
        Self::open_telling(settings, shards, now_unix_s, &mut |_| ())
    }

    /// As [`Self::open`]; calls `told` after each step.
    pub fn open_telling(
        settings: &FlashSettings,
        shards: usize,
        now_unix_s: i64,
        told: &mut dyn FnMut(Step),
    ) -> Result<Self, FlashError> {
        let path = &settings.path;
        let (file, is_new) = device::open_for_us(path)?;
        device::lock(&file, path)?;
        let opened = Self::open_locked(file, settings, (shards, now_unix_s), told);
        if opened.is_err() && is_new {
            // A refused start leaves nothing behind; nobody else uses what we locked when it was
            // new.
            let _ = std::fs::remove_file(path);
        }
        opened
    }

    fn open_locked(
        file: File,
        settings: &FlashSettings,
        (shards, now_unix_s): (usize, i64),
        told: &mut dyn FnMut(Step),
    ) -> Result<Self, FlashError> {
        let path = &settings.path;
        let failed = |action| {
            let path = path.clone();
            move |source| FlashError::Io { path, action, source }
        };
        let geometry = device::geometry(settings, shards)?;
        device::check_device(&file, geometry, path)?;
        let Found { known, source, live, witness, identity, boot_id } =
            look(&file, geometry, settings)?;
        if matches!(source, Source::Nothing(_)) {
            let room = device::check_room(&file, geometry);
            room.map_err(failed("room for it cannot be made"))?;
        }
        let goes_on = live.is_some();
        let directories = settings.books.directories();
        remove_stale(directories, identity, live.as_ref().and(known.map(|it| it.nonce)));
        let live = if goes_on { live } else { place_in_memory(settings, geometry)? };
        if matches!(source, Source::Nothing(_)) {
            device::make_room(&file, geometry)
        } else {
            // A copy may have left out blocks of zeros: then writing into the mapping could kill
            // the process.
            farpool_disk::take_room(&file, geometry.file_bytes())
        }
        .map_err(failed("room for it cannot be made"))?;
        let direct = farpool_disk::open_direct(path);
        let direct = direct.map_err(failed("it cannot be opened for direct I/O"))?;
        let superblock = known.filter(|_| !matches!(source, Source::Nothing(_)));
        let superblock = match superblock {
            Some(known) => known,
            None => new_superblock(geometry, now_unix_s, boot_id)
                .map_err(failed("random numbers are not to be had"))?,
        };
        let dropped = if let Source::Nothing(why) = source { why } else { None };
        let (path, emptied) = (path.clone(), vec![false; shards]);
        let mut opened =
            Self { path, file, direct, superblock, geometry, live, witness, dropped, emptied };
        told(Step::Chosen);
        opened.prepare(source)?;
        told(Step::Prepared);
        opened.superblock.boot_id = boot_id;
        opened.superblock.state = if opened.live.is_some() { Use::InMemory } else { Use::InUse };
        if !goes_on {
            opened.superblock.nonce =
                random_nonce().map_err(failed("random numbers are not to be had"))?;
            let header = live_header(&opened.superblock, identity);
            if let Some(live) = &mut opened.live {
                live.name(&header).map_err(failed("its book-keeping cannot be named"))?;
            }
        }
        told(Step::Named);
        opened.superblock.is_witnessed = opened.announce(known);
        told(Step::Witnessed);
        opened.write_superblock().map_err(failed("it cannot be written"))?;
        told(Step::InUse);
        opened.settle_witness();
        Ok(opened)
    }

    fn last_use(superblock: &Superblock) -> LastUse {
        LastUse { format_id: superblock.format_id, nonce: superblock.nonce }
    }

    /// Has the witness name the use that begins, beside that of `known`, the superblock on the
    /// device. False if there is no witness.
    fn announce(&mut self, known: Option<Superblock>) -> bool {
        let (present, next) =
            (known.as_ref().map(Self::last_use), Self::last_use(&self.superblock));
        let Some(witness) = &mut self.witness else { return false };
        if present == Some(next) && witness.names(next) {
            return true;
        }
        let announced = witness.announce(present, next);
        if let Err(error) = &announced {
            tracing::warn!(
                path = %self.path.display(), %error,
                "no file can be kept beside flash: an older copy of it will not be recognized"
            );
        }
        announced.is_ok()
    }

    /// Has the witness name the superblock's use only. If that fails, it names an earlier one as
    /// well, until the next start or closing.
    fn settle_witness(&mut self) {
        let present = Self::last_use(&self.superblock);
        let Some(witness) = self.witness.as_mut().filter(|_| self.superblock.is_witnessed) else {
            return;
        };
        if let Err(error) = witness.settle(present) {
            tracing::warn!(path = %self.path.display(), %error, "flash's witness is not written");
        }
    }

    /// Puts each shard's bookkeeping where it will be used, and checks it as far as its source is
    /// not trusted.
    fn prepare(&mut self, source: Source) -> Result<(), FlashError> {
        let io = |action| {
            let path = self.path.clone();
            move |source: std::io::Error| FlashError::Io { path, action, source }
        };
        let is_new = matches!(source, Source::Nothing(_));
        if is_new && self.live.is_none() {
            device::wipe_book(&self.file, self.geometry).map_err(io("it cannot be written"))?;
        }
        let Superblock { format_id, nonce, .. } = self.superblock;
        for shard in 0..self.geometry.shards {
            let mut memory = self.map(shard)?;
            if self.live.is_some() && matches!(source, Source::Closed | Source::Pages) {
                let read = self.file.read_exact_at(&mut memory, self.geometry.control_at(shard));
                read.map_err(io("its book-keeping cannot be read"))?;
            }
            let is_changed =
                source == Source::Closed && !layout::is_as_closed(format_id, nonce, &memory);
            let mut control = Control::new(memory, self.geometry, format_id);
            if is_new {
                control.write_promises(&layout::Promises::default());
            } else if is_changed || control.promises().is_none() {
                let by_chance = exactly(random_id() >> 32);
                control.begin_empty(by_chance);
                self.emptied[shard] = true;
            }
        }
        Ok(())
    }

    /// Maps a shard's bookkeeping where it is used.
    fn map(&self, shard: usize) -> Result<SharedMap, FlashError> {
        let (at, bytes) = (self.geometry.control_at(shard), self.geometry.control_bytes());
        SharedMap::new(self.book(), at, bytes).map_err(|errno| FlashError::Io {
            path: self.path.clone(),
            action: "its book-keeping cannot be mapped",
            source: errno.into(),
        })
    }

    /// The file that holds the bookkeeping while it is in use.
    fn book(&self) -> &File {
        self.live.as_ref().map_or(&self.file, |live| &live.file)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the bookkeeping is while the flash is in use, if not in the flash.
    #[must_use]
    pub fn book_path(&self) -> Option<&Path> {
        self.live.as_ref().map(LiveFile::path)
    }

    /// Unix time at which the clock of the file's items reads 0.
    #[must_use]
    pub const fn zero_unix_s(&self) -> i64 {
        self.superblock.zero_unix_s
    }

    /// The seed of the hashes of the file's items: a server that uses the file uses its seed.
    #[must_use]
    pub const fn hash_seed(&self) -> HashSeed {
        self.superblock.hash_seed
    }

    /// Why the earlier content of the file was dropped, if it was.
    #[must_use]
    pub const fn dropped(&self) -> Option<Dropped> {
        self.dropped
    }

    /// One shard's part of the file.
    pub(super) fn part(&self, shard: usize) -> Result<Part, FlashError> {
        let failed = |action| {
            move |source: std::io::Error| FlashError::Io { path: self.path.clone(), action, source }
        };
        let (geometry, is_emptied) = (self.geometry, self.emptied[shard]);
        let control = Control::new(self.map(shard)?, geometry, self.superblock.format_id);
        let direct = self.direct.try_clone().map_err(failed("it cannot be used by a thread"))?;
        let metadata = self.file.metadata().map_err(failed("it cannot be looked at"))?;
        let is_regular = metadata.file_type().is_file();
        let zones_at = geometry.zones_at(shard);
        Ok(Part { control, direct, is_regular, zones_at, geometry, is_emptied })
    }

    /// Updates the Unix time at which the clock of the file's items reads 0.
    pub fn set_zero(&mut self, zero_unix_s: i64) -> Result<(), FlashError> {
        if zero_unix_s == self.superblock.zero_unix_s {
            return Ok(());
        }
        self.superblock.zero_unix_s = zero_unix_s;
        self.write_superblock().map_err(|source| FlashError::Io {
            path: self.path.clone(),
            action: "it cannot be written",
            source,
        })
    }

    /// Writes the bookkeeping to the device and marks the file as closed cleanly, once all shards
    /// have written theirs.
    pub fn close(self) -> Result<(), Unclosed> {
        self.close_telling(&mut |_| ())
    }

    /// As [`Self::close`]; calls `told` after each step.
    pub fn close_telling(mut self, told: &mut dyn FnMut(Step)) -> Result<(), Unclosed> {
        match (self.write_closing(told), self.live.take()) {
            (Ok(()), Some(live)) => {
                let path = live.path().to_owned();
                if let Err(error) = live.remove() {
                    tracing::warn!(path = %path.display(), %error, "book-keeping that nobody needs \
                        any more stays in memory");
                }
                Ok(())
            }
            (Ok(()), None) => Ok(()),
            (Err(error), Some(_)) => Err(Unclosed::Kept(error)),
            (Err(error), None) => {
                // The kernel may drop pages that the device did not take.
                self.superblock.state = Use::GivenUp;
                Err(match self.write_superblock() {
                    Ok(()) => Unclosed::GivenUp(error),
                    Err(error) => Unclosed::Unsure(error),
                })
            }
        }
    }

    fn write_closing(&mut self, told: &mut dyn FnMut(Step)) -> std::io::Result<()> {
        // Used for this closing only, so that what an earlier one left on the device does not
        // match.
        let nonce = random_nonce()?;
        // The device may have failed earlier and work again now.
        self.write_book(nonce).or_else(|_| self.write_book(nonce))?;
        told(Step::BookWritten);
        let present = self.superblock;
        self.superblock.state = Use::Clean;
        self.superblock.nonce = nonce;
        if let Some(witness) = self.witness.as_mut().filter(|_| present.is_witnessed) {
            witness.announce(Some(Self::last_use(&present)), Self::last_use(&self.superblock))?;
        }
        told(Step::Witnessed);
        self.write_superblock()?;
        told(Step::Closed);
        self.settle_witness();
        Ok(())
    }

    /// Writes all shards' bookkeeping and its sums to the device, and waits for that and for all
    /// zones.
    fn write_book(&self, nonce: Nonce) -> std::io::Result<()> {
        let mut chunk = vec![0; ZONE_BYTES];
        for shard in 0..self.geometry.shards {
            let start = self.geometry.control_at(shard);
            let mut page = [0; PAGE_BYTES];
            self.book().read_exact_at(&mut page, start)?;
            let mut sum =
                ClosingSum::new(self.superblock.format_id, nonce, &page[..CLOSING_SUM_AT]);
            let mut at = start + PAGE_BYTES as u64;
            let end = self.geometry.control_at(shard + 1);
            while at < end {
                let left: usize = exactly(end - at);
                let part = &mut chunk[..left.min(ZONE_BYTES)];
                self.book().read_exact_at(part, at)?;
                sum = sum.append(part);
                self.file.write_all_at(part, at)?;
                at += part.len() as u64;
            }
            sum.write(&mut page);
            self.file.write_all_at(&page, start)?;
        }
        self.file.sync_all()
    }

    /// Writes the superblock, waits for the device, and reads it back by direct I/O: a flash in use
    /// that is marked as closed would bring back deleted items.
    fn write_superblock(&self) -> std::io::Result<()> {
        let bytes = self.superblock.encode();
        self.file.write_all_at(&bytes, 0)?;
        self.file.sync_all()?;
        let no_memory = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let mut page = Pages::new(1).ok_or_else(no_memory)?;
        let read = rustix::io::pread(self.direct.as_fd(), page.bytes_mut(), 0)?;
        if read < bytes.len() || !page.bytes().starts_with(&bytes) {
            let lost = "the device gives back something else than was written";
            return Err(std::io::Error::other(lost));
        }
        Ok(())
    }
}

/// Finds the flash's state, and which bookkeeping can be trusted. Writes nothing.
fn look(file: &File, geometry: Geometry, settings: &FlashSettings) -> Result<Found, FlashError> {
    let path = &settings.path;
    let failed = |action| {
        let path = path.clone();
        move |source| FlashError::Io { path, action, source }
    };
    let has = device::read_superblock(file).map_err(failed("it cannot be read"))?;
    let known = match has {
        None => None,
        Some(_) if settings.reset => None,
        Some(Err(reason)) => return Err(FlashError::NotOurs { path: path.clone(), reason }),
        Some(Ok(superblock)) => {
            device::check_shape(&superblock, geometry, settings)?;
            device::check_length(file, geometry, path)?;
            Some(superblock)
        }
    };
    let boot_id = device::boot_id().map_err(failed("the kernel's boot id cannot be read"))?;
    let identity = Identity::of(file).map_err(failed("it cannot be looked at"))?;
    let (side, live) = match known {
        Some(superblock) if superblock.state == Use::InMemory => {
            LiveFile::find(settings.books.directories(), &live_header(&superblock, identity))
        }
        _ => (Side::Absent, None),
    };
    let is_device = file.metadata().is_ok_and(|it| it.file_type().is_block_device());
    let witness = if is_device { None } else { Some(Witness::beside(path)) };
    let witness = witness.transpose().map_err(failed("the file beside it cannot be read"))?;
    let said = known.map(|it| Said {
        state: it.state,
        testimony: testimony(witness.as_ref(), &it),
        is_same_boot: it.boot_id == boot_id,
    });
    let source = decide(said, side).map_err(|Held| FlashError::InUse { path: path.clone() })?;
    let live = live.filter(|_| source == Source::Memory);
    Ok(Found { known, source, live, witness, identity, boot_id })
}

/// What the witness says of the use that the superblock names.
fn testimony(witness: Option<&Witness>, superblock: &Superblock) -> Testimony {
    match witness {
        None => Testimony::Last,
        Some(witness) if witness.names(FlashFile::last_use(superblock)) => Testimony::Last,
        Some(witness) if witness.names_any() => Testimony::Older,
        Some(_) if superblock.is_witnessed => Testimony::Gone,
        // None could be kept.
        Some(_) => Testimony::Last,
    }
}

/// The superblock of a flash that begins anew; its nonce is drawn later.
fn new_superblock(
    geometry: Geometry,
    now_unix_s: i64,
    boot_id: [u8; 16],
) -> std::io::Result<Superblock> {
    Ok(Superblock {
        shards: exactly(geometry.shards),
        zones_per_shard: exactly(geometry.zones_per_shard),
        format_id: random_id(),
        zero_unix_s: now_unix_s - i64::from(farpool_kv_store::clock::START_S),
        boot_id,
        state: Use::InUse,
        nonce: Nonce(0),
        hash_seed: random_seed()?,
        is_witnessed: false,
    })
}

fn live_header(superblock: &Superblock, identity: Identity) -> LiveHeader {
    let Superblock { shards, zones_per_shard, format_id, nonce, .. } = *superblock;
    LiveHeader { shards, zones_per_shard, format_id, nonce, identity }
}

/// A memory file for the bookkeeping; None if it has to be in the flash.
fn place_in_memory(
    settings: &FlashSettings,
    geometry: Geometry,
) -> Result<Option<LiveFile>, FlashError> {
    let bytes = geometry.book_bytes();
    match (LiveFile::create(settings.books.directories(), bytes), &settings.books) {
        (Ok(live), _) => Ok(Some(live)),
        (Err(reason), Bookkeeping::Only(_)) => {
            Err(FlashError::Bookkeeping { path: settings.path.clone(), bytes, reason })
        }
        (Err(reason), Bookkeeping::Preferably(_)) => {
            tracing::warn!(
                path = %settings.path.display(), bytes, reason,
                "flash's book-keeping finds no place in memory and stays in the flash: a file \
                 system that hangs will make the server hang; name a tmpfs with room \
                 (--flash-books)"
            );
            Ok(None)
        }
    }
}
