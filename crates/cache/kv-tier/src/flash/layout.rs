//! The layout of a flash file: pure, little-endian, checked when decoded.
//!
//! ```text
//!     page 0            superblock
//!     for each shard    control page; table of zones, 16 bytes each, in whole pages; sums of
//! forget bits, 8 bytes
//!                       each, in whole pages; one page of forget bits for each zone
//!     for each shard    its zones, from a multiple of a zone's size on
//! ```
//!
//! A zone holds records from its start, and its summary at its end: for each record 16 bytes, then
//! a footer. docs/contributors/kv-flash.md describes the whole format.

use farpool_kv_store::key::HashSeed;
use farpool_units::PAGE_BYTES;

/// The format's version; others are refused.
pub const VERSION: u32 = 4;
const MAGIC: [u8; 8] = *b"FPKVFLSH";
const FOOTER_MAGIC: u32 = 0x4b5a_4f4e;

/// Pages of a zone: 2 MiB. A record of memcached's largest default item (1 MiB) fits, and a shard
/// needs few zones in memory at a time.
pub const ZONE_PAGES: usize = 512;
pub const ZONE_BYTES: usize = ZONE_PAGES * PAGE_BYTES;
/// Zones that one thread can use, 1 TiB. A larger file is refused.
pub const ZONES_MAX: usize = crate::log::zones_max(UNIT_BYTES, ZONE_BYTES);
/// As the superblock says it.
const ZONE_BYTES_FIELD: u32 = 2 << 20;
const _: () = assert!(ZONE_BYTES_FIELD as usize == ZONE_BYTES, "one size of a zone");
/// Records begin at multiples of this; one forget bit stands for each such unit.
pub const UNIT_BYTES: usize = 64;
/// Bytes of the forget bits of one zone.
pub const FORGET_BYTES: usize = ZONE_BYTES / UNIT_BYTES / 8;
const _: () = assert!(FORGET_BYTES == PAGE_BYTES, "one page of forget bits for each zone");

pub const TABLE_ENTRY_BYTES: usize = 16;
pub const FORGET_SUM_BYTES: usize = 8;
pub const SUMMARY_ENTRY_BYTES: usize = 16;
pub const FOOTER_BYTES: usize = 32;

/// Distinguishes one life of the bookkeeping from every other: random, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonce(pub u128);

/// Where the valid bookkeeping is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// In the file, which was closed cleanly. The nonce is in the closing sums.
    Clean = 1,
    /// In the file's pages as the kernel has them: in use, without a memory file.
    InUse = 2,
    /// In the memory file with this nonce: in use.
    InMemory = 3,
    /// Nowhere: the device did not take it at the end.
    GivenUp = 4,
}

impl Use {
    const fn from_word(word: u32) -> Option<Self> {
        match word {
            1 => Some(Self::Clean),
            2 => Some(Self::InUse),
            3 => Some(Self::InMemory),
            4 => Some(Self::GivenUp),
            _ => None,
        }
    }
}

/// The description of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    pub shards: u32,
    pub zones_per_shard: u32,
    /// Makes this file's records different from those of every other file, including earlier ones
    /// in the same place.
    pub format_id: u64,
    /// Unix time at which the server's clock reads 0: expiry times are relative to it.
    pub zero_unix_s: i64,
    /// The boot of the machine in which it was last used.
    pub boot_id: [u8; 16],
    pub state: Use,
    pub nonce: Nonce,
    /// The seed of the hashes in records and summaries.
    pub hash_seed: HashSeed,
    /// A file beside this one names its nonce; otherwise an older copy cannot be recognized.
    pub is_witnessed: bool,
}

/// Why a superblock is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOurs {
    #[error("it does not begin as a flash file of farpool kv does")]
    Magic,
    #[error("it has format version {0}, this program reads version {VERSION}")]
    Version(u32),
    #[error("its first page is damaged (checksum)")]
    Damaged,
}

impl Superblock {
    pub const BYTES: usize = 100;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&ZONE_BYTES_FIELD.to_le_bytes());
        out[16..20].copy_from_slice(&self.shards.to_le_bytes());
        out[20..24].copy_from_slice(&self.zones_per_shard.to_le_bytes());
        out[24..32].copy_from_slice(&self.format_id.to_le_bytes());
        out[32..40].copy_from_slice(&self.zero_unix_s.to_le_bytes());
        out[40..56].copy_from_slice(&self.boot_id);
        out[56..60].copy_from_slice(&(self.state as u32).to_le_bytes());
        out[60..76].copy_from_slice(&self.nonce.0.to_le_bytes());
        out[76..92].copy_from_slice(&self.hash_seed.bytes());
        out[92..96].copy_from_slice(&u32::from(self.is_witnessed).to_le_bytes());
        let sum = crc32c::crc32c(&out[..Self::BYTES - 4]);
        out[Self::BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, NotOurs> {
        let bytes: &[u8; Self::BYTES] = bytes.first_chunk().ok_or(NotOurs::Magic)?;
        if bytes[..8] != MAGIC {
            return Err(NotOurs::Magic);
        }
        if word(bytes, 8) != VERSION {
            return Err(NotOurs::Version(word(bytes, 8)));
        }
        if word(bytes, Self::BYTES - 4) != crc32c::crc32c(&bytes[..Self::BYTES - 4])
            || word(bytes, 12) != ZONE_BYTES_FIELD
        {
            return Err(NotOurs::Damaged);
        }
        let state = Use::from_word(word(bytes, 56)).ok_or(NotOurs::Damaged)?;
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&bytes[40..56]);
        let nonce = Nonce(wide(bytes, 60));
        let is_witnessed = match word(bytes, 92) {
            0 => false,
            1 => true,
            _ => return Err(NotOurs::Damaged),
        };
        let mut hash_seed = [0; HashSeed::BYTES];
        hash_seed.copy_from_slice(&bytes[76..92]);
        Ok(Self {
            shards: word(bytes, 16),
            zones_per_shard: word(bytes, 20),
            format_id: long(bytes, 24),
            zero_unix_s: long(bytes, 32).cast_signed(),
            boot_id,
            state,
            nonce,
            hash_seed: HashSeed::new(hash_seed),
            is_witnessed,
        })
    }
}

/// Makes the records of one use of a zone different from those of every other use, in any file.
#[must_use]
pub fn zone_seal(format_id: u64, zone: usize, sequence: u32) -> u32 {
    let sum = crc32c::crc32c(&format_id.to_le_bytes());
    let sum = crc32c::crc32c_append(sum, &(zone as u64).to_le_bytes());
    crc32c::crc32c_append(sum, &sequence.to_le_bytes())
}

/// The layout of a file of this many shards with this many zones each. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub shards: usize,
    pub zones_per_shard: usize,
}

impl Geometry {
    /// The largest geometry that fits into `file_bytes`. None if not even `least_zones` zones fit.
    #[must_use]
    pub fn fitting(file_bytes: u64, shards: usize, least_zones: usize) -> Option<Self> {
        let zones = file_bytes / ZONE_BYTES as u64 / shards.max(1) as u64;
        let mut geometry = Self { shards, zones_per_shard: usize::try_from(zones).ok()? };
        while geometry.zones_per_shard >= least_zones && geometry.file_bytes() > file_bytes {
            geometry.zones_per_shard -= 1;
        }
        (geometry.zones_per_shard >= least_zones && shards > 0).then_some(geometry)
    }

    /// Bytes of one shard's table of zones.
    #[must_use]
    pub const fn table_bytes(&self) -> usize {
        (self.zones_per_shard * TABLE_ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Where the sums of forget bits begin in a shard's bookkeeping.
    #[must_use]
    pub const fn sums_at(&self) -> usize {
        PAGE_BYTES + self.table_bytes()
    }

    /// Where the forget bits begin in a shard's bookkeeping.
    #[must_use]
    pub const fn forget_bits_at(&self) -> usize {
        self.sums_at() + (self.zones_per_shard * FORGET_SUM_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of one shard's bookkeeping: control page, table, sums and forget bits.
    #[must_use]
    pub const fn control_bytes(&self) -> usize {
        self.forget_bits_at() + self.zones_per_shard * FORGET_BYTES
    }

    /// Bytes of all shards' bookkeeping, plus the page in front.
    #[must_use]
    pub const fn book_bytes(&self) -> u64 {
        self.control_at(self.shards)
    }

    #[must_use]
    pub const fn control_at(&self, shard: usize) -> u64 {
        (PAGE_BYTES + shard * self.control_bytes()) as u64
    }

    #[must_use]
    pub const fn zones_at(&self, shard: usize) -> u64 {
        let controls =
            (PAGE_BYTES + self.shards * self.control_bytes()).next_multiple_of(ZONE_BYTES);
        (controls + shard * self.zones_per_shard * ZONE_BYTES) as u64
    }

    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        self.zones_at(self.shards)
    }
}

/// A zone's entry in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableEntry {
    pub sequence: u32,
    /// Written completely; otherwise its content is invalid.
    pub is_sealed: bool,
    pub used_bytes: u32,
    pub records: u32,
}

impl TableEntry {
    const SEALED: u32 = 1 << 31;

    /// The entry of a zone with no valid content, whose last use was this one.
    #[must_use]
    pub const fn free(sequence: u32) -> Self {
        Self { sequence, is_sealed: false, used_bytes: 0, records: 0 }
    }

    #[must_use]
    pub fn encode(&self) -> [u8; TABLE_ENTRY_BYTES] {
        let mut out = [0; TABLE_ENTRY_BYTES];
        let records = self.records | if self.is_sealed { Self::SEALED } else { 0 };
        out[..4].copy_from_slice(&self.sequence.to_le_bytes());
        out[4..8].copy_from_slice(&self.used_bytes.to_le_bytes());
        out[8..12].copy_from_slice(&records.to_le_bytes());
        let sum = crc32c::crc32c(&out[..12]);
        out[12..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes an entry. None if it is torn, or its figures are impossible.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; TABLE_ENTRY_BYTES] = bytes.first_chunk()?;
        let records = word(bytes, 8) & !Self::SEALED;
        let used_bytes = word(bytes, 4);
        let tail = records as usize * SUMMARY_ENTRY_BYTES + FOOTER_BYTES;
        let fits = used_bytes as usize + tail <= ZONE_BYTES;
        (word(bytes, 12) == crc32c::crc32c(&bytes[..12]) && fits).then_some(Self {
            sequence: word(bytes, 0),
            is_sealed: word(bytes, 8) & Self::SEALED != 0,
            used_bytes,
            records,
        })
    }
}

/// One record, as listed in a zone's summary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SummaryEntry {
    pub hash: u64,
    /// The position of the record, in units.
    pub unit: u32,
    /// Its length in bytes. Records too long for this field are read to the zone's end.
    pub bytes: u32,
}

impl SummaryEntry {
    fn encode(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&self.hash.to_le_bytes());
        out[8..12].copy_from_slice(&self.unit.to_le_bytes());
        out[12..16].copy_from_slice(&self.bytes.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Self {
        Self { hash: long(bytes, 0), unit: word(bytes, 8), bytes: word(bytes, 12) }
    }
}

/// Bytes of a summary with `records` records.
#[must_use]
pub const fn summary_bytes(records: usize) -> usize {
    records * SUMMARY_ENTRY_BYTES + FOOTER_BYTES
}

/// Writes the summary to the end of a zone, or of the part of it in `zone`. `seal` is that of its
/// records.
pub fn write_summary(zone: &mut [u8], entries: &[SummaryEntry], seal: u32) {
    let start = zone.len() - summary_bytes(entries.len());
    let summary = &mut zone[start..];
    for (entry, out) in entries.iter().zip(summary.chunks_exact_mut(SUMMARY_ENTRY_BYTES)) {
        entry.encode(out);
    }
    let (entries_bytes, footer) = summary.split_at_mut(entries.len() * SUMMARY_ENTRY_BYTES);
    footer[..4].copy_from_slice(&FOOTER_MAGIC.to_le_bytes());
    footer[4..8].copy_from_slice(&VERSION.to_le_bytes());
    footer[8..12].copy_from_slice(&seal.to_le_bytes());
    let records = u32::try_from(entries.len()).expect("a zone has few records");
    footer[12..16].copy_from_slice(&records.to_le_bytes());
    footer[16..28].fill(0);
    let sum = crc32c::crc32c_append(crc32c::crc32c(entries_bytes), &footer[..28]);
    footer[28..32].copy_from_slice(&sum.to_le_bytes());
}

/// Reads the summary at the end of `tail`, which ends with its zone. None if it is damaged or not
/// of this use of the zone.
#[must_use]
pub fn read_summary(tail: &[u8], records: usize, seal: u32) -> Option<Vec<SummaryEntry>> {
    let start = tail.len().checked_sub(summary_bytes(records))?;
    let (entries, footer) = tail[start..].split_at(records * SUMMARY_ENTRY_BYTES);
    let sum = crc32c::crc32c_append(crc32c::crc32c(entries), &footer[..28]);
    let is_ours = word(footer, 0) == FOOTER_MAGIC
        && word(footer, 4) == VERSION
        && word(footer, 8) == seal
        && word(footer, 12) as usize == records
        && word(footer, 28) == sum;
    if !is_ours {
        return None;
    }
    let entries: Vec<SummaryEntry> =
        entries.chunks_exact(SUMMARY_ENTRY_BYTES).map(SummaryEntry::decode).collect();
    let fits = |it: &SummaryEntry| {
        it.unit as usize * UNIT_BYTES + it.bytes as usize <= ZONE_BYTES && it.bytes > 0
    };
    entries.iter().all(fits).then_some(entries)
}

/// What a shard must remember beyond its process, so that its promises stay true.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Promises {
    /// The highest CAS number that may have been used.
    pub last_cas: u64,
    /// Items stored under this number or an earlier one were flushed.
    pub flushed_cas: u64,
    /// When everything stored by then is to be flushed, in seconds of the server's clock; 0 =
    /// never.
    pub flush_at_s: u32,
    /// The last reading of the clock.
    pub now_s: u32,
    /// Number of changes: of two copies, the one with the higher number is valid.
    pub generation: u32,
}

impl Promises {
    /// Bytes of one copy. Two are adjacent and written alternately, so that one is always intact.
    pub const BYTES: usize = 32;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&self.last_cas.to_le_bytes());
        out[8..16].copy_from_slice(&self.flushed_cas.to_le_bytes());
        out[16..20].copy_from_slice(&self.flush_at_s.to_le_bytes());
        out[20..24].copy_from_slice(&self.now_s.to_le_bytes());
        out[24..28].copy_from_slice(&self.generation.to_le_bytes());
        let sum = crc32c::crc32c(&out[..28]);
        out[28..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes a copy. None if it is torn or was never written.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.first_chunk()?;
        (word(bytes, 28) == crc32c::crc32c(&bytes[..28])).then_some(Self {
            last_cas: long(bytes, 0),
            flushed_cas: long(bytes, 8),
            flush_at_s: word(bytes, 16),
            now_s: word(bytes, 20),
            generation: word(bytes, 24),
        })
    }

    /// The newer of two adjacent copies. None if neither is intact.
    #[must_use]
    pub fn newest(bytes: &[u8]) -> Option<Self> {
        let second = bytes.get(Self::BYTES..).and_then(Self::decode);
        Self::decode(bytes).into_iter().chain(second).max_by_key(|it| it.generation)
    }

    /// The offset of this copy.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.generation as usize % 2 * Self::BYTES
    }
}

/// The offset in the control page of the sum of the shard's bookkeeping: after the promises.
pub const CLOSING_SUM_AT: usize = 2 * Promises::BYTES;

/// The sum of a shard's bookkeeping when the file was closed: forget bits lost by the device would
/// bring back deleted items. The nonce belongs to one closing: what an earlier one left behind has
/// a different sum.
#[derive(Debug, Clone, Copy)]
pub struct ClosingSum(u32);

impl ClosingSum {
    /// Begins with the control page; the pages after it are appended.
    #[must_use]
    pub fn new(format_id: u64, nonce: Nonce, control_page: &[u8]) -> Self {
        let sum = crc32c::crc32c(&format_id.to_le_bytes());
        let sum = crc32c::crc32c_append(sum, &nonce.0.to_le_bytes());
        Self(crc32c::crc32c_append(sum, &control_page[..CLOSING_SUM_AT]))
    }

    #[must_use]
    pub fn append(self, pages: &[u8]) -> Self {
        Self(crc32c::crc32c_append(self.0, pages))
    }

    pub fn write(self, control_page: &mut [u8]) {
        control_page[CLOSING_SUM_AT..][..4].copy_from_slice(&self.0.to_le_bytes());
    }
}

/// Whether a shard's bookkeeping is as it was when the file was closed.
#[must_use]
pub fn is_as_closed(format_id: u64, nonce: Nonce, control: &[u8]) -> bool {
    let sum = ClosingSum::new(format_id, nonce, control).append(&control[PAGE_BYTES..]);
    word(control, CLOSING_SUM_AT) == sum.0
}

pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

pub(super) fn long(bytes: &[u8], at: usize) -> u64 {
    let mut long = [0; 8];
    long.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(long)
}

pub(super) fn wide(bytes: &[u8], at: usize) -> u128 {
    u128::from(long(bytes, at)) | u128::from(long(bytes, at + 8)) << 64
}
