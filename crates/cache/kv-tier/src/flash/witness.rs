//! A small file beside a flash file that names the last use of it: an older copy that is put back
//! in place of the flash is recognized.
//!
//! Every use of a flash has a nonce ([`super::layout::Nonce`]), which is in its superblock. The
//! witness has room for two: before a superblock gets its next nonce, the witness names it beside
//! the present one; when the device has the superblock, the earlier one is wiped. So whenever the
//! process ends, the witness names the nonce that the superblock has, and none of a use after which
//! anything was served.
//!
//! A block device has no place beside it that outlives the machine, so it has no witness.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::layout::{Nonce, long, wide, word};

const MAGIC: [u8; 8] = *b"FPKVLAST";
const VERSION: u32 = 1;
const SLOT_BYTES: usize = 40;
/// Where the slots begin: each in a sector of its own, so that writing one cannot tear the other.
const SLOTS_AT: [u64; 2] = [0, 4096];
/// What the witness's name has after that of the flash.
const SUFFIX: &str = ".witness";

/// A use of a flash: the format that it belongs to, and its nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LastUse {
    pub(super) format_id: u64,
    pub(super) nonce: Nonce,
}

impl LastUse {
    fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut out = [0; SLOT_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..20].copy_from_slice(&self.format_id.to_le_bytes());
        out[20..36].copy_from_slice(&self.nonce.0.to_le_bytes());
        let sum = crc32c::crc32c(&out[..36]);
        out[36..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; SLOT_BYTES]) -> Option<Self> {
        let is_whole = bytes[..8] == MAGIC
            && word(bytes, 8) == VERSION
            && word(bytes, 36) == crc32c::crc32c(&bytes[..36]);
        is_whole.then(|| Self { format_id: long(bytes, 12), nonce: Nonce(wide(bytes, 20)) })
    }
}

/// The witness of one flash.
#[derive(Debug)]
pub(super) struct Witness {
    path: PathBuf,
    /// None while there is none.
    file: Option<File>,
    names: [Option<LastUse>; 2],
}

impl Witness {
    /// The witness of the flash at `path`, which exists. Writes nothing.
    pub(super) fn beside(path: &Path) -> std::io::Result<Self> {
        let mut name = std::fs::canonicalize(path)?.into_os_string();
        name.push(SUFFIX);
        let path = PathBuf::from(name);
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = match options.open(&path) {
            Ok(file) => Some(file),
            // A name that is too long cannot be written either, which is told then.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidFilename) =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        let read = |at: u64| {
            let mut bytes = [0; SLOT_BYTES];
            file.as_ref()?.read_exact_at(&mut bytes, at).ok()?;
            LastUse::decode(&bytes)
        };
        let names = SLOTS_AT.map(read);
        Ok(Self { path, file, names })
    }

    /// Whether it names any use.
    pub(super) fn names_any(&self) -> bool {
        self.names.iter().any(Option::is_some)
    }

    pub(super) fn names(&self, this: LastUse) -> bool {
        self.names.contains(&Some(this))
    }

    /// Names `next` beside `present`, which the superblock has, and waits until the disk has that.
    pub(super) fn announce(
        &mut self,
        present: Option<LastUse>,
        next: LastUse,
    ) -> std::io::Result<()> {
        let slot = usize::from(present.is_some() && self.names[0] == present);
        self.write(slot, Some(next))
    }

    /// Wipes all but `present`, which the superblock has now.
    pub(super) fn settle(&mut self, present: LastUse) -> std::io::Result<()> {
        for slot in 0..SLOTS_AT.len() {
            if self.names[slot].is_some_and(|it| it != present) {
                self.write(slot, None)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, slot: usize, name: Option<LastUse>) -> std::io::Result<()> {
        let is_new = self.file.is_none();
        let written = self.write_slot(slot, name, is_new);
        if is_new && written.is_err() && self.file.take().is_some() {
            // It is as if there had been none. If it stays, it names nothing.
            let _ = std::fs::remove_file(&self.path);
        }
        written
    }

    fn write_slot(
        &mut self,
        slot: usize,
        name: Option<LastUse>,
        is_new: bool,
    ) -> std::io::Result<()> {
        if is_new {
            let mut options = File::options();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = self.file.insert(options.open(&self.path)?);
            // Later names need no more room, so a full disk does not stop a closing.
            for at in SLOTS_AT {
                file.write_all_at(&[0; SLOT_BYTES], at)?;
            }
        }
        let Some(file) = &self.file else { return Ok(()) };
        let bytes = name.map_or([0; SLOT_BYTES], |it| it.encode());
        // What is on the disk is not known if this fails.
        self.names[slot] = None;
        file.write_all_at(&bytes, SLOTS_AT[slot])?;
        file.sync_all()?;
        if let (true, Some(folder)) = (is_new, self.path.parent()) {
            File::open(folder)?.sync_all()?;
        }
        self.names[slot] = name;
        Ok(())
    }
}
