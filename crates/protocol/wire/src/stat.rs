//! The blade's counters in their wire format: plain structs of little-endian numbers, no padding.

use crate::NAME_LIMIT_BYTES;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Counters of a whole blade since it started; sizes are current.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Debug,
    Default,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct BladeTotals {
    /// Random number of this blade process.
    pub blade_id: U64,
    /// All memory that it lends.
    pub capacity_bytes: U64,
    /// Memory allocated to segments, and memory of former segments that is not yet free again.
    pub used_bytes: U64,
    /// Milliseconds since the blade started.
    pub uptime_ms: U64,
    /// Pages read by requests, and through shared memory as clients report it (every few seconds).
    pub pages_read: U64,
    /// Pages written, likewise.
    pub pages_written: U64,
    /// Requests carried out or refused.
    pub requests: U64,
    /// Requests refused with an error.
    pub requests_refused: U64,
    /// Connections closed because of bytes that were not a frame.
    pub bad_frames: U64,
    /// Clients whose lease ran out.
    pub leases_expired: U64,
    /// Superpages zeroed after use.
    pub superpages_scrubbed: U64,
    /// Time that control requests were held back for their rate, summed over connections.
    pub control_throttled_ns: U64,
    /// What it lends of flash, 0 without; the rest of these is of flash, too.
    pub flash_bytes: U64,
    /// Memory of pages above flash.
    pub flash_memory_used_bytes: U64,
    /// Pages read from flash that were what was written there.
    pub flash_pages_fetched: U64,
    /// Pages written to flash.
    pub flash_pages_written: U64,
    /// Pages that flash did not return as they were written: their clients were told.
    pub flash_pages_failed: U64,
    /// Writes to flash that failed; what they were to write stayed in memory.
    pub flash_writes_failed: U64,
    /// Memory that a blade which packs has for all pages, 0 without; the rest of these is of
    /// packing, too.
    pub pack_memory_bytes: U64,
    /// What of it is used.
    pub pack_memory_used_bytes: U64,
    /// What of that is packed: frames, and their tables.
    pub pack_frames_bytes: U64,
    /// Pages that one word fills, and that take no memory.
    pub pack_pages_filled: U64,
    /// Pages that are in frames.
    pub pack_pages_in_frames: U64,
    /// Frames: fewer than the pages in them by those that are equal to others.
    pub pack_frames: U64,
    /// Pages that were found to be zero, and given back.
    pub pack_zero_pages_found: U64,
    /// Pages that were packed.
    pub pack_pages_packed: U64,
    /// Packed pages that were unpacked to be sent.
    pub pack_pages_unpacked: U64,
    /// Packed pages that were not what was packed: their clients were told.
    pub pack_pages_failed: U64,
    /// Current clients, whether or not all are listed.
    pub clients: U32,
    /// Current connections.
    pub connections: U32,
    /// Current segments.
    pub segments: U32,
    /// Superpages of freed segments to which a process still holds a descriptor. They count in
    /// `used_bytes` but for no client.
    pub superpages_held: U32,
}

const _: () = assert!(size_of::<BladeTotals>() == 240);

/// One client of a blade.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Debug,
    Default,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct ClientUsage {
    /// Number in order of arrival. The client id is secret and not shown.
    pub number: U64,
    /// Its quota.
    pub quota_bytes: U64,
    /// Memory that it uses.
    pub used_bytes: U64,
    /// Pages read by requests, and through shared memory as the client reports it.
    pub pages_read: U64,
    /// Pages written, likewise.
    pub pages_written: U64,
    /// Process id sent by the client.
    pub pid: U32,
    /// Current connections.
    pub connections: U32,
    /// Segments that it uses now.
    pub segments: U32,
    /// Milliseconds until its lease runs out; 0 while it is connected.
    pub lease_left_ms: U32,
    /// Name, padded with zeros; see [`Self::name`].
    pub name_bytes: [u8; NAME_LIMIT_BYTES],
}

const _: () = assert!(size_of::<ClientUsage>() == 88);

impl ClientUsage {
    /// Returns the client's name.
    pub fn name(&self) -> &str {
        let end = self.name_bytes.iter().position(|&b| b == 0).unwrap_or(NAME_LIMIT_BYTES);
        let valid = match std::str::from_utf8(&self.name_bytes[..end]) {
            Ok(name) => name.len(),
            Err(error) => error.valid_up_to(),
        };
        std::str::from_utf8(&self.name_bytes[..valid]).unwrap_or("")
    }

    /// Sets the name, truncated to fit.
    pub fn set_name(&mut self, name: &str) {
        let cut = name.floor_char_boundary(NAME_LIMIT_BYTES);
        self.name_bytes = [0; NAME_LIMIT_BYTES];
        self.name_bytes[..cut].copy_from_slice(&name.as_bytes()[..cut]);
    }
}
