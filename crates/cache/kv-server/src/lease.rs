//! Leases for clients on this host: who may have some, and what becomes of them when he goes.

use farpool_keyvault::frame::{Header, Status, begin, finish};
use farpool_keyvault::message::LeasesGranted;
use farpool_keyvault::share;
use farpool_units::exactly;

use super::light::Light;
use super::sockets::Connection;
use super::worker::Worker;
use farpool_kv_protocol::lease::{LEASES_MAX, LeaseTable};
use farpool_kv_protocol::light;

impl Worker {
    /// Hands out the memory of this shard's items, to be read, if the server is set up for it: once, on a unix socket, before
    /// the connection moves into rings.
    pub(super) fn grant_leases(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        header: &Header,
        bytes_min: u32,
    ) {
        let may_have = connection.is_local && state.port.is_none() && state.leases.is_none();
        // What is ready goes first; only then does the descriptor travel with its own bytes.
        let may_have = may_have && self.send(connection) && connection.client.unsent.is_empty();
        let memory = self.shard.store.readable_by_others().filter(|_| may_have);
        let head = state.head(header);
        let is_granted = memory.is_some_and(|(file, bytes)| {
            let leases = exactly(LEASES_MAX);
            let mut reply = Vec::new();
            let start = begin(&mut reply, Header { status: Some(Status::Ok), ..*header });
            LeasesGranted { memory_bytes: bytes as u64, leases }.write(&mut reply);
            finish(&mut reply, start, head.checked);
            let sent = share::send_with_files(&connection.socket, &reply, &[file]);
            sent == Ok(reply.len())
        });
        if is_granted {
            state.leases = Some(LeaseTable::new(bytes_min));
        } else {
            light::answer_status(head, Status::Unsupported, b"", &mut self.out);
        }
    }

    /// Ends what a connection has leased: nobody reads there any more.
    pub(super) fn end_leases(&mut self, connection: &mut Connection) {
        if let Some(leases) = connection.light.as_mut().and_then(|light| light.leases.as_mut()) {
            leases.release_all(&mut self.shard);
        }
    }
}

impl Light {
    /// Whether the client reads where items lie. The server does not send such a client away by itself: it could not know
    /// that what it reads is freed.
    pub(super) fn holds_leases(&self) -> bool {
        self.leases.as_ref().is_some_and(|leases| !leases.is_empty())
    }
}
