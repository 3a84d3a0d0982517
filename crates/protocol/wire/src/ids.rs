//! Identifiers as types, so that a page number is never taken for a superpage number.

use std::fmt;
use std::num::NonZeroU64;

use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, SUPERPAGE_BYTES};

/// A segment on one blade; unique for the life of that blade process, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SegmentId(pub u64);

/// Number of a request on one connection, chosen by the client; the response repeats it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u64);

/// A superpage's number: of a segment (SMA) or of the segment's memory on the blade (RMMA).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SuperpageNumber(pub u32);

/// A page's number within a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PageNumber(pub u32);

/// A client of a blade: 128 random bits chosen by the client. Any process that knows them is that
/// client, so they are secret and not shown by `Debug`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u128);

/// A group of clients whose equal pages a blade may keep once. Clients of different tenants or
/// users are in different groups, whatever they say.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SharingGroup(pub NonZeroU64);

/// Capability to attach to a segment: 128 random bits chosen by the blade. Secret, not shown by
/// `Debug`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentToken(pub u128);

/// Opens a grant of memory on one blade: 128 random bits chosen by the grantor. Secret, not shown
/// by `Debug`. 0 is not a valid key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantKey(pub u128);

/// The grant that a client presents.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grant {
    /// The secret that opens it.
    pub key: GrantKey,
    /// Increases whenever the grant is given anew; a blade that knows of a later epoch refuses an
    /// earlier one ([`crate::ErrorCode::StaleEpoch`]).
    pub epoch: u64,
}

impl fmt::Debug for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientId(secret)")
    }
}

impl fmt::Debug for SegmentToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SegmentToken(secret)")
    }
}

impl fmt::Debug for GrantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantKey(secret)")
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PageNumber {
    /// Returns the superpage that holds this page.
    pub fn superpage(self) -> SuperpageNumber {
        SuperpageNumber(self.0 / PAGES_PER_SUPERPAGE)
    }

    /// Returns the page's number within its superpage, 0 to 4095.
    pub fn index_in_superpage(self) -> u32 {
        self.0 % PAGES_PER_SUPERPAGE
    }

    /// Returns the offset of the page within its superpage.
    pub fn offset_in_superpage_bytes(self) -> u64 {
        u64::from(self.index_in_superpage()) * PAGE_BYTES as u64
    }
}

impl SuperpageNumber {
    /// Returns the offset of this superpage in a linear memory that begins with superpage 0.
    pub fn offset_bytes(self) -> u64 {
        u64::from(self.0) * SUPERPAGE_BYTES
    }

    /// Returns the first page of this superpage, or None if it is beyond all page numbers.
    pub fn first_page(self) -> Option<PageNumber> {
        self.0.checked_mul(PAGES_PER_SUPERPAGE).map(PageNumber)
    }
}
