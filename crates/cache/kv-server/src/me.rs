//! What every part of a thread needs to know about the thread: its number, what it shares with the
//! others, what it waits with, and its counts.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use farpool_keyvault::owner::shard_of;
use farpool_kv_protocol::request::ParseLimits;
use rustix::event::epoll;
use rustix::io::Errno;

use crate::mail::mailbox::Mailbox;
use crate::settings::{Settings, Shared};
use crate::watch::report::ThreadCounts;

/// The token of a thread's mailbox.
pub(crate) const TOKEN_WAKE: u64 = u64::MAX;
/// The token of every descriptor through which lower tiers answer.
pub(crate) const TOKEN_LOWER: u64 = u64::MAX - 1;
/// Marks the token of a ring's bell. A client's socket has the client's number as its token.
pub(crate) const TOKEN_BELL: u64 = 1 << 62;

/// One thread, as its parts know it.
#[derive(Debug)]
pub(crate) struct Me {
    pub(crate) number: usize,
    pub(crate) shared: Arc<Shared>,
    pub(crate) limits: ParseLimits,
    pub(crate) counts: ThreadCounts,
    pub(crate) epoll: OwnedFd,
}

impl Me {
    pub(crate) fn new(shared: Arc<Shared>, number: usize) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = epoll::EventData::new_u64(TOKEN_WAKE);
        // Every write to it is an event, whatever was written before: it need not be read.
        let written = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &shared.mailboxes[number].wake, wake, written)?;
        let Settings { item_bytes_max, compat, .. } = shared.settings;
        let limits = ParseLimits::new(item_bytes_max, compat);
        Ok(Self { number, shared, limits, counts: ThreadCounts::default(), epoll })
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.number]
    }

    /// The thread whose shard owns the keys of this hash.
    #[inline]
    pub(crate) fn owner_of(&self, hash: u64) -> usize {
        shard_of(hash, self.shared.shards())
    }

    /// Whether a key of this hash belongs to this thread's shard.
    #[inline]
    pub(crate) fn owns(&self, hash: u64) -> bool {
        self.owner_of(hash) == self.number
    }
}
