//! `watch`: clients that are sent events as they happen.
//!
//! Each thread keeps a journal while there are watchers, and passes its lines once a round to the
//! threads that have watchers. Watchers never hold anything up: one that does not read fast enough
//! misses lines and is told how many.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use farpool_kv_store::Store;
use farpool_kv_store::observe::journal::{Journal, Kinds, Peer};
use rustix::net::{SocketAddrV4, SocketAddrV6};

use super::report::ThreadCounts;
use super::watchers::Watchers;
use crate::clients::Clients;
use crate::clients::connection::{Client, CloseReason};
use crate::clients::sockets::Connection;
use crate::mail::mailbox::{ConnectionId, Message, Told};
use crate::me::Me;

/// A watcher with this much unsent output misses further lines.
const UNSENT_BYTES_MAX: usize = 256 << 10;

/// The client at the other end of a socket.
fn peer(socket: &impl AsFd, is_local: bool) -> Peer {
    let number = socket.as_fd().as_raw_fd();
    let told = |address: String, port| Peer { address, port, is_local, number };
    if is_local {
        return told("unix".into(), 0);
    }
    let Ok(Some(address)) = rustix::net::getpeername(socket) else {
        return told("unknown".into(), 0);
    };
    if let Ok(v4) = SocketAddrV4::try_from(address.clone()) {
        told(v4.ip().to_string(), v4.port())
    } else if let Ok(v6) = SocketAddrV6::try_from(address) {
        told(v6.ip().to_string(), v6.port())
    } else {
        told("unknown".into(), 0)
    }
}

/// Keeps a journal while there are watchers, and sets its clock. To be called every round.
pub(crate) fn keep(store: &mut Store, watchers: &Watchers) {
    let kinds = watchers.kinds();
    if kinds == Kinds::default() {
        if store.journal_mut().is_some() {
            store.set_journal(None);
        }
        return;
    }
    if store.journal_mut().is_none() {
        store.set_journal(Some(Box::new(Journal::new(kinds, watchers.numbers()))));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if let Some(journal) = store.journal_mut() {
        journal.set_kinds(kinds);
        journal.set_now(now.as_secs(), now.subsec_micros());
    }
}

/// Sets whose requests the journal records from now on.
#[inline]
pub(crate) fn note_client(store: &mut Store, connection: Option<&Connection>) {
    if let Some(journal) = store.journal_mut() {
        journal.set_client(connection.map_or(0, |it| it.socket.as_raw_fd()));
    }
}

pub(crate) fn note_opened(store: &mut Store, connection: &Connection) {
    if let Some(journal) = store.journal_mut() {
        journal.opened(&peer(&connection.socket, connection.is_local));
    }
}

/// Records that a connection ends, and removes it from the watchers.
pub(crate) fn note_closed(
    store: &mut Store,
    me: &Me,
    id: ConnectionId,
    connection: &Connection,
    reason: CloseReason,
) {
    if let Some(journal) = store.journal_mut() {
        journal.closed(&peer(&connection.socket, connection.is_local), reason.name());
    }
    if connection.client.watch.is_some() {
        me.shared.watchers.remove(me.number, id);
    }
}

/// Passes the journal's lines to the threads that have watchers.
pub(crate) fn send(store: &mut Store, me: &mut Me) {
    let Some(journal) = store.journal_mut() else { return };
    let Some((lines, dropped)) = journal.take() else { return };
    me.counts.journal_written += lines.iter().count() as u64;
    me.counts.journal_dropped += dropped;
    let told = Arc::new(Told { lines, dropped });
    for thread in me.shared.watchers.threads() {
        me.shared.mailboxes[thread].put(Message::Told(Arc::clone(&told)));
    }
}

impl Clients {
    /// Sends journal lines to a watching client.
    pub(crate) fn tell(&mut self, client: &mut Client, told: &Told, counts: &mut ThreadCounts) {
        let Some(mut watch) = client.watch else { return };
        watch.skipped += told.dropped;
        let waits = client.unsent.len() - client.sent_bytes + client.replies.ready_bytes();
        let has_room = waits < UNSENT_BYTES_MAX;
        if has_room && watch.skipped > 0 {
            let line = format!("skipped={}\n", std::mem::take(&mut watch.skipped));
            self.out.extend_from_slice(line.as_bytes());
        }
        for (_, line) in told.lines.iter().filter(|(kind, _)| watch.kinds.has(*kind)) {
            if has_room {
                self.out.extend_from_slice(line.as_bytes());
                counts.watcher_sent += 1;
            } else {
                watch.skipped += 1;
                counts.watcher_skipped += 1;
            }
        }
        client.watch = Some(watch);
        self.settle(client);
    }
}
