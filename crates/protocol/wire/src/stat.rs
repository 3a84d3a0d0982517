//! The blade's counters as they lie on the wire: plain structs of little-endian numbers, no
//! padding.

use crate::NAME_LIMIT_BYTES;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Counters of a whole blade since it started; sizes are those of now.
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
    /// All memory it has to give.
    pub capacity_bytes: U64,
    /// Memory allocated to segments, and memory of former ones that is not yet free again.
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
    /// Connections closed for bytes that were no frame.
    pub bad_frames: U64,
    /// Clients whose lease ran out.
    pub leases_expired: U64,
    /// Superpages zeroed after use.
    pub superpages_scrubbed: U64,
    /// Clients now, whether or not all are listed.
    pub clients: U32,
    /// Connections now.
    pub connections: U32,
    /// Segments now.
    pub segments: U32,
    /// Superpages of segments that are gone, but of which a process still holds a descriptor. They
    /// are part of `used_bytes` and of no client.
    pub superpages_held: U32,
}

const _: () = assert!(size_of::<BladeTotals>() == 104);

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
    /// What it may use.
    pub quota_bytes: U64,
    /// What it uses.
    pub used_bytes: U64,
    /// Pages read by requests, and through shared memory as the client reports it.
    pub pages_read: U64,
    /// Pages written, likewise.
    pub pages_written: U64,
    /// Process id that the client gave.
    pub pid: U32,
    /// Connections now.
    pub connections: U32,
    /// Segments it uses now.
    pub segments: U32,
    /// Milliseconds until its lease runs out; 0 while it is connected.
    pub lease_left_ms: U32,
    /// Name, filled up with zeros; see [`Self::name`].
    pub name_bytes: [u8; NAME_LIMIT_BYTES],
}

const _: () = assert!(size_of::<ClientUsage>() == 88);

impl ClientUsage {
    /// The client's name.
    pub fn name(&self) -> &str {
        let end = self.name_bytes.iter().position(|&b| b == 0).unwrap_or(NAME_LIMIT_BYTES);
        let valid = match std::str::from_utf8(&self.name_bytes[..end]) {
            Ok(name) => name.len(),
            Err(error) => error.valid_up_to(),
        };
        std::str::from_utf8(&self.name_bytes[..valid]).unwrap_or("")
    }

    /// Sets the name, cut to what fits.
    pub fn set_name(&mut self, name: &str) {
        let cut = name.floor_char_boundary(NAME_LIMIT_BYTES);
        self.name_bytes = [0; NAME_LIMIT_BYTES];
        self.name_bytes[..cut].copy_from_slice(&name.as_bytes()[..cut]);
    }
}
