//! Orders from the rack to a blade: who may have how much, how fast, and when it ends.
//!
//! Orders are carried out one at a time. A grant is revoked in this order: new connections are
//! refused; every connection under it is fenced, so that no byte of its clients moves any more; its
//! clients end; their memory is zeroed. Connections that are being set up meanwhile check again
//! once they are registered ([`Blade::enter_grant`]), so none slips through.

use super::{Blade, Memory};
use crate::audit::Asker;
use crate::gate::{Gate, Ticket};
use crate::table::{
    GrantError, GrantId, GrantPass, GrantSpec, GrantStat, Refused, Table, superpages_of,
};
use farpool_kernel::lock;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::ErrorCode;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use thiserror::Error;

/// The outcome of revoking a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Revoked {
    /// Clients that ended.
    pub clients: u32,
    /// Connections that were closed.
    pub connections: usize,
    /// Memory that its clients had, now zeroed and free.
    pub freed_bytes: u64,
}

/// What a blade lends at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lent {
    /// Memory that clients were given, or that is gone and not free yet.
    pub used_bytes: u64,
    /// How much of that takes up this machine's memory: all but what clients have not written to.
    /// Memory that is gone counts whole.
    pub backed_bytes: u64,
    /// The most that can be lent in all, as far as a file system limits that.
    pub limit_bytes: u64,
}

/// More memory than the blade was set up with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "the blade was set up to lend {limit_bytes} bytes at most, not {wanted_bytes}; start it with \
     more"
)]
pub struct CapacityError {
    /// The bytes asked for.
    pub wanted_bytes: u64,
    /// The bytes it was set up with.
    pub limit_bytes: u64,
}

/// The memory of segments under some grants, each with the superpages that are given of it.
fn holdings(
    table: &Table<Memory>,
    is_of: impl Fn(Option<GrantId>) -> bool,
) -> Vec<(Vec<u32>, Memory)> {
    let of = table.holdings().filter(|(grant, ..)| is_of(*grant));
    of.map(|(_, superpages, memory)| (superpages.collect(), Memory::clone(memory))).collect()
}

/// Asks the kernel, so without the table's lock.
fn backed_bytes(holdings: &[(Vec<u32>, Memory)]) -> io::Result<u64> {
    holdings.iter().map(|(superpages, memory)| memory.backed_bytes(superpages)).sum()
}

impl Blade {
    fn order(&self) -> MutexGuard<'_, ()> {
        lock(&self.orders)
    }

    /// Sets a grant, new or existing. With the blade's present epoch, its memory and rates may
    /// change. A higher epoch may bring another key, and closes the connections of the older one
    /// before this returns; their clients may reconnect within the lease.
    ///
    /// # Errors
    /// The order is out of date or invalid; see [`GrantError`].
    pub fn set_grant(&self, spec: &GrantSpec) -> Result<(), GrantError> {
        let _one_at_a_time = self.order();
        let what = || format!("set grant {} of epoch {}", spec.id.0, spec.epoch);
        let intent = self.audit.intend(|| (Asker::node(), what()));
        let set = self.change(|table| table.set_grant(spec, self.now()));
        self.note_order(intent, &set, what);
        set?;
        // One that could not be kept is logged; after the process's end it is set anew.
        let _ = self.keep_changes();
        self.gates.fence_before(spec.id, spec.epoch);
        Ok(())
    }

    fn note_order(
        &self,
        intent: Option<u64>,
        done: &Result<(), GrantError>,
        what: impl FnOnce() -> String,
    ) {
        let refused = done.is_err().then_some(ErrorCode::NotPermitted);
        self.audit.note_outcome(intent, refused, || match done {
            Ok(()) => (Asker::node(), what()),
            Err(error) => (Asker::node(), format!("{}: {error}", what())),
        });
    }

    /// Revokes a grant: its connections are closed, its clients end, and their memory is zero and
    /// free when this returns. Revoking an unknown grant works, too: it cannot be set later with
    /// this epoch or an older one. While the blade's table cannot be kept, which is logged, the
    /// memory waits to be zeroed; a process that ends then leaves the grant to the next, until that
    /// is told again.
    ///
    /// # Errors
    /// The blade knows of a later epoch.
    pub fn revoke_grant(&self, id: GrantId, epoch: u64) -> Result<Revoked, GrantError> {
        let _one_at_a_time = self.order();
        let what = || format!("revoke grant {} up to epoch {epoch}", id.0);
        let intent = self.audit.intend(|| (Asker::node(), what()));
        let mut table = self.write();
        table.check_end_grant(id, epoch).inspect_err(|error| {
            self.note_order(intent, &Err(*error), what);
        })?;
        table.close_grant(id);
        drop(table);
        let connections = self.gates.fence_all(id);
        let (clients, scrubs) = self.change(|table| table.end_grant(id, epoch));
        let superpages: u64 = scrubs.iter().map(|scrub| u64::from(scrub.part.superpages())).sum();
        self.queue_scrubs(scrubs);
        self.run_scrubs();
        self.note_order(intent, &Ok(()), what);
        self.counters.grants_revoked.fetch_add(1, Ordering::Relaxed);
        Ok(Revoked { clients, connections, freed_bytes: superpages * SUPERPAGE_BYTES })
    }

    /// All grants, in the order of their ids.
    pub fn grants(&self) -> Vec<GrantStat> {
        self.read().grants()
    }

    /// What its grants were set to, in the order of their ids.
    pub fn grant_specs(&self) -> Vec<GrantSpec> {
        self.read().grant_specs()
    }

    /// Grants revoked since the blade started.
    pub fn grants_revoked(&self) -> u64 {
        self.counters.grants_revoked.load(Ordering::Relaxed)
    }

    /// Changes what the blade lends, rounded down to superpages. Below what is used, it only stops
    /// further allocation: clients keep their memory.
    ///
    /// # Errors
    /// It is more than the blade was set up with.
    pub fn set_capacity(&self, bytes: u64) -> Result<(), CapacityError> {
        let limit_bytes = self.config.memory_bytes;
        if bytes > limit_bytes {
            return Err(CapacityError { wanted_bytes: bytes, limit_bytes });
        }
        let superpages = superpages_of(bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES);
        let mut table = self.write();
        table.set_capacity(superpages);
        let before = self.capacity_superpages.swap(superpages, Ordering::Relaxed);
        drop(table);
        if before != superpages {
            self.audit.note(None, || (Asker::node(), format!("lend {bytes} bytes")));
        }
        Ok(())
    }

    /// Memory that can be allocated now.
    pub fn free_bytes(&self) -> u64 {
        let table = self.read();
        let used_bytes = u64::from(table.sizes().used_superpages) * SUPERPAGE_BYTES;
        self.capacity_bytes().saturating_sub(used_bytes)
    }

    /// What is lent. Of anonymous memory each superpage takes the kernel 2 to 10 µs.
    ///
    /// # Errors
    /// The system's.
    pub fn lent(&self) -> io::Result<Lent> {
        let table = self.read();
        let used = u64::from(table.sizes().used_superpages);
        let holdings = holdings(&table, |_| true);
        drop(table);
        let given: usize = holdings.iter().map(|(superpages, _)| superpages.len()).sum();
        let used_bytes = used * SUPERPAGE_BYTES;
        Ok(Lent {
            used_bytes,
            backed_bytes: (used - given as u64) * SUPERPAGE_BYTES + backed_bytes(&holdings)?,
            limit_bytes: self.store.room_bytes()?.saturating_add(used_bytes),
        })
    }

    /// [`Lent::backed_bytes`] of the memory under some grants.
    ///
    /// # Errors
    /// The system's.
    pub fn backed_bytes_of(&self, is_of: impl Fn(GrantId) -> bool) -> io::Result<u64> {
        let holdings = holdings(&self.read(), |grant| grant.is_some_and(&is_of));
        backed_bytes(&holdings)
    }

    /// Registers a connection that was admitted under a grant, so that it ends with it.
    ///
    /// # Errors
    /// The grant was ended or set anew since the connection was admitted.
    pub(crate) fn enter_grant(
        &self,
        pass: &GrantPass,
        gate: &Arc<Gate>,
    ) -> Result<Ticket, Refused> {
        let ticket = self.gates.enter(pass.id, pass.epoch, gate);
        // An order after the line above finds the connection; an order before it is seen here.
        self.read().recheck_grant(pass).inspect_err(|_| self.gates.leave(ticket))?;
        Ok(ticket)
    }

    pub(crate) fn leave_grant(&self, ticket: Ticket) {
        self.gates.leave(ticket);
    }
}
