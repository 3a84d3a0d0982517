//! The layout of one item in memory: a header of 12 bytes, optional fields, the key, the value.
//!
//! ```text
//!     0   u32  value length in bytes (30 bits)
//!     4   u8   key length in bytes
//!     5   u8   marks
//!     6   u16  time of the last access, relative to the segment ([`AccessTime`])
//!     8   u32  number of the store that made it, relative to the segment
//!     12  u32  client flags, if marked
//!         u32  expiry in seconds of the server's clock, if marked
//!         u64  CAS number, if marked; else it is the number of the store
//!         key, value
//! ```
//!
//! A key of 12 bytes with a value of 64 takes 88 bytes and 8 in the index, where memcached takes
//! 156. Items begin at multiples of [`ALIGN_BYTES`].

use farpool_units::{at_most, exactly};

/// The fixed part at the start of every item.
pub const HEADER_BYTES: usize = 12;
/// Items begin at multiples of this, so that a place in 8 TiB fits into 40 bits.
pub const ALIGN_BYTES: usize = 8;
/// memcached's longest key.
pub const KEY_BYTES_MAX: usize = 250;
/// The longest value that the header can express: 30 bits. memcached's `-I` has the same maximum.
pub const VALUE_BYTES_MAX: usize = (1 << 30) - 1;

/// The size of an item as memcached counts it against `-I`: its header with CAS number, key, flags,
/// value and the line end after it.
#[must_use]
pub const fn memcached_bytes(key_bytes: usize, client_flags: u32, value_bytes: usize) -> usize {
    let flags = if client_flags == 0 { 0 } else { 4 };
    48 + 8 + key_bytes + 1 + flags + value_bytes + 2
}

/// The marks in an item's header.
pub mod mark {
    /// Client flags other than 0 are stored.
    pub const CLIENT_FLAGS: u8 = 1;
    /// An expiry is stored.
    pub const EXPIRES: u8 = 2;
    /// The CAS number is stored in full in the item: a client gave it (meta `E`), or it is very
    /// old.
    pub const WIDE_CAS: u8 = 4;
    /// Read at least once since it was stored (meta `h`).
    pub const FETCHED: u8 = 8;
    /// Read at least twice.
    pub const ACTIVE: u8 = 16;
    /// Marked stale by a delete (meta `I`).
    pub const STALE: u8 = 32;
    /// A client was told to renew it (meta `W`).
    pub const TOKEN_SENT: u8 = 64;
    /// The key was sent in base64 and is shown that way.
    pub const KEY_BINARY: u8 = 128;
    /// The marks that describe the layout, not the item's history.
    pub const LAYOUT: u8 = CLIENT_FLAGS | EXPIRES | WIDE_CAS;
}

/// The time of an access in 16 bits, relative to the birth of the item's segment: seconds for the
/// first nine hours, then units of 64 seconds, up to 24 days; later accesses are recorded as that
/// maximum. memcached itself updates this time only about once a minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessTime(pub u16);

impl AccessTime {
    const EXACT_S: u32 = 1 << 15;
    const COARSE_S: u32 = 64;

    /// Encodes the seconds between the segment's birth and the access.
    #[must_use]
    pub fn from_seconds(since_birth_s: u32) -> Self {
        if since_birth_s < Self::EXACT_S {
            return Self(exactly(since_birth_s));
        }
        let coarse = (since_birth_s - Self::EXACT_S) / Self::COARSE_S + Self::EXACT_S;
        Self(at_most(coarse))
    }

    /// Seconds between the segment's birth and the access.
    #[must_use]
    pub fn seconds(self) -> u32 {
        let code = u32::from(self.0);
        if code < Self::EXACT_S {
            return code;
        }
        Self::EXACT_S + (code - Self::EXACT_S) * Self::COARSE_S
    }
}

/// The fixed part of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub value_bytes: u32,
    pub key_bytes: u8,
    pub marks: u8,
    pub access: AccessTime,
    /// The number under which it was stored, relative to the segment's first. With
    /// [`mark::WIDE_CAS`] clients see a different one.
    pub cas: u32,
}

impl Header {
    /// Reads the header; `bytes` begins with the item.
    #[inline]
    #[must_use]
    pub fn read(bytes: &[u8]) -> Self {
        let head: &[u8; HEADER_BYTES] =
            bytes.first_chunk().expect("an item lies whole in its segment");
        Self {
            value_bytes: u32::from_le_bytes([head[0], head[1], head[2], head[3]]),
            key_bytes: head[4],
            marks: head[5],
            access: AccessTime(u16::from_le_bytes([head[6], head[7]])),
            cas: u32::from_le_bytes([head[8], head[9], head[10], head[11]]),
        }
    }

    /// Writes the header over the item's first bytes.
    #[inline]
    pub fn write(self, bytes: &mut [u8]) {
        bytes[0..4].copy_from_slice(&self.value_bytes.to_le_bytes());
        bytes[4] = self.key_bytes;
        bytes[5] = self.marks;
        bytes[6..8].copy_from_slice(&self.access.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.cas.to_le_bytes());
    }

    #[inline]
    #[must_use]
    pub const fn has(self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// The offset of the key.
    #[inline]
    #[must_use]
    pub const fn key_at(self) -> usize {
        HEADER_BYTES
            + if self.has(mark::CLIENT_FLAGS) { 4 } else { 0 }
            + if self.has(mark::EXPIRES) { 4 } else { 0 }
            + if self.has(mark::WIDE_CAS) { 8 } else { 0 }
    }

    /// Bytes of header, key and value.
    #[inline]
    #[must_use]
    pub const fn item_bytes(self) -> usize {
        self.key_at() + self.key_bytes as usize + self.value_bytes as usize
    }

    /// The item's space in its segment: its bytes, rounded up.
    #[inline]
    #[must_use]
    pub const fn footprint_bytes(self) -> usize {
        self.item_bytes().next_multiple_of(ALIGN_BYTES)
    }

    const fn expiry_at(self) -> usize {
        HEADER_BYTES + if self.has(mark::CLIENT_FLAGS) { 4 } else { 0 }
    }

    const fn wide_cas_at(self) -> usize {
        self.expiry_at() + if self.has(mark::EXPIRES) { 4 } else { 0 }
    }
}

/// An item for reading.
#[derive(Debug, Clone, Copy)]
pub struct ItemView<'a> {
    bytes: &'a [u8],
    header: Header,
}

impl<'a> ItemView<'a> {
    /// A view of the item at the start of `bytes`, which may extend beyond its end.
    #[inline]
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, header: Header::read(bytes) }
    }

    /// The whole item, from its header to the end of its value.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        &self.bytes[..self.header.item_bytes()]
    }

    #[inline]
    #[must_use]
    pub const fn header(&self) -> Header {
        self.header
    }

    #[inline]
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        let at = self.header.key_at();
        &self.bytes[at..at + usize::from(self.header.key_bytes)]
    }

    #[inline]
    #[must_use]
    pub fn value(&self) -> &'a [u8] {
        let at = self.header.key_at() + usize::from(self.header.key_bytes);
        &self.bytes[at..at + self.header.value_bytes as usize]
    }

    #[inline]
    #[must_use]
    pub fn client_flags(&self) -> u32 {
        if self.header.has(mark::CLIENT_FLAGS) { self.u32_at(HEADER_BYTES) } else { 0 }
    }

    /// Expiry in seconds of the server's clock; 0 = never.
    #[inline]
    #[must_use]
    pub fn expires_s(&self) -> u32 {
        if self.header.has(mark::EXPIRES) { self.u32_at(self.header.expiry_at()) } else { 0 }
    }

    /// The number of the store that made the item, given its segment's first number.
    #[inline]
    #[must_use]
    pub fn stored_as(&self, segment_cas: u64) -> u64 {
        segment_cas + u64::from(self.header.cas)
    }

    /// The CAS number stored in the item, if there is one.
    #[must_use]
    pub fn wide_cas(&self) -> Option<u64> {
        self.header.has(mark::WIDE_CAS).then(|| self.cas(0))
    }

    /// The CAS number that clients see, given the first one of the item's segment.
    #[inline]
    #[must_use]
    pub fn cas(&self, segment_cas: u64) -> u64 {
        if !self.header.has(mark::WIDE_CAS) {
            return self.stored_as(segment_cas);
        }
        let at = self.header.wide_cas_at();
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    #[inline]
    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }
}

/// The parts of a new item.
#[derive(Debug, Clone, Copy, Default)]
pub struct ItemParts<'a> {
    pub key: &'a [u8],
    /// The value's pieces, one after the other (append and prepend have two).
    pub value: [&'a [u8]; 2],
    pub client_flags: u32,
    /// Seconds of the server's clock; 0 = never.
    pub expires_s: u32,
    /// Marks of [`mark`] other than those of the layout.
    pub marks: u8,
    /// A CAS number different from the number of the store.
    pub wide_cas: Option<u64>,
}

impl ItemParts<'_> {
    /// The header for these parts. The caller has checked both lengths.
    #[must_use]
    pub fn header(&self, access: AccessTime, cas: u32) -> Header {
        let mut marks = self.marks & !mark::LAYOUT;
        if self.client_flags != 0 {
            marks |= mark::CLIENT_FLAGS;
        }
        if self.expires_s != 0 {
            marks |= mark::EXPIRES;
        }
        if self.wide_cas.is_some() {
            marks |= mark::WIDE_CAS;
        }
        Header {
            value_bytes: u32::try_from(self.value_bytes())
                .expect("checked against VALUE_BYTES_MAX"),
            key_bytes: u8::try_from(self.key.len()).expect("checked against KEY_BYTES_MAX"),
            marks,
            access,
            cas,
        }
    }

    #[must_use]
    pub const fn value_bytes(&self) -> usize {
        self.value[0].len() + self.value[1].len()
    }

    /// Writes header and parts to the start of `bytes`.
    #[inline]
    pub fn write(&self, header: Header, bytes: &mut [u8]) {
        header.write(bytes);
        if header.has(mark::CLIENT_FLAGS) {
            bytes[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&self.client_flags.to_le_bytes());
        }
        if header.has(mark::EXPIRES) {
            set_expiry(header, bytes, self.expires_s);
        }
        if let Some(cas) = self.wide_cas {
            let at = header.wide_cas_at();
            bytes[at..at + 8].copy_from_slice(&cas.to_le_bytes());
        }
        let mut at = header.key_at();
        for part in [self.key, self.value[0], self.value[1]] {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }
}

/// Changes the expiry of an item that stores one.
pub fn set_expiry(header: Header, bytes: &mut [u8], expires_s: u32) {
    debug_assert!(header.has(mark::EXPIRES));
    let at = header.expiry_at();
    bytes[at..at + 4].copy_from_slice(&expires_s.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_small_item_takes_88_bytes() {
        let parts =
            ItemParts { key: b"key000000001", value: [&[7; 64], b""], ..ItemParts::default() };
        assert_eq!(parts.header(AccessTime(0), 0).footprint_bytes(), 88);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            key in prop::collection::vec(any::<u8>(), 1..=KEY_BYTES_MAX),
            first in prop::collection::vec(any::<u8>(), 0..300),
            second in prop::collection::vec(any::<u8>(), 0..300),
            client_flags: u32, expires_s: u32, wide_cas: Option<u64>, cas: u32, access: u16, base in 0..u64::MAX / 2,
        ) {
            let parts = ItemParts {
                key: &key, value: [&first, &second], client_flags, expires_s, marks: mark::STALE, wide_cas,
            };
            let header = parts.header(AccessTime(access), cas);
            let mut bytes = vec![0xa5; header.footprint_bytes() + 5];
            parts.write(header, &mut bytes);
            let view = ItemView::new(&bytes);
            prop_assert_eq!(view.header(), header);
            prop_assert_eq!(view.key(), &key[..]);
            prop_assert_eq!(view.value(), &[&first[..], &second[..]].concat()[..]);
            prop_assert_eq!(view.client_flags(), client_flags);
            prop_assert_eq!(view.expires_s(), expires_s);
            prop_assert_eq!(view.cas(base), wide_cas.unwrap_or(base + u64::from(cas)));
            prop_assert!(header.has(mark::STALE));
        }

        #[test]
        fn access_times_are_exact_then_within_a_minute(seconds in 0u32..2_000_000) {
            let back = AccessTime::from_seconds(seconds).seconds();
            prop_assert!(back <= seconds && seconds - back < AccessTime::COARSE_S);
            if seconds < AccessTime::EXACT_S {
                prop_assert_eq!(back, seconds);
            }
        }
    }
}
