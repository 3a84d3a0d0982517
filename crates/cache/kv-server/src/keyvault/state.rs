//! The state of a KeyVault connection beside its client.

use farpool_kernel::send_with_descriptors;
use farpool_keyvault::frame::{Header, Status, begin, finish};
use farpool_keyvault::share::RingSizes;
use farpool_kv_protocol::keyvault::AnswerHead;
use farpool_kv_protocol::lease::LeaseTable;
use farpool_units::exactly;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::os::fd::{AsFd, OwnedFd};

use super::ring_client::RingClient;

/// The most frames that are planned together.
pub(crate) const BATCH: usize = 32;

/// The state of a KeyVault connection beside its client.
#[derive(Debug, Default)]
pub struct KeyVaultState {
    pub(super) has_greeted: bool,
    pub(super) unchecked: bool,
    pub(super) credits: u32,
    /// Broadcasts passed on to other shards, each with the number of shards that still owe an
    /// answer.
    pub(super) passed_on: Vec<(Header, usize)>,
    pub(crate) ring_client: Option<RingClient>,
    /// What it has leased, if it may lease.
    pub(super) leases: Option<LeaseTable>,
}

impl KeyVaultState {
    /// How the answer to a request begins.
    #[inline]
    pub(super) const fn head<'a>(&self, header: &'a Header) -> AnswerHead<'a> {
        AnswerHead { header, checked: !self.unchecked }
    }
}

/// Where frames come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Socket,
    /// Its frames are few, and all of them are answered.
    Ring,
}

impl KeyVaultState {
    /// Moves the connection into shared memory: the answer carries the memory and the two bells.
    /// False if the connection stays where it is.
    pub(super) fn share(&mut self, socket: &OwnedFd, header: &Header, sizes: RingSizes) -> bool {
        let mut reply = Vec::new();
        let start = begin(&mut reply, Header { status: Some(Status::Ok), ..*header });
        reply.extend_from_slice(&exactly::<u32, _>(sizes.request_bytes).to_le_bytes());
        reply.extend_from_slice(&exactly::<u32, _>(sizes.answer_bytes).to_le_bytes());
        finish(&mut reply, start, !self.unchecked);
        let ring_client = RingClient::new(sizes).and_then(|(ring_client, file)| {
            let [server, client] = ring_client.bells();
            let files = [file.as_fd(), server, client];
            let sent = send_with_descriptors(socket, &reply, &files, SendFlags::empty())?;
            if sent == reply.len() { Ok(ring_client) } else { Err(Errno::MSGSIZE) }
        });
        ring_client.map(|ring_client| self.ring_client = Some(ring_client)).is_ok()
    }
}
