//! Long lists, of items and of clients. Shards are asked in turn for one piece after the other, and
//! the next piece is requested when the client has taken the one before, so that a list of any
//! length needs little memory.

use farpool_kv_protocol::compat::Compat;
use farpool_kv_protocol::{Shard, listing};

/// The most bytes that memcached's `stats cachedump` returns.
const CACHEDUMP_BYTES_MAX: usize = 2 << 20;

/// The kinds of list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// `lru_crawler metadump`, in the form of a version of memcached.
    Metadump(Compat),
    /// `lru_crawler mgdump`.
    Mgdump,
    /// `stats cachedump`.
    Cachedump,
    /// `stats conns`.
    Connections,
}

impl List {
    /// The line that ends the list.
    pub(super) const fn end(self) -> &'static str {
        if matches!(self, Self::Mgdump) { "EN" } else { "END" }
    }
}

/// One piece of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Where the shard's next piece begins, if there is one.
    pub next: Option<usize>,
    pub lines: usize,
}

/// The progress of a client's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dump {
    pub(super) list: List,
    pub(super) shard: usize,
    /// The segment at which the next piece begins.
    pub(super) from: usize,
    pub(super) lines_left: usize,
    pub(super) bytes_left: usize,
}

impl Dump {
    /// Begins a list of at most `lines_max` lines.
    #[must_use]
    pub const fn new(list: List, lines_max: usize) -> Self {
        let bytes_left =
            if matches!(list, List::Cachedump) { CACHEDUMP_BYTES_MAX } else { usize::MAX };
        Self { list, shard: 0, from: 0, lines_left: lines_max, bytes_left }
    }

    /// Notes that a piece of `bytes` bytes has arrived.
    pub fn take(&mut self, piece: Listed, bytes: usize) {
        self.lines_left = self.lines_left.saturating_sub(piece.lines);
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        match piece.next {
            Some(next) => self.from = next,
            None => {
                self.shard += 1;
                self.from = 0;
            }
        }
    }
}

/// Appends one piece of a list of a shard's items.
pub(crate) fn push_piece(
    shard: &Shard,
    list: List,
    from: usize,
    (lines_max, bytes_max): (usize, usize),
    out: &mut Vec<u8>,
) -> Listed {
    let start = out.len();
    let clock = &shard.clock;
    let mut lines = 0;
    let next = shard.store.walk_segment(from, |item| {
        let before = out.len();
        match list {
            List::Metadump(compat) => listing::push_metadump_line(clock, &item, compat, out),
            List::Mgdump => listing::push_mgdump_line(&item, out),
            List::Cachedump => listing::push_cachedump_line(clock, &item, out),
            List::Connections => debug_assert!(false, "items only"),
        }
        let pushed = out.len() > before;
        if out.len() - start > bytes_max {
            out.truncate(before);
            return false;
        }
        lines += usize::from(pushed);
        lines < lines_max
    });
    Listed { next, lines }
}
