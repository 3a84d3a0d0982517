//! The thread that sweeps out of memory what was not used.
//!
//! A page on flash is sealed: it is encrypted under its superpage's key, which only this process
//! has, and a page that flash returns flipped, out of date or from elsewhere is told from what was
//! written. Pages keep their place on flash, and neighbours are written at once.

use super::buffers::Buffers;
use super::file::DATA_AT_BYTES;
use super::residence::{OnWay, PIECE_PAGES, Residence};
use super::tier::{OnRing, Tier, TieredSuperpage, neighbours, page_of, version_of};
use crate::memory::given::Paged;
use farpool_disk::{Ended, Ring};
use farpool_kernel::monotonic_ns;
use farpool_policy::{Bucket, RateLimit};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, exactly};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Writes to flash under way at most: enough to keep it busy, few enough that reads, which clients
/// wait for, are not long behind them.
const WRITES: usize = 8;
/// How long the sweep rests when it has found nothing in a whole round: all pages are being sent,
/// written or were just used.
const REST: Duration = Duration::from_millis(1);
/// How long the sweep rests after a write that failed, and at most after several.
const FAILED_REST: Duration = Duration::from_millis(10);
const FAILED_REST_LIMIT: Duration = Duration::from_secs(1);
/// Pieces of a superpage.
const PIECES: u32 = PAGES_PER_SUPERPAGE / PIECE_PAGES;
/// Longest sleep with nothing to do.
const SLEEP: Duration = Duration::from_secs(1);

/// Everything that the sweep needs.
pub(crate) struct Engine {
    tier: Arc<Tier>,
    ring: Ring,
    next_token: u64,
    leaves: HashMap<u64, OnRing>,
    buffers: Buffers,
    hand: Hand,
    /// Bytes that may be written in a second.
    write_limit: RateLimit,
    bucket: Bucket,
    /// When the sweep goes on, after it had to rest.
    rests_until: Option<Instant>,
    failed_rest: Duration,
}

/// The piece that the sweep looks at next.
struct Hand {
    superpage: u32,
    piece: u32,
}

/// What a sweep came to.
enum SweepEnd {
    /// Enough is free, or on its way to be.
    Enough,
    /// As many writes are under way as may be.
    Busy,
    /// Nothing was found, or nothing may be written for so long.
    Rest(Duration),
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("tier", &self.tier).finish_non_exhaustive()
    }
}

impl Engine {
    pub(super) fn new(tier: Arc<Tier>, ring: Ring, write_limit: RateLimit) -> Engine {
        Engine {
            tier,
            ring,
            next_token: 0,
            leaves: HashMap::new(),
            buffers: Buffers::default(),
            hand: Hand { superpage: 0, piece: 0 },
            write_limit,
            bucket: Bucket::new(),
            rests_until: None,
            failed_rest: FAILED_REST,
        }
    }

    /// Serves until the tier ends.
    pub(crate) fn run(mut self) {
        let mut ended = Vec::new();
        while !self.tier.is_ending.load(Ordering::Acquire) {
            let wait = self.sweep_when_wanted();
            self.ring.submit();
            self.tier.room.wait_for_bell(Some(self.ring.bell()), wait);
            self.ring.poll(&mut ended);
            ended.drain(..).for_each(|it| self.end(it));
        }
    }

    /// A write has completed.
    fn end(&mut self, it: Ended) {
        if let Some(OnRing { superpage, pages }) = self.leaves.remove(&it.token) {
            self.end_leave(&superpage, &pages, it.is_ok);
        }
        self.buffers.put(it.pages);
    }

    /// Sweeps if that is wanted. Returns how long there is nothing to do unless a request ends or
    /// comes.
    fn sweep_when_wanted(&mut self) -> Duration {
        let now = Instant::now();
        if let Some(until) = self.rests_until
            && now < until
        {
            return until - now;
        }
        self.rests_until = None;
        self.tell_hidden_lines();
        match self.sweep() {
            SweepEnd::Enough => {
                // Nothing has to be written now; the next write shows how flash is.
                self.tier.is_failing.store(false, Ordering::Release);
                if self.tier.room.end_sweep() { SLEEP } else { REST }
            }
            SweepEnd::Busy => SLEEP,
            SweepEnd::Rest(time) => {
                self.rests_until = Some(now + time);
                time
            }
        }
    }

    fn tell_hidden_lines(&self) {
        if let Some((more, seconds)) = self.tier.log.more(self.tier.started.elapsed()) {
            tracing::error!("flash failed {more} more times in the last {seconds} s");
        }
    }

    fn sweep(&mut self) -> SweepEnd {
        let pieces = self.tier.superpages.count() * PIECES;
        let mut looked_at = 0;
        let mut leaving: u64 = self.leaves.values().map(|it| it.pages.len() as u64).sum();
        loop {
            let wanted = self.tier.room.wanted_pages();
            if wanted <= leaving {
                let is_over = wanted == 0;
                return if is_over { SweepEnd::Enough } else { SweepEnd::Busy };
            }
            if self.leaves.len() >= WRITES {
                return SweepEnd::Busy;
            }
            // Twice: the first round may only find what was used.
            if looked_at > 2 * pieces {
                return SweepEnd::Rest(REST);
            }
            let piece_bytes = u64::from(PIECE_PAGES) * PAGE_BYTES as u64;
            let now_ns = monotonic_ns();
            let waits = self.bucket.take(piece_bytes, now_ns, &self.write_limit);
            let (pieces_seen, written) =
                self.sweep_piece(if waits.is_ok() { PIECE_PAGES as usize } else { 0 });
            if waits.is_ok() {
                let unused_bytes = piece_bytes - written * PAGE_BYTES as u64;
                self.bucket.give_back(unused_bytes, &self.write_limit);
            }
            leaving += written;
            looked_at += pieces_seen;
            if let Err(wait) = waits
                && looked_at > pieces
            {
                // Nothing is left that flash has already.
                return SweepEnd::Rest(Duration::from_nanos(wait.0).min(SLEEP).max(REST));
            }
        }
    }

    /// Sweeps the next piece, and moves the hand on. Returns how many pieces it has passed, and how
    /// many pages are to be written.
    fn sweep_piece(&mut self, may_write: usize) -> (u32, u64) {
        let Hand { superpage: number, piece } = self.hand;
        let Some(superpage) = self.tier.superpages.get(number) else {
            self.hand = Hand { superpage: (number + 1) % self.tier.superpages.count(), piece: 0 };
            return (PIECES - piece, 0);
        };
        let is_last = piece + 1 == PIECES;
        self.hand = match is_last {
            true => Hand { superpage: (number + 1) % self.tier.superpages.count(), piece: 0 },
            false => Hand { superpage: number, piece: piece + 1 },
        };
        let mut residence = superpage.residence();
        let swept = residence.sweep(piece, may_write);
        self.drop_memory(&superpage, &swept.dropped, residence);
        for run in neighbours(&swept.leaving) {
            self.write(&superpage, run);
        }
        (1, swept.leaving.len() as u64)
    }

    fn drop_memory(
        &self,
        superpage: &TieredSuperpage,
        runs: &[Range<u32>],
        residence: MutexGuard<'_, Residence>,
    ) {
        let dropped = superpage.drop_memory(runs);
        drop(residence);
        match dropped {
            Ok(pages) => self.tier.room.give_back(pages),
            // Their room stays taken, as their memory does.
            Err(error) => tracing::error!(%error, "memory cannot be given back"),
        }
    }

    /// Seals neighbouring pages and begins to write them.
    fn write(&mut self, superpage: &Arc<TieredSuperpage>, pages: &[OnWay]) {
        let Some(mut buffer) = self.buffers.take(pages.len()) else {
            self.end_leave(superpage, pages, false);
            return;
        };
        let count: u32 = exactly(pages.len());
        let range = pages[0].page..pages[0].page + count;
        // What a client writes meanwhile is garbled here: it is not leaving any more then.
        superpage
            .slice(&range)
            .read(|bytes| buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes));
        let mut sealed = pages.to_vec();
        for (index, it) in sealed.iter_mut().enumerate() {
            if let Some(page) = page_of(buffer.bytes_mut(), index) {
                it.tag = superpage.key().seal(version_of(it), page);
            }
        }
        self.next_token += 1;
        let token = self.next_token;
        self.ring.write(
            buffer,
            DATA_AT_BYTES + superpage.offset_bytes(range.start),
            pages.len(),
            token,
        );
        self.leaves.insert(token, OnRing { superpage: Arc::clone(superpage), pages: sealed });
    }

    fn end_leave(&mut self, superpage: &TieredSuperpage, pages: &[OnWay], is_written: bool) {
        let mut residence = superpage.residence();
        let dropped = residence.end_leave(pages, is_written);
        self.drop_memory(superpage, &dropped, residence);
        let was_failing = self.tier.is_failing.swap(!is_written, Ordering::AcqRel);
        if is_written {
            self.failed_rest = FAILED_REST;
            self.tier.counters.pages_written.fetch_add(pages.len() as u64, Ordering::Relaxed);
            if was_failing {
                tracing::info!("flash takes writes again");
            }
            return;
        }
        self.tier.counters.writes_failed.fetch_add(1, Ordering::Relaxed);
        self.rests_until = Some(Instant::now() + self.failed_rest);
        self.failed_rest = (self.failed_rest * 2).min(FAILED_REST_LIMIT);
        // Who waits for room is told that there is none.
        self.tier.room.wake_waiting();
        if self.tier.log.may_write(self.tier.started.elapsed()) {
            tracing::error!(
                "flash takes no writes: what is in memory stays there, and nothing more is lent"
            );
        }
    }
}
