//! Leases for clients on this host: which clients may have them, and how they end with the client.

use std::os::fd::OwnedFd;

use farpool_kernel::send_with_descriptors;
use farpool_keyvault::frame::{Header, Status, begin, finish};
use farpool_keyvault::message::LeasesGranted;
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::lease::{LEASES_MAX, LeaseTable};
use farpool_kv_store::Store;
use farpool_units::exactly;
use rustix::net::SendFlags;

use super::state::KeyVaultState;

impl KeyVaultState {
    /// Whether leases may be requested: once, and before the connection moves into rings.
    pub(super) const fn may_lease(&self) -> bool {
        self.ring_client.is_none() && self.leases.is_none()
    }

    /// Hands out the memory of a shard's items for reading, if the server allows it. False if it
    /// does not.
    pub(super) fn lease(
        &mut self,
        socket: &OwnedFd,
        header: &Header,
        store: &Store,
        bytes_min: u32,
    ) -> bool {
        let is_granted = store.readable_by_others().is_some_and(|(file, bytes)| {
            let leases = exactly(LEASES_MAX);
            let mut reply = Vec::new();
            let start = begin(&mut reply, Header { status: Some(Status::Ok), ..*header });
            LeasesGranted { memory_bytes: bytes as u64, leases }.write(&mut reply);
            finish(&mut reply, start, !self.unchecked);
            let sent = send_with_descriptors(socket, &reply, &[file], SendFlags::empty());
            sent == Ok(reply.len())
        });
        if is_granted {
            self.leases = Some(LeaseTable::new(bytes_min));
        }
        is_granted
    }

    /// Ends all leases of the connection: its client reads there no more.
    pub(crate) fn end_leases(&mut self, shard: &mut Shard) {
        if let Some(leases) = &mut self.leases {
            leases.release_all(shard);
        }
    }

    /// Whether the client holds leases. The server does not close such a connection as idle: the
    /// client could not know that the memory it reads is freed.
    pub(crate) fn holds_leases(&self) -> bool {
        self.leases.as_ref().is_some_and(|leases| !leases.is_empty())
    }
}
