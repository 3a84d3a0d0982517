//! Values read in place in the server's memory: guards that end their leases, and batches of ended
//! leases.

use std::num::NonZeroU32;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use farpool_kernel::lock;

use crate::items::ItemMemory;
use crate::message::{LEASES_RELEASED_MAX, LeaseIdList, MaybeLeased};

/// Ended leases are reported to the server in batches of this size: in one frame each costs next to
/// nothing.
pub const RELEASE_BATCH: usize = 32;
/// A batch is also sent once its values have this many bytes together: until then the server cannot
/// reuse that memory.
pub const RELEASE_BYTES: u64 = 256 << 10;

/// Ended leases that were not yet reported to the server.
#[derive(Debug, Default)]
struct Ended {
    ids: LeaseIdList,
    bytes: u64,
}

#[derive(Debug)]
struct Inner {
    memory: ItemMemory,
    /// Open as long as anything is leased: the server ends the leases of a closed connection.
    _socket: Arc<OwnedFd>,
    granted: u32,
    ended: Mutex<Ended>,
}

/// The leases of one connection.
#[derive(Debug, Clone)]
pub struct Leases(Arc<Inner>);

impl Leases {
    pub(crate) fn new(memory: ItemMemory, socket: Arc<OwnedFd>, granted: u32) -> Self {
        Self(Arc::new(Inner { memory, _socket: socket, granted, ended: Mutex::default() }))
    }

    /// Returns how many values can be leased at a time; any further are sent as copies.
    #[must_use]
    pub fn granted(&self) -> u32 {
        self.0.granted
    }

    /// Reads the body of an answer to GETLEASE. None if it is invalid: too short, or with a value
    /// outside the memory.
    #[must_use]
    pub fn read(&self, body: &[u8]) -> Option<Value> {
        match MaybeLeased::read(body)? {
            MaybeLeased::Copy(item) => {
                let bytes = Bytes::Copied(item.value.to_vec());
                Some(Value { client_flags: item.client_flags, cas: item.cas, bytes })
            }
            MaybeLeased::Lease(item) => {
                let (at, length) = (item.at, u64::from(item.value_bytes));
                if !self.0.memory.holds(at, length) {
                    return None;
                }
                let bytes = Bytes::Leased { leases: self.clone(), id: item.lease, at, length };
                Some(Value { client_flags: item.client_flags, cas: item.cas, bytes })
            }
        }
    }

    /// Takes ended leases, if they are worth a frame or `all` is set; None if there are none to
    /// take.
    pub(crate) fn take_ended(&self, all: bool) -> Option<LeaseIdList> {
        let mut ended = lock(&self.0.ended);
        let is_due = ended.ids.len() >= RELEASE_BATCH || ended.bytes >= RELEASE_BYTES;
        if ended.ids.is_empty() || !(all || is_due) {
            return None;
        }
        let ids = ended.ids.take_front(LEASES_RELEASED_MAX);
        if ended.ids.is_empty() {
            ended.bytes = 0;
        }
        Some(ids)
    }

    fn end(&self, id: NonZeroU32, bytes: u64) {
        let mut ended = lock(&self.0.ended);
        ended.ids.push(id);
        ended.bytes += bytes;
    }
}

#[derive(Debug)]
enum Bytes {
    Copied(Vec<u8>),
    Leased { leases: Leases, id: NonZeroU32, at: u64, length: u64 },
}

/// A value as of its request: leased, or copied if the server granted no lease. Dropping it ends
/// the lease, which one of the next requests reports to the server.
#[derive(Debug)]
pub struct Value {
    /// The flags that the item was stored with.
    pub client_flags: u32,
    /// The CAS number of the item.
    pub cas: u64,
    bytes: Bytes,
}

impl Value {
    pub(crate) const fn copied(client_flags: u32, cas: u64, bytes: Vec<u8>) -> Self {
        Self { client_flags, cas, bytes: Bytes::Copied(bytes) }
    }

    /// True if the value is in the server's memory.
    #[must_use]
    pub const fn is_leased(&self) -> bool {
        matches!(self.bytes, Bytes::Leased { .. })
    }
}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Copied(bytes) => bytes,
            // It was inside when it was read, and the memory's size does not change.
            Bytes::Leased { leases, at, length, .. } => {
                leases.0.memory.value(*at, *length).unwrap_or_default()
            }
        }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        if let Bytes::Leased { leases, id, length, .. } = &self.bytes {
            leases.end(*id, *length);
        }
    }
}
