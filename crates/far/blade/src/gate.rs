//! How another thread ends a connection, for good.
//!
//! Invariants:
//! - A connection works only while it holds its gate's lock, so when [`Gate::fence`] returns it is
//!   idle and never works again: it touches no memory, nothing in its buffers takes effect, and
//!   none of its writes counts as under way, even before its worker has closed it.
//! - No lock of this module is held while a connection is fenced.

use crate::table::{GrantId, WriteGuard};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use farpool_kernel::lock;

/// Lets another thread end one connection.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) socket: OwnedFd,
    pub(crate) is_fenced: Mutex<bool>,
    /// Keeps the segment that the connection is writing to from being frozen or freed.
    writing: Mutex<Option<WriteGuard>>,
}

/// A write under way; ends when dropped, or when its connection is fenced.
#[derive(Debug)]
pub(crate) struct Writing(Arc<Gate>);

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.end_writing();
    }
}

impl Gate {
    pub(crate) fn new(socket: OwnedFd) -> Gate {
        Gate { socket, is_fenced: Mutex::new(false), writing: Mutex::new(None) }
    }

    /// Waits until the connection is idle, and keeps it from ever working again.
    pub(crate) fn fence(&self) {
        *lock(&self.is_fenced) = true;
        self.end_writing();
        crate::sys::shut(&self.socket);
    }

    /// Begins a write of the connection; it writes one at a time.
    pub(crate) fn begin_writing(self: &Arc<Self>, guard: Option<WriteGuard>) -> Writing {
        *lock(&self.writing) = guard;
        Writing(Arc::clone(self))
    }

    fn end_writing(&self) {
        *lock(&self.writing) = None;
    }
}

/// The key of a connection among those under grants.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Ticket {
    grant: GrantId,
    number: u64,
}

/// The connections under grants, to be ended with them.
#[derive(Debug, Default)]
pub(crate) struct Gates(Mutex<Entered>);

#[derive(Debug, Default)]
struct Entered {
    /// Each with the epoch that it was admitted under.
    connections: BTreeMap<Ticket, (u64, Arc<Gate>)>,
    next_number: u64,
}

impl Gates {
    fn lock(&self) -> MutexGuard<'_, Entered> {
        lock(&self.0)
    }

    pub(crate) fn enter(&self, grant: GrantId, epoch: u64, gate: &Arc<Gate>) -> Ticket {
        let mut entered = self.lock();
        let ticket = Ticket { grant, number: entered.next_number };
        entered.next_number += 1;
        entered.connections.insert(ticket, (epoch, Arc::clone(gate)));
        ticket
    }

    pub(crate) fn leave(&self, ticket: Ticket) {
        self.lock().connections.remove(&ticket);
    }

    /// Ends the grant's connections of epochs below `epoch`. Returns their number.
    pub(crate) fn fence_before(&self, grant: GrantId, epoch: u64) -> usize {
        self.fence(grant, |of_connection| of_connection < epoch)
    }

    /// Ends all of the grant's connections. Returns their number.
    pub(crate) fn fence_all(&self, grant: GrantId) -> usize {
        self.fence(grant, |_| true)
    }

    fn fence(&self, grant: GrantId, is_over: impl Fn(u64) -> bool) -> usize {
        let all = Ticket { grant, number: 0 }..=Ticket { grant, number: u64::MAX };
        let entered = self.lock();
        let over = entered.connections.range(all).filter(|(_, (epoch, _))| is_over(*epoch));
        let gates: Vec<_> = over.map(|(_, (_, gate))| Arc::clone(gate)).collect();
        drop(entered);
        gates.iter().for_each(|gate| gate.fence());
        gates.len()
    }
}
