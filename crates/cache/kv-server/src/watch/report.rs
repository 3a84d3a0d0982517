//! The shards' reports, and the replies made from the reports of all shards.

use farpool_kv_protocol::CommandCounts;
use farpool_kv_protocol::binary::Head;
use farpool_kv_store::StoreCounts;
use farpool_kv_tier::log::{Log, LogCounts, Medium};

macro_rules! add_fields {
    ($into:expr, $from:expr, $($field:ident),+ $(,)?) => { $($into.$field += $from.$field;)+ };
}

/// The figures of one thread and its shard.
#[derive(Debug, Default, Clone, Copy)]
pub struct ShardReport {
    pub commands: CommandCounts,
    pub store: StoreCounts,
    pub thread: ThreadCounts,
    pub items: u64,
    /// For how long the oldest items have been in memory.
    pub age_s: u64,
    pub item_bytes: u64,
    pub index_bytes: u64,
    /// Items for which the index's buckets had no room.
    pub overflow_entries: u64,
    /// Memory of the policy's own state, if the store does not keep it.
    pub policy_bytes: u64,
    pub used_bytes: u64,
    /// Memory for requests that are not complete and replies that are not sent.
    pub held_bytes: u64,
    pub limit_bytes: u64,
    pub limit_was_set: bool,
    /// Values that clients read where they lie, and the segments pinned for that.
    pub leases_held: u64,
    pub leased_bytes: u64,
    /// Items in tiers below memory.
    pub lower_items: u64,
    /// How many of those are on flash.
    pub flash_items: u64,
    pub far: TierReport,
    pub flash: TierReport,
    /// Requests answered as misses because a tier took too long.
    pub late: u64,
    /// Items whose far memory was lost or given back.
    pub reclaim: ReclaimCounts,
}

/// What became of items whose far memory had to be given back, or was lost.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimCounts {
    pub dropped: u64,
    /// Moved to flash.
    pub spilled: u64,
    /// Their memory was lost without notice.
    pub lost: u64,
}

/// The outcomes of reads in one tier.
#[derive(Debug, Default, Clone, Copy)]
pub struct TierAnswers {
    /// Reads answered without promoting the item.
    pub served: u64,
    pub promoted: u64,
}

/// The figures of a shard's tier below memory.
#[derive(Debug, Default, Clone, Copy)]
pub struct TierReport {
    pub capacity_bytes: u64,
    pub served: u64,
    pub promoted: u64,
    pub counts: LogCounts,
    /// Shards whose device failed so often that nothing more is written to it.
    pub broken: u64,
}

impl TierReport {
    pub(crate) fn new<M: Medium>(log: Option<&Log<M>>, answers: TierAnswers) -> Self {
        log.map_or_else(Self::default, |log| Self {
            capacity_bytes: log.capacity_bytes(),
            served: answers.served,
            promoted: answers.promoted,
            counts: *log.counts(),
            broken: u64::from(log.is_broken()),
        })
    }

    fn add(&mut self, other: &Self) {
        add_fields!(self, other, capacity_bytes, served, promoted, broken);
        let reads_at_once = self.counts.reads_at_once.max(other.counts.reads_at_once);
        self.counts.reads_at_once = reads_at_once;
        add_fields!(
            self.counts,
            other.counts,
            records_written,
            bytes_written,
            reads,
            reads_failed,
            reads_gone,
            refused,
            over_budget,
            kept,
            dropped,
            zones_lost,
            moved,
        );
    }
}

/// A thread's counts for its connections.
#[derive(Debug, Default, Clone, Copy)]
pub struct ThreadCounts {
    pub connections: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub yields: u64,
    pub idle_kicks: u64,
    pub auth_commands: u64,
    pub auth_errors: u64,
    /// TLS sessions that did not begin.
    pub tls_handshake_errors: u64,
    /// Clients that had to give up a request, or their connection, because bytes on their way took
    /// too much memory.
    pub read_buf_oom: u64,
    /// Those of them that did not read their replies, or too slowly.
    pub response_obj_oom: u64,
    pub flush_commands: u64,
    /// Requests passed on to another shard.
    pub forwarded: u64,
    /// Events written for watchers, and those that did not fit into the journal.
    pub journal_written: u64,
    pub journal_dropped: u64,
    /// Lines sent to watchers, and lines that they were too slow for.
    pub watcher_sent: u64,
    pub watcher_skipped: u64,
}

impl ThreadCounts {
    fn add(&mut self, other: &Self) {
        add_fields!(
            self,
            other,
            connections,
            bytes_read,
            bytes_written,
            yields,
            idle_kicks,
            auth_commands,
            auth_errors,
            tls_handshake_errors,
            read_buf_oom,
            response_obj_oom,
            flush_commands,
            forwarded,
            journal_written,
            journal_dropped,
            watcher_sent,
            watcher_skipped,
        );
    }
}

impl ShardReport {
    /// Adds another shard's figures to these.
    pub fn add(&mut self, other: &Self) {
        add_fields!(
            self.commands,
            other.commands,
            cmd_get,
            cmd_set,
            cmd_touch,
            cmd_meta,
            get_hits,
            get_misses,
            delete_hits,
            delete_misses,
            incr_hits,
            incr_misses,
            decr_hits,
            decr_misses,
            cas_hits,
            cas_misses,
            cas_badval,
            touch_hits,
            touch_misses,
            store_too_large,
            store_no_memory,
        );
        add_fields!(
            self.store,
            other.store,
            evictions,
            evicted_unfetched,
            evicted_nonzero,
            expired_unfetched,
            expiry_rounds,
            expiry_checked,
            expiry_reclaimed,
            get_expired,
            get_flushed,
            reclaimed,
            moved,
            total_items,
            leases,
            leases_refused,
        );
        self.thread.add(&other.thread);
        add_fields!(self, other, items, item_bytes, index_bytes, used_bytes, limit_bytes);
        add_fields!(self, other, held_bytes, overflow_entries);
        add_fields!(self, other, policy_bytes, leases_held, leased_bytes);
        add_fields!(self, other, lower_items, flash_items, late);
        add_fields!(self.reclaim, other.reclaim, dropped, spilled, lost);
        self.age_s = self.age_s.max(other.age_s);
        self.store.evicted_idle_s = self.store.evicted_idle_s.max(other.store.evicted_idle_s);
        self.far.add(&other.far);
        self.flash.add(&other.flash);
        self.limit_was_set &= other.limit_was_set;
    }
}

/// The purpose of a gathered reply.
#[derive(Debug, Clone)]
pub enum GatherFor {
    /// A fixed line, once all shards have done it.
    Line { line: &'static str, quiet: bool },
    /// `cache_memlimit`.
    MemoryLimit { quiet: bool },
    /// `stats`.
    Stats,
    /// `stats items`.
    Items,
    /// `stats slabs`.
    Slabs,
    /// `stats detail dump`.
    Prefixes,
    /// `stats quotas`.
    Quotas,
    /// Any of these, for a client of the binary protocol.
    Binary { head: Head, what: Box<GatherFor> },
}

/// A reply to which all shards contribute.
#[derive(Debug, Clone)]
pub struct Gather {
    pub what: GatherFor,
    /// How many shards have not answered yet.
    pub left: usize,
    pub sum: ShardReport,
}

impl Gather {
    #[must_use]
    pub fn new(what: GatherFor, shards: usize) -> Self {
        Self {
            what,
            left: shards,
            sum: ShardReport { limit_was_set: true, ..ShardReport::default() },
        }
    }

    /// Takes one shard's contribution. True if it was the last.
    pub fn take(&mut self, report: &ShardReport) -> bool {
        self.sum.add(report);
        self.left -= 1;
        self.left == 0
    }
}
