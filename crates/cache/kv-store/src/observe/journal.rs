//! Events for watchers: a line for each, in the words of memcached's `watch`.
//!
//! Events are recorded only while their kind is watched. A journal is bounded: events that do not
//! fit until it is taken are dropped and counted. Time is set by the caller, never read.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, percent_encode};

/// The most bytes that a journal keeps until it is taken; further events are dropped.
const BYTES_MAX: usize = 256 << 10;
/// The characters that memcached does not encode when it shows a key.
const SHOWN_AS_THEY_ARE: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A key as one word, whatever its bytes.
#[must_use]
pub fn shown_key(key: &[u8]) -> PercentEncode<'_> {
    percent_encode(key, SHOWN_AS_THEY_ARE)
}

/// Kinds of events that can be watched.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Kinds(pub u16);

impl Kinds {
    pub const FETCHERS: Self = Self(1);
    pub const MUTATIONS: Self = Self(2);
    pub const EVICTIONS: Self = Self(4);
    pub const CONNECTIONS: Self = Self(8);
    pub const DELETIONS: Self = Self(16);

    /// All kinds by their names in memcached, in its order. Those about which its text protocol
    /// never reports anything are empty.
    pub const NAMED: [(&str, Self); 10] = [
        ("rawcmds", Self(0)),
        ("evictions", Self::EVICTIONS),
        ("fetchers", Self::FETCHERS),
        ("mutations", Self::MUTATIONS),
        ("sysevents", Self(0)),
        ("connevents", Self::CONNECTIONS),
        ("proxyreqs", Self(0)),
        ("proxyevents", Self(0)),
        ("proxyuser", Self(0)),
        ("deletions", Self::DELETIONS),
    ];

    /// Whether 1.6.18 does not know them yet.
    #[must_use]
    pub fn is_of_1_6_45(self) -> bool {
        self == Self::DELETIONS
    }

    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Journal lines, each of one kind.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    ends: Vec<(Kinds, usize)>,
}

impl Lines {
    /// All lines, including their ends.
    pub fn iter(&self) -> impl Iterator<Item = (Kinds, &str)> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|&(_, end)| end));
        self.ends.iter().zip(starts).map(|(&(kind, end), start)| (kind, &self.text[start..end]))
    }
}

/// The result of a read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum ReadStatus {
    Found,
    #[default]
    NotFound,
    Flushed,
    Expired,
}

/// An item that leaves memory.
#[derive(Debug, Clone, Copy)]
pub struct Leaving<'a> {
    pub key: &'a [u8],
    pub was_fetched: bool,
    /// Seconds left, if it expires at all.
    pub ttl_s: Option<u32>,
    pub idle_s: u32,
    pub value_bytes: usize,
}

/// A client that connects or disconnects.
#[derive(Debug, Clone)]
pub struct Peer {
    pub address: String,
    pub port: u16,
    pub is_local: bool,
    /// The number of its descriptor.
    pub number: i32,
}

/// The events of one thread.
#[derive(Debug)]
pub struct Journal {
    kinds: Kinds,
    lines: Lines,
    unix_s: u64,
    unix_us: u32,
    client: i32,
    /// The counter for all events of the server.
    numbers: Arc<AtomicU64>,
    written: u64,
    dropped: u64,
}

impl Journal {
    #[must_use]
    pub fn new(kinds: Kinds, numbers: Arc<AtomicU64>) -> Self {
        let lines = Lines::default();
        Self { kinds, lines, unix_s: 0, unix_us: 0, client: 0, numbers, written: 0, dropped: 0 }
    }

    /// Sets the kinds that are watched.
    pub const fn set_kinds(&mut self, kinds: Kinds) {
        self.kinds = kinds;
    }

    /// Sets the time: seconds and microseconds since 1970.
    pub const fn set_now(&mut self, unix_s: u64, unix_us: u32) {
        (self.unix_s, self.unix_us) = (unix_s, unix_us);
    }

    /// Sets the client whose requests follow, by the number of its descriptor; 0 for requests that
    /// another thread passed on.
    pub const fn set_client(&mut self, number: i32) {
        self.client = number;
    }

    fn note(&mut self, kind: Kinds, event: fmt::Arguments<'_>) {
        if !self.kinds.has(kind) {
            return;
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        if self.lines.text.len() >= BYTES_MAX {
            self.dropped += 1;
            return;
        }
        let Self { lines, unix_s, unix_us, .. } = self;
        // Writing to a string cannot fail.
        let _ = writeln!(lines.text, "ts={unix_s}.{unix_us:06} gid={number} type={event}");
        lines.ends.push((kind, lines.text.len()));
        self.written += 1;
    }

    /// Records that a key was read.
    pub fn read(&mut self, key: &[u8], status: ReadStatus, value_bytes: usize) {
        let (name, class) = match status {
            ReadStatus::Found => ("found", 1),
            ReadStatus::NotFound => ("not_found", 0),
            ReadStatus::Flushed => ("flushed", 0),
            ReadStatus::Expired => ("expired", 0),
        };
        let (key, client) = (shown_key(key), self.client);
        self.note(
            Kinds::FETCHERS,
            format_args!(
                "item_get key={key} status={name} clsid={class} cfd={client} size={value_bytes}"
            ),
        );
    }

    /// Records a storage command; `ttl_s` is 0 if the item never expires.
    pub fn stored(
        &mut self,
        key: &[u8],
        (command, status): (&str, &str),
        ttl_s: u32,
        value_bytes: usize,
    ) {
        let (key, client) = (shown_key(key), self.client);
        self.note(
            Kinds::MUTATIONS,
            format_args!(
                "item_store key={key} status={status} cmd={command} ttl={ttl_s} clsid=1 \
                 cfd={client} size={value_bytes}"
            ),
        );
    }

    /// Records that a client deleted an item, by `delete` or `md`.
    pub fn deleted(&mut self, key: &[u8], command: &str, value_bytes: usize) {
        let key = shown_key(key);
        self.note(
            Kinds::DELETIONS,
            format_args!("deleted key={key} cmd={command} clsid=1 size={value_bytes}"),
        );
    }

    /// Records that an item was evicted: dropped, or moved to a lower tier.
    pub fn left(&mut self, item: Leaving<'_>, for_lower_tier: bool) {
        let key = shown_key(item.key);
        let fetched = if item.was_fetched { "yes" } else { "no" };
        let ttl = item.ttl_s.map_or(-1, i64::from);
        let Leaving { idle_s, value_bytes, .. } = item;
        let what = if for_lower_tier { "extwrite" } else { "eviction" };
        let event = format_args!("{what} key={key} fetch={fetched} ttl={ttl} la={idle_s} clsid=1");
        if for_lower_tier {
            self.note(Kinds::EVICTIONS, format_args!("{event} bucket=0"));
        } else {
            self.note(Kinds::EVICTIONS, format_args!("{event} size={value_bytes}"));
        }
    }

    /// Records that a client connected.
    pub fn opened(&mut self, peer: &Peer) {
        self.note(Kinds::CONNECTIONS, format_args!("conn_new {}", shown_peer(peer, None)));
    }

    /// Records that a client disconnected.
    pub fn closed(&mut self, peer: &Peer, reason: &str) {
        let event = format_args!("conn_close {}", shown_peer(peer, Some(reason)));
        self.note(Kinds::CONNECTIONS, event);
    }

    /// Takes the lines recorded since the last call, and the number of those that did not fit.
    pub fn take(&mut self) -> Option<(Lines, u64)> {
        if self.written + self.dropped == 0 {
            return None;
        }
        self.written = 0;
        Some((std::mem::take(&mut self.lines), std::mem::take(&mut self.dropped)))
    }
}

fn shown_peer(peer: &Peer, reason: Option<&str>) -> String {
    let Peer { address, port, is_local, number } = peer;
    let transport = if *is_local { "local" } else { "tcp" };
    let reason = reason.map_or_else(String::new, |reason| format!(" reason={reason}"));
    format!("rip={address} rport={port} transport={transport}{reason} cfd={number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_watched_is_written_and_only_so_much() {
        let numbers = Arc::new(AtomicU64::new(0));
        let mut journal = Journal::new(Kinds::FETCHERS, Arc::clone(&numbers));
        journal.set_now(7, 42);
        journal.set_client(5);
        journal.read(b"a b\xff", ReadStatus::Expired, 0);
        journal.stored(b"k", ("set", "stored"), 0, 3);
        let (lines, dropped) = journal.take().unwrap();
        assert_eq!(dropped, 0);
        let told: Vec<_> = lines.iter().collect();
        let line =
            "ts=7.000042 gid=1 type=item_get key=a%20b%FF status=expired clsid=0 cfd=5 size=0\n";
        assert_eq!(told, [(Kinds::FETCHERS, line)]);
        assert!(journal.take().is_none());
        let mut written = 0;
        while journal.dropped == 0 {
            journal.read(b"key", ReadStatus::Found, 9);
            written += 1;
        }
        let (lines, dropped) = journal.take().unwrap();
        assert_eq!((lines.iter().count() as u64 + dropped, dropped), (written, 1));
        assert!(lines.text.len() < BYTES_MAX + 1000);
    }
}
