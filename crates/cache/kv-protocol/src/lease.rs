//! GETLEASE and RELEASE: the leases that one connection holds on values of this shard.

use std::num::NonZeroU32;

use farpool_keyvault::frame::Status;
use farpool_keyvault::message::{LEASES_RELEASED_MAX, LeaseIds, LeasedItem};
use farpool_units::exactly;

use super::Shard;
use super::keyvault::{self, AnswerHead};
use farpool_kv_store::Found;
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::lease::Lease;

/// The most leases of one connection: also the most unanswered requests, and the most leases that
/// one RELEASE ends.
pub const LEASES_MAX: usize = LEASES_RELEASED_MAX;
/// The lower bits of a lease's number: its slot. The upper bits count the uses of the slot, so that
/// a released number is not soon reused for another lease.
const SLOT_BITS: u32 = 12;

const _: () = assert!(LEASES_MAX <= 1 << SLOT_BITS);

#[derive(Debug, Default)]
struct Slot {
    uses: u32,
    lease: Option<Lease>,
}

/// The leases of one connection, by their numbers.
#[derive(Debug, Default)]
pub struct LeaseTable {
    slots: Vec<Slot>,
    free: Vec<usize>,
    bytes_min: usize,
}

impl LeaseTable {
    /// An empty table. Values shorter than `bytes_min` are not leased.
    #[must_use]
    pub fn new(bytes_min: u32) -> Self {
        Self { bytes_min: exactly(bytes_min), ..Self::default() }
    }

    /// The number of leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn is_full(&self) -> bool {
        self.len() >= LEASES_MAX
    }

    /// Adds a lease and returns its number. The caller has checked that there is room.
    fn keep(&mut self, lease: Lease) -> NonZeroU32 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let slot = &mut self.slots[at];
        // At least 1, so that no number is 0.
        slot.uses = (slot.uses + 1) % (1 << (u32::BITS - SLOT_BITS));
        slot.uses = slot.uses.max(1);
        let before = slot.lease.replace(lease);
        assert!(before.is_none(), "a free number has no lease");
        let at = u32::try_from(at).expect("below LEASES_MAX");
        NonZeroU32::new(slot.uses << SLOT_BITS | at).expect("uses count from 1")
    }

    fn take(&mut self, id: NonZeroU32) -> Option<Lease> {
        let at = (id.get() & ((1 << SLOT_BITS) - 1)) as usize;
        let slot = self.slots.get_mut(at).filter(|slot| slot.uses == id.get() >> SLOT_BITS)?;
        let lease = slot.lease.take()?;
        self.free.push(at);
        Some(lease)
    }

    /// Ends all leases.
    pub fn release_all(&mut self, shard: &mut Shard) {
        let leases = std::mem::take(&mut self.slots).into_iter().filter_map(|slot| slot.lease);
        leases.for_each(|lease| shard.store.release(lease));
        self.free.clear();
    }
}

/// Appends the whole answer to GETLEASE: the value's offset, or the answer to GET if the value
/// cannot be leased.
pub fn answer_get(
    shard: &mut Shard,
    table: &mut LeaseTable,
    head: AnswerHead<'_>,
    HashedKey { key, hash }: HashedKey<'_>,
    out: &mut Vec<u8>,
) {
    keyvault::answer_by(head, out, |out| match keyvault::read(shard, key, hash) {
        Some(found) if push_lease(shard, table, found, out) => Status::Ok,
        Some(found) => keyvault::push_item(shard, found, out),
        None => Status::NotFound,
    });
}

/// Leases a value if possible. True if it did.
fn push_lease(shard: &mut Shard, table: &mut LeaseTable, found: Found, out: &mut Vec<u8>) -> bool {
    let view = shard.store.view(found);
    if view.value().len() < table.bytes_min {
        return false;
    }
    let (client_flags, cas) = (view.client_flags(), shard.store.cas(found));
    if table.is_full() {
        shard.store.count_lease_refused();
        return false;
    }
    let Some(leased) = shard.store.lease(found) else { return false };
    let value_bytes = u32::try_from(leased.bytes).expect("values have at most 30 bits");
    let lease = table.keep(leased.lease);
    LeasedItem { client_flags, lease, cas, at: leased.at as u64, value_bytes }.write(out);
    true
}

/// Appends the whole answer to RELEASE: how many of the numbers named leases.
pub fn answer_release(
    shard: &mut Shard,
    table: &mut LeaseTable,
    head: AnswerHead<'_>,
    ids: LeaseIds<'_>,
    out: &mut Vec<u8>,
) {
    let mut released = 0u32;
    for lease in ids.iter().filter_map(|id| table.take(id)) {
        shard.store.release(lease);
        released += 1;
    }
    keyvault::answer_status(head, Status::Ok, &released.to_le_bytes(), out);
}
