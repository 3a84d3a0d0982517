//! How much local memory this process may still take: its part of the one limit of the tree.
//!
//! The kernel's own count of resident pages is the truth; the pager does not keep a second one.
//! Between two readings of it, threads spend from an allowance.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};
use std::time::Duration;

use farpool_board::{Board, Counter, ProcessState, Slot};
use farpool_policy::reserve::{self, Standing, Work};
use farpool_units::{PAGE_BYTES, at_most};

use crate::shared::turn::Turn;
use crate::sys;

/// The processes whose turn it is not keep this part of the limit free for the process whose turn
/// it is.
const TURN_ROOM_PART: i64 = 32;

/// Resident pages of a process as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    pub anonymous_pages: u64,
    /// Pages of files and shared memory.
    pub shared_pages: u64,
}

/// The tree's memory, summed over the board.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    pub resident_pages: i64,
    pub far_pages: i64,
    pub evictable_pages: i64,
    pub active_processes: i64,
    /// Threads of native processes that grow.
    pub growing_threads: i64,
    /// Processes that do little but fetch, and their recent fetches.
    pub stalled_processes: i64,
    pub stalled_fetches: i64,
    /// Pages of files and shared memory, counted as at most half of the limit: programs need some
    /// memory besides their code, and the kernel can drop most of these pages by itself.
    pub shared_pages: i64,
}

/// A reading of the kernel's count, which includes everything spent until then.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    spent_pages: i64,
}

/// The spending side.
#[derive(Debug)]
pub struct Budget {
    statm: OwnedFd,
    /// None if the kernel does not let the process read it.
    smaps: Option<OwnedFd>,
    /// Anonymous pages that are counted in other processes, see [`Budget::look_at_shared`].
    elsewhere_pages: AtomicU64,
    /// Pages that can be taken without a fault that the pager sees; they count as taken.
    unseen_pages: AtomicU64,
    /// Running totals of the pages granted and spent: neither is reset, so that nothing spent
    /// during a refresh of the allowance is forgotten.
    granted_pages: AtomicI64,
    spent_pages: AtomicI64,
    low_pages: AtomicI64,
    kick: AtomicU32,
}

impl Budget {
    pub fn new() -> Result<Budget, std::io::Error> {
        Ok(Budget {
            statm: open_statm()?,
            smaps: open_of_process("/proc/self/smaps_rollup").ok(),
            elsewhere_pages: AtomicU64::new(0),
            unseen_pages: AtomicU64::new(0),
            granted_pages: AtomicI64::new(0),
            spent_pages: AtomicI64::new(0),
            low_pages: AtomicI64::new(reserve::low_mark_pages(0, 1)),
            kick: AtomicU32::new(0),
        })
    }

    /// Takes pages from the allowance if it has enough.
    pub fn try_spend(&self, pages: i64) -> bool {
        let before = self.spent_pages.fetch_add(pages, Relaxed);
        let enough = self.granted_pages.load(Relaxed) - before >= pages;
        if !enough {
            self.spent_pages.fetch_sub(pages, Relaxed);
        }
        enough
    }

    /// Takes pages even without an allowance; the evictor makes up for it.
    pub fn overdraw(&self, pages: i64) {
        self.spent_pages.fetch_add(pages, Relaxed);
    }

    /// Returns pages that were not used.
    pub fn refund(&self, pages: i64) {
        self.spent_pages.fetch_sub(pages, Relaxed);
    }

    pub fn allowance(&self) -> i64 {
        self.granted_pages.load(Relaxed) - self.spent_pages.load(Relaxed)
    }

    pub fn low_mark(&self) -> i64 {
        self.low_pages.load(Relaxed)
    }

    /// Wakes the evictor if the allowance or the victim buffer is low.
    pub fn kick_if_low(&self, free_frames: i64) {
        if reserve::wants_eviction(self.allowance(), self.low_mark(), free_frames) {
            self.kick();
        }
    }

    pub fn kick(&self) {
        if self.kick.swap(1, SeqCst) == 0 {
            sys::wake(&self.kick);
        }
    }

    /// Waits for a kick, at most for `timeout`.
    pub fn wait_for_kick(&self, timeout: Duration) {
        if self.kick.swap(0, SeqCst) == 0 {
            sys::wait(&self.kick, 0, Some(timeout));
            self.kick.store(0, SeqCst);
        }
    }

    /// Reads the kernel's count and publishes it.
    pub fn look(&self, slot: &Slot) -> Look {
        let spent_pages = self.spent_pages.load(Relaxed);
        let mut resident = read_resident(&self.statm).unwrap_or_default();
        let elsewhere = self.elsewhere_pages.load(Relaxed);
        slot.set(Counter::ElsewherePages, elsewhere);
        resident.anonymous_pages = resident.anonymous_pages.saturating_sub(elsewhere);
        resident.anonymous_pages += self.unseen_pages.load(Relaxed);
        publish(slot, resident);
        Look { spent_pages }
    }

    /// Sets the allowance anew and returns the evictor's work. `look`: the last reading.
    pub fn refresh(
        &self,
        look: Look,
        board: &Board,
        slot: &Slot,
        free_frames: i64,
        turn: Turn,
    ) -> Work {
        let tree = Tree::read(board);
        let limit = limit_pages(board, &tree);
        let low = reserve::low_mark_pages(limit, tree.active_processes);
        self.low_pages.store(low, Relaxed);
        let mine = pages_of(slot.get(Counter::EvictablePages));
        let (allowance, work) = match turn {
            Turn::Nobodys => decide(limit, low, &tree, mine, free_frames),
            Turn::Mine => decide_in_turn(limit, &tree, mine, free_frames),
            Turn::Anothers(holder) => {
                let theirs = evictable_pages_of(board, holder);
                decide_out_of_turn(limit, &tree, mine, theirs, free_frames)
            }
        };
        self.granted_pages.store(look.spent_pages + allowance, Relaxed);
        work
    }

    /// Sets how many pages may be taken unseen from now on.
    pub fn set_unseen(&self, pages: u64) {
        self.unseen_pages.store(pages, Relaxed);
    }

    /// Recounts the anonymous pages that are counted in the other processes that a fork shares them
    /// with. Otherwise twenty children of one parent would count pages that none of them has
    /// written to twenty times. The kernel walks all page tables for it, and pages may be written
    /// to at any time afterwards, so this is done now and then for small processes; others,
    /// `counts` false, count in full.
    pub fn look_at_shared(&self, counts: bool) {
        let read = |smaps| if counts { read_elsewhere_pages(smaps) } else { None };
        self.elsewhere_pages.store(self.smaps.as_ref().and_then(read).unwrap_or(0), Relaxed);
    }
}

/// Splits the free pages, or the missing ones, among the active processes. Pure.
pub fn decide(limit: i64, low: i64, tree: &Tree, mine: i64, free_frames: i64) -> (i64, Work) {
    let standing = Standing {
        headroom_pages: limit - tree.counted_pages(limit),
        active_processes: tree.active_processes,
        evictable_pages: tree.evictable_pages,
        mine_pages: mine,
        free_frames,
    };
    reserve::decide(low, &standing)
}

/// As [`decide`], for the process whose turn it is: it gets everything that is free, and gives
/// nothing up unless no other process can. Pure.
fn decide_in_turn(limit: i64, tree: &Tree, mine: i64, free_frames: i64) -> (i64, Work) {
    let headroom = limit - tree.counted_pages(limit);
    let missing = (-headroom).max(0);
    let from_me = if tree.evictable_pages > mine { 0 } else { missing };
    let evict_pages = (from_me - free_frames).clamp(0, reserve::spare_pages(mine));
    let release_pages = from_me.min(free_frames + evict_pages);
    (headroom.max(0), Work { evict_pages, release_pages })
}

/// As [`decide`], for the other processes: together they keep pages free for the one whose turn it
/// is, which could give up `theirs` and does not. Pure.
fn decide_out_of_turn(
    limit: i64,
    tree: &Tree,
    mine: i64,
    theirs: i64,
    free_frames: i64,
) -> (i64, Work) {
    let headroom = limit - tree.counted_pages(limit);
    let missing = (limit / TURN_ROOM_PART - headroom).max(0);
    let evictable = (tree.evictable_pages - theirs).max(mine).max(1);
    let my_part = (missing * mine + evictable - 1) / evictable;
    let evict_pages = (my_part - free_frames).clamp(0, mine.max(0));
    let release_pages = my_part.min(free_frames + evict_pages);
    (0, Work { evict_pages, release_pages })
}

fn evictable_pages_of(board: &Board, pid: u32) -> i64 {
    let slot = board.processes().find(|slot| slot.pid.load(Relaxed) == pid);
    slot.map_or(0, |slot| pages_of(slot.get(Counter::EvictablePages)))
}

/// The current limit in pages: the fixed one, or the share of all the tree's memory.
pub fn limit_pages(board: &Board, tree: &Tree) -> i64 {
    let header = board.header();
    let fixed = pages_of(header.limit_bytes.load(Relaxed) / PAGE_BYTES as u64);
    let percent = i64::from(header.local_percent.load(Relaxed));
    let all = tree.resident_pages + tree.shared_pages + tree.far_pages;
    fixed.max(all * percent / 100)
}

impl Tree {
    pub fn read(board: &Board) -> Tree {
        let mut tree = Tree {
            resident_pages: pages_of(board.header().unpublished_pages.load(Relaxed)),
            ..Tree::default()
        };
        let mut shared = 0;
        for slot in board.processes() {
            tree.resident_pages += pages_of(slot.get(Counter::ResidentPages));
            tree.far_pages += pages_of(slot.get(Counter::FarPages));
            tree.evictable_pages += pages_of(slot.get(Counter::EvictablePages));
            let stalled_fetches = pages_of(slot.get(Counter::StalledFetches));
            tree.stalled_processes += i64::from(stalled_fetches > 0);
            tree.stalled_fetches += stalled_fetches;
            match slot.state() {
                ProcessState::Active => tree.active_processes += 1,
                ProcessState::Native | ProcessState::Outside => {
                    tree.growing_threads += pages_of(slot.get(Counter::GrowingThreads));
                }
            }
            // Files and shared memory are mostly the same in every process of a tree.
            shared = shared.max(pages_of(slot.get(Counter::SharedPages)));
        }
        tree.shared_pages = shared;
        tree
    }

    /// The pages that count against a limit.
    pub fn counted_pages(&self, limit: i64) -> i64 {
        self.resident_pages + self.shared_pages.min(limit / 2)
    }
}

/// Writes a process's resident pages on the board.
pub fn publish(slot: &Slot, resident: Resident) {
    slot.set(Counter::ResidentPages, resident.anonymous_pages);
    slot.set(Counter::SharedPages, resident.shared_pages);
}

/// Opens the calling process's statm.
pub fn open_statm() -> Result<OwnedFd, std::io::Error> {
    open_of_process("/proc/self/statm")
}

fn open_of_process(path: &str) -> Result<OwnedFd, std::io::Error> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The anonymous pages of an open smaps_rollup minus the process's proportional share of them.
fn read_elsewhere_pages(smaps: &OwnedFd) -> Option<u64> {
    let mut buffer = [0_u8; 2048];
    let length = rustix::io::pread(smaps, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..length]).ok()?;
    let kib = |name: &str| -> Option<u64> {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix(" kB")?.parse().ok()
    };
    let elsewhere = kib("Anonymous:")?.saturating_sub(kib("Pss_Anon:")?);
    Some(elsewhere * 1024 / PAGE_BYTES as u64)
}

/// Reads an open statm, which begins with the total, resident and shared pages.
pub fn read_resident(statm: &OwnedFd) -> Option<Resident> {
    let mut buffer = [0_u8; 128];
    let length = rustix::io::pread(statm, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..length]).ok()?;
    let mut fields = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Resident { anonymous_pages: resident.saturating_sub(shared), shared_pages: shared })
}

/// A count of the board, bounded so that a few of them can be added.
fn pages_of(pages: u64) -> i64 {
    at_most::<i64, _>(pages).min(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tree(resident_pages: i64, evictable_pages: i64, active_processes: i64) -> Tree {
        Tree { resident_pages, evictable_pages, active_processes, ..Tree::default() }
    }

    #[test]
    fn with_room_nothing_is_evicted() {
        let (allowance, work) = decide(10_000, 128, &tree(2_000, 1_500, 1), 1_500, 0);
        assert_eq!((allowance, work), (8_000, Work::default()));
    }

    #[test]
    fn at_the_limit_the_allowance_is_filled_from_evictions() {
        let (allowance, work) = decide(10_000, 128, &tree(10_000, 9_000, 1), 9_000, 10);
        assert_eq!((allowance, work.evict_pages, work.release_pages), (0, 384 + 128 - 10, 384));
    }

    #[test]
    fn above_the_limit_frames_go_back_to_the_kernel() {
        let (_, work) = decide(10_000, 128, &tree(10_500, 9_000, 1), 9_000, 300);
        assert_eq!(work.release_pages, 500 + 384);
        assert_eq!(work.evict_pages, 884 - 300 + 128);
    }

    #[test]
    fn pages_of_this_process_alone_are_not_elsewhere() {
        let smaps = open_of_process("/proc/self/smaps_rollup").expect("smaps_rollup");
        let resident = read_resident(&open_statm().expect("statm")).expect("fields");
        // The test's own pages are shared with no process, or with the few that started it.
        let elsewhere = read_elsewhere_pages(&smaps).expect("fields");
        assert!(elsewhere < resident.anonymous_pages / 2, "{elsewhere} of {resident:?}");
    }

    #[test]
    fn in_turn_the_others_make_room() {
        let tree = tree(10_000, 6_000, 5);
        assert_eq!(decide_in_turn(10_000, &tree, 2_000, 0), (0, Work::default()));
        let (allowance, work) = decide_out_of_turn(10_000, &tree, 1_000, 2_000, 10);
        assert_eq!((allowance, work.evict_pages, work.release_pages), (0, 78 - 10, 78));
        // If no other process can give anything up, it is as if it were alone.
        let (_, work) = decide_in_turn(9_000, &tree, 6_000, 0);
        assert_eq!((work.evict_pages, work.release_pages), (1_000, 1_000));
    }

    #[test]
    fn statm_is_read() {
        let resident = read_resident(&open_statm().expect("statm")).expect("fields");
        assert!(resident.anonymous_pages > 10 && resident.shared_pages > 10);
    }

    proptest! {
        /// Together the processes release at least the missing pages, if they can, and never
        /// promise more than there are.
        #[test]
        fn shares_cover_what_is_missing(
            limit in 1_000_i64..100_000, over in -50_000_i64..50_000,
            evictable in proptest::collection::vec(1_i64..50_000, 1..8),
        ) {
            let total: i64 = evictable.iter().sum();
            let count = i64::try_from(evictable.len()).expect("few");
            let tree = tree((limit + over).max(0), total, count);
            let decided: Vec<(i64, Work)> =
                evictable.iter().map(|mine| decide(limit, 128, &tree, *mine, 0)).collect();
            let released: i64 = decided.iter().map(|(_, work)| work.release_pages).sum();
            let allowed: i64 = decided.iter().map(|(allowance, _)| allowance).sum();
            let kept = 256 * count;
            prop_assert!(released >= (tree.resident_pages - limit).min(total) - kept);
            prop_assert!(allowed <= (limit - tree.resident_pages).max(0));
        }
    }
}
