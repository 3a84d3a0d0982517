//! Binary requests to the server as a whole.

use std::sync::atomic::Ordering;

use crate::clients::connection::{Client, Phase};
use crate::mail::mailbox::{Ask, ConnectionId};
use crate::watch::admin::{self, VERBOSITY_MAX};
use crate::watch::report::GatherFor;
use crate::watch::stats;
use crate::worker::Worker;
use farpool_kv_protocol::binary::{
    Head, ServerRequest, Status, push_detail, push_empty, push_refusal, push_stats, push_value,
};

/// The reply of the text protocol, encoded for the binary one.
pub(crate) fn encode(head: Head, what: &GatherFor, text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match what {
        GatherFor::Line { .. } => push_empty(&mut out, head, 0),
        GatherFor::Prefixes => push_detail(&mut out, head, text),
        _ => push_stats(&mut out, head, text),
    }
    out
}

impl Worker {
    pub(super) fn answer_binary_server(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        head: Head,
        request: &ServerRequest<'_>,
    ) {
        let out = &mut self.clients.out;
        match *request {
            ServerRequest::Noop => push_empty(out, head, 0),
            ServerRequest::Version => {
                let version = self.me.shared.settings.compat.version();
                push_value(out, head, Status::Success, 0, version.as_bytes());
            }
            ServerRequest::Quit => {
                push_empty(out, head, 0);
                client.phase = Phase::Closing;
            }
            ServerRequest::Verbosity { level } => {
                self.me.shared.verbosity.store(level.min(VERBOSITY_MAX), Ordering::Relaxed);
                push_empty(out, head, 0);
            }
            ServerRequest::Flush { exptime } => self.flush_binary(client, id, head, exptime),
            ServerRequest::Stat { what } => self.answer_stat(client, id, head, what),
            ServerRequest::ListMechanisms => self.list_mechanisms(client, head),
            ServerRequest::Sasl(step) => self.authenticate_binary(client, head, step),
        }
    }

    fn flush_binary(&mut self, client: &mut Client, id: ConnectionId, head: Head, exptime: u32) {
        if !self.me.shared.settings.allows_flush {
            return push_refusal(&mut self.clients.out, head, Status::AuthError);
        }
        self.me.counts.flush_commands += 1;
        let at_s = self.shard.clock.flush_s(exptime.into());
        self.gather_binary(client, id, head, DONE, Ask::Flush { at_s });
    }

    /// Has every shard carry out `ask`; the reply is that of the text protocol, encoded.
    fn gather_binary(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        head: Head,
        what: GatherFor,
        ask: Ask,
    ) {
        let what = GatherFor::Binary { head, what: Box::new(what) };
        admin::gather(self, client, id, what, ask);
    }

    /// Answers STAT. Some names are recognised by their beginning, as in memcached.
    fn answer_stat(&mut self, client: &mut Client, id: ConnectionId, head: Head, what: &[u8]) {
        let (what, ask) = match what {
            b"" => (GatherFor::Stats, Ask::Report),
            b"items" => (GatherFor::Items, Ask::Report),
            b"slabs" => (GatherFor::Slabs, Ask::Report),
            [b'r', b'e', b's', b'e', b't', ..] => (DONE, Ask::ResetCounts),
            [b's', b'e', b't', b't', b'i', b'n', b'g', b's', ..] => {
                let mut text = Vec::new();
                stats::push_settings(&self.me.shared, &mut text);
                return push_stats(&mut self.clients.out, head, &text);
            }
            b"sizes" => {
                let text = b"STAT sizes_status disabled\r\n";
                return push_stats(&mut self.clients.out, head, text);
            }
            [b'd', b'e', b't', b'a', b'i', b'l', how @ ..]
                if self.me.shared.settings.allows_dump =>
            {
                match how {
                    [b' ', b'd', b'u', b'm', b'p', ..] => (GatherFor::Prefixes, Ask::LeaveObserved),
                    [b' ', b'o', b'n', ..] => self.count_prefixes_of_all(true),
                    [b' ', b'o', b'f', b'f', ..] => self.count_prefixes_of_all(false),
                    _ => return push_refusal(&mut self.clients.out, head, Status::KeyNotFound),
                }
            }
            _ => return push_refusal(&mut self.clients.out, head, Status::KeyNotFound),
        };
        self.gather_binary(client, id, head, what, ask);
    }

    fn count_prefixes_of_all(&self, on: bool) -> (GatherFor, Ask) {
        self.me.shared.counts_prefixes.store(on, Ordering::Relaxed);
        (DONE, Ask::CountPrefixes { on })
    }
}

/// A reply without content, once all shards have done what was asked.
const DONE: GatherFor = GatherFor::Line { line: "OK", quiet: false };
