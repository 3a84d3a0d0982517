//! The bodies of leases: where a value is, and which values are no longer read.

use std::num::NonZeroU32;

use super::{Item, Reader};

/// The most leases that one RELEASE ends: as many as a connection can have.
pub const LEASES_RELEASED_MAX: usize = 1024;
/// Bytes of a lease's number.
const LEASE_ID_BYTES: usize = 4;

/// The leases of a RELEASE, already checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseIds<'a> {
    bytes: &'a [u8],
}

impl<'a> LeaseIds<'a> {
    pub(super) fn read(mut body: Reader<'a>) -> Option<Self> {
        let (count, zero) = (usize::from(body.u16()?), body.u16()?);
        let is_whole = body.0.len() == count * LEASE_ID_BYTES;
        let is_some = (1..=LEASES_RELEASED_MAX).contains(&count);
        (is_whole && is_some && zero == 0).then_some(Self { bytes: body.0 })
    }

    pub(super) fn write(self, out: &mut Vec<u8>) {
        let count = u16::try_from(self.len()).expect("at most LEASES_RELEASED_MAX");
        out.extend_from_slice(&count.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(self.bytes);
    }

    /// How many leases there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len() / LEASE_ID_BYTES
    }

    /// Whether there are no leases.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the numbers of the leases; 0 is never one and skipped.
    pub fn iter(&self) -> impl Iterator<Item = NonZeroU32> {
        let ids = self.bytes.chunks_exact(LEASE_ID_BYTES);
        ids.filter_map(|id| NonZeroU32::new(u32::from_le_bytes(id.try_into().ok()?)))
    }
}

/// Collects the leases of RELEASEs.
#[derive(Debug, Default, Clone)]
pub struct LeaseIdList {
    bytes: Vec<u8>,
}

impl LeaseIdList {
    /// Adds a lease.
    pub fn push(&mut self, id: NonZeroU32) {
        self.bytes.extend_from_slice(&id.get().to_le_bytes());
    }

    /// How many leases there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len() / LEASE_ID_BYTES
    }

    /// Whether there are no leases.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the first `count`, or all if there are fewer.
    #[must_use]
    pub fn take_front(&mut self, count: usize) -> Self {
        if count >= self.len() {
            return std::mem::take(self);
        }
        let rest = self.bytes.split_off(count * LEASE_ID_BYTES);
        Self { bytes: std::mem::replace(&mut self.bytes, rest) }
    }

    /// Returns at most [`LEASES_RELEASED_MAX`] of them, for one request.
    #[must_use]
    pub fn ids(&self) -> LeaseIds<'_> {
        LeaseIds {
            bytes: &self.bytes[..self.bytes.len().min(LEASES_RELEASED_MAX * LEASE_ID_BYTES)],
        }
    }
}

/// The place of a leased value, in an answer to GETLEASE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedItem {
    /// The flags that the item was stored with.
    pub client_flags: u32,
    /// The number that ends the lease.
    pub lease: NonZeroU32,
    /// The CAS number of the item.
    pub cas: u64,
    /// Offset in the memory granted by LEASES.
    pub at: u64,
    /// The length of the value.
    pub value_bytes: u32,
}

impl LeasedItem {
    /// Appends the answer to GETLEASE.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.client_flags.to_le_bytes());
        out.extend_from_slice(&self.lease.get().to_le_bytes());
        out.extend_from_slice(&self.cas.to_le_bytes());
        out.extend_from_slice(&self.at.to_le_bytes());
        out.extend_from_slice(&self.value_bytes.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }
}

/// An answer to GETLEASE: a copy, as in GET, or a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaybeLeased<'a> {
    /// The value itself.
    Copy(Item<'a>),
    /// Where it lies.
    Lease(LeasedItem),
}

impl<'a> MaybeLeased<'a> {
    /// Reads the answer to GETLEASE.
    #[must_use]
    pub fn read(body: &'a [u8]) -> Option<Self> {
        let mut fields = Reader(body);
        let (client_flags, lease, cas) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let Some(lease) = NonZeroU32::new(lease) else {
            return Some(Self::Copy(Item { client_flags, cas, value: fields.0 }));
        };
        let (at, value_bytes, _) = (fields.u64()?, fields.u32()?, fields.u32()?);
        fields.end()?;
        Some(Self::Lease(LeasedItem { client_flags, lease, cas, at, value_bytes }))
    }
}

/// The server's grant in an answer to LEASES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasesGranted {
    /// Bytes of the memory behind the descriptor.
    pub memory_bytes: u64,
    /// How many values may be leased at a time.
    pub leases: u32,
}

impl LeasesGranted {
    /// Appends the answer to LEASES.
    pub fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.memory_bytes.to_le_bytes());
        out.extend_from_slice(&self.leases.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    /// Reads the answer to LEASES.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        let mut body = Reader(body);
        let (memory_bytes, leases, _) = (body.u64()?, body.u32()?, body.u32()?);
        body.end()?;
        Some(Self { memory_bytes, leases })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Request;
    use super::*;

    /// The vectors of docs/contributors/kv-protocol.md.
    #[test]
    fn the_vectors_of_the_documentation() {
        let lease = LeasedItem {
            client_flags: 9,
            lease: NonZeroU32::new(0x1001).unwrap(),
            cas: 77,
            at: 0x20_0040,
            value_bytes: 65_536,
        };
        let mut body = Vec::new();
        lease.write(&mut body);
        assert_eq!(body[..16], [9, 0, 0, 0, 1, 0x10, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(body[16..], [0x40, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
        let mut ids = LeaseIdList::default();
        [0x1001, 0x1002].into_iter().filter_map(NonZeroU32::new).for_each(|id| ids.push(id));
        body.clear();
        Request::Release(ids.ids()).write(&mut body);
        assert_eq!(body, [2, 0, 0, 0, 1, 0x10, 0, 0, 2, 0x10, 0, 0]);
        body.clear();
        Request::Leases { bytes_min: 1024 }.write(&mut body);
        assert_eq!(body, [0, 4, 0, 0, 0, 0, 0, 0]);
        body.clear();
        LeasesGranted { memory_bytes: 0x3000_0000, leases: 1024 }.write(&mut body);
        assert_eq!(body, [0, 0, 0, 0x30, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn leases_come_back(
            ids in prop::collection::vec(1u32.., 1..2000), count in 1usize..2000,
            client_flags: u32, cas: u64, at: u64, value_bytes: u32,
        ) {
            let ids: Vec<NonZeroU32> = ids.into_iter().filter_map(NonZeroU32::new).collect();
            let mut list = LeaseIdList::default();
            ids.iter().for_each(|&id| list.push(id));
            let front = list.take_front(count.min(LEASES_RELEASED_MAX));
            let (request, mut body) = (Request::Release(front.ids()), Vec::new());
            request.write(&mut body);
            prop_assert_eq!(Request::read(request.opcode(), &body), Ok(request));
            let read: Vec<NonZeroU32> = front.ids().iter().chain(list.ids().iter()).collect();
            prop_assert_eq!(&read[..], &ids[..read.len()]);
            prop_assert!(read.len() == ids.len() || list.len() > LEASES_RELEASED_MAX);
            let lease = LeasedItem { client_flags, lease: ids[0], cas, at, value_bytes };
            body.clear();
            lease.write(&mut body);
            prop_assert_eq!(MaybeLeased::read(&body), Some(MaybeLeased::Lease(lease)));
            prop_assert_eq!(MaybeLeased::read(&body[..31]), None);
            let granted = LeasesGranted { memory_bytes: at, leases: value_bytes };
            body.clear();
            granted.write(&mut body);
            prop_assert_eq!(LeasesGranted::read(&body), Some(granted));
        }
    }
}
