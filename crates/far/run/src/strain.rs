//! Checks once a second whether the limit suffices for what the tree works on, and says so if not:
//! a working set that does not fit ([`crate::working_set`]), and memory that cannot be moved
//! ([`crate::unmovable`]).

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter, ProcessState};
use farpool_inject::Pid;
use farpool_units::PAGE_BYTES_U64;

use crate::Door;
use crate::holder::memory_folder;
use crate::say::say;
use crate::stats::{self, ProcessStatistics, RunStatistics};
use crate::unmovable::{Kind, Reach, Unmovable};
use crate::wards::shared_bytes;
use crate::working_set::{Estimator, Progress, SAMPLE_STEP, Sample, WorkingSet};

/// How often lists of mappings are read; more rarely if they are long: the kernel walks all page
/// tables for it.
const MAPPINGS_STEP: Duration = Duration::from_secs(2);
/// With this the keeper spends at most 1 % of a CPU on it.
const MAPPINGS_PART: u32 = 100;
const PAGES_PER_MIB: u64 = 256;

/// What a process had counted at the last sample.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    cpu: Duration,
    fetches: u64,
    fetch_wait: Duration,
}

/// See the module's description.
#[derive(Debug)]
pub struct Strain {
    began: Instant,
    looked: Instant,
    processes: HashMap<u32, Before>,
    estimator: Estimator,
    /// The limit when the working set was last seen not to fit.
    limit_bytes: u64,
    next_mappings: Instant,
    has_told_of_unmovable: bool,
    /// With the preloaded library, memory that a program keeps from its children stays.
    door: Door,
    is_quiet: bool,
    /// All pages are being brought back: what is unregistered now could be moved until then.
    has_stopped: bool,
}

impl Strain {
    pub fn new(door: Door, is_quiet: bool) -> Strain {
        let now = Instant::now();
        Strain {
            began: now,
            looked: now,
            processes: HashMap::new(),
            estimator: Estimator::default(),
            limit_bytes: 0,
            next_mappings: now + SAMPLE_STEP,
            has_told_of_unmovable: false,
            door,
            is_quiet,
            has_stopped: false,
        }
    }

    /// The programs are being left: nothing more is reported of them.
    pub fn stop(&mut self) {
        self.has_stopped = true;
    }

    /// Takes a sample if it is time. `gone` is what ended processes have counted, `common_bytes`
    /// shared memory of those that are not on the board.
    pub fn look(&mut self, board: &Board, gone: &ProcessStatistics, common_bytes: u64) {
        let now = Instant::now();
        let elapsed = now - self.looked;
        if elapsed < SAMPLE_STEP || self.has_stopped {
            return;
        }
        self.looked = now;
        let run = stats::collect(board, gone, stats::Peak::default());
        let is_stalled = self.take_progress(&run, elapsed);
        let seen = self.estimator.observe(&sample(&run, now - self.began, is_stalled));
        let header = board.header();
        if seen.begins_window {
            // 0 means that uses are not counted.
            header.use_epoch.store(header.use_epoch.load(Relaxed).wrapping_add(1).max(1), Relaxed);
        }
        let found = self.estimator.now();
        if found.is_some() {
            self.limit_bytes = run.limit_now_bytes();
        }
        header.working_set_is_guess.store(found.is_some_and(|it| it.is_guess).into(), Relaxed);
        header.working_set_pages.store(found.map_or(0, |it| it.pages), Relaxed);
        if let Some(found) = seen.tells.filter(|_| !self.is_quiet) {
            let limit_bytes = run.limit_now_bytes();
            let stays = stays(&run.unmovable, limit_bytes);
            say!("farpool: {}{stays}", told(found, limit_bytes, run.keeper_pid));
        }
        self.look_at_mappings(board, &run, common_bytes);
    }

    /// The largest working set that did not fit.
    pub fn largest(&self) -> Option<WorkingSet> {
        self.estimator.largest()
    }

    /// Says at the end of the run what limit would have been enough.
    pub fn conclude(&self) {
        if let Some(found) = self.largest().filter(|_| !self.is_quiet) {
            say!("farpool: {}", concluded(found, self.limit_bytes));
        }
    }

    /// True if any process has lost much of its time to fetches since the last sample.
    fn take_progress(&mut self, run: &RunStatistics, elapsed: Duration) -> bool {
        let mut is_stalled = false;
        let mut processes = HashMap::new();
        for process in run.processes.iter().filter(|process| process.active) {
            let now = Before {
                cpu: cpu_time(process.pid).unwrap_or_default(),
                fetches: process.counter("demand_fetches"),
                fetch_wait: Duration::from_nanos(farpool_board::total_ns(&process.fetch_latency)),
            };
            let before = self.processes.get(&process.pid).copied().unwrap_or_default();
            let progress = Progress {
                elapsed,
                cpu: now.cpu.saturating_sub(before.cpu),
                fetches: now.fetches.saturating_sub(before.fetches),
                fetch_wait: now.fetch_wait.saturating_sub(before.fetch_wait),
            };
            is_stalled |= progress.is_stalled();
            processes.insert(process.pid, now);
        }
        self.processes = processes;
        is_stalled
    }

    /// What the pager of a process moves out.
    fn reach(&self, pid: u32) -> Reach {
        let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
        if self.door == Door::Preload {
            Reach::Library
        } else if process.is_some_and(farpool_inject::may_execute) {
            Reach::Sidecar
        } else {
            Reach::Filtered
        }
    }

    /// Publishes what cannot be moved on the board, and says once if that alone passes the limit.
    fn look_at_mappings(&mut self, board: &Board, run: &RunStatistics, common_bytes: u64) {
        let began = Instant::now();
        if began < self.next_mappings {
            return;
        }
        // Of processes without an active pager only shared memory is known to stay.
        let natives = board.processes().filter(|slot| slot.state() != ProcessState::Active);
        let shared_bytes = natives
            .fold(common_bytes, |most, slot| most.max(shared_bytes(slot.pid.load(Relaxed), most)));
        let mut all = Unmovable::default();
        all.set(Kind::Shared, shared_bytes);
        for slot in board.processes().filter(|slot| slot.state() == ProcessState::Active) {
            // It may have ended, or may not be inspected.
            let pid = slot.pid.load(Relaxed);
            let path = memory_folder(pid).join("smaps");
            let Ok(smaps) = std::fs::read_to_string(path) else { continue };
            let reach = self.reach(pid);
            let pages = |counter| slot.get(counter) * PAGE_BYTES_U64;
            // The victim buffer is kept from children, too.
            let buffer_bytes =
                if reach == Reach::Library { pages(Counter::BufferPages) } else { 0 };
            let known_bytes = pages(Counter::PagerPages) + buffer_bytes;
            let mut own = Unmovable::of_process(&smaps, reach, known_bytes);
            own.set(Kind::Pager, own.get(Kind::Pager).saturating_sub(buffer_bytes));
            slot.set(Counter::PinnedPages, own.pinned_bytes() / PAGE_BYTES_U64);
            all.add(&own);
        }
        for kind in Kind::ALL {
            board.header().unmovable_pages[kind as usize]
                .store(all.get(kind) / PAGE_BYTES_U64, Relaxed);
        }
        let limit_bytes = run.limit_now_bytes();
        if all.staying_bytes(limit_bytes) > limit_bytes && !self.has_told_of_unmovable {
            self.has_told_of_unmovable = true;
            say!("farpool: {}", too_much(&all, limit_bytes));
        }
        let took = began.elapsed();
        self.next_mappings = began + MAPPINGS_STEP.max(took * MAPPINGS_PART);
    }
}

fn sample(run: &RunStatistics, at: Duration, is_stalled: bool) -> Sample {
    let count = |name| run.total.counter(name);
    let sum = |name| run.processes.iter().map(|process| process.counter(name)).sum::<u64>();
    // Files and shared memory are mostly the same ones in every process of a tree.
    let shared = run.processes.iter().map(|process| process.counter("shared_pages")).max();
    Sample {
        at,
        fetched_pages: count("demand_fetches") + count("prefetches"),
        first_returns: count("first_returns"),
        evicted_pages: count("evictions"),
        local_pages: sum("resident_pages") + shared.unwrap_or(0) + run.unpublished_pages,
        movable_pages: sum("evictable_pages"),
        used_away_pages: sum("used_away_pages"),
        away_pages: sum("far_pages") + sum("buffer_pages"),
        limit_pages: run.limit_now_bytes() / PAGE_BYTES_U64,
        is_stalled,
    }
}

fn told(found: WorkingSet, limit_bytes: u64, keeper_pid: u32) -> String {
    let (mib, about) = size_in_words(found);
    format!(
        "the program works on more memory than it has, and much of its time goes to pages that \
         come and go: {about} {mib} MiB of local memory would hold it, and it has {} MiB; give it \
         --local {mib}MiB, or now farpool limit {keeper_pid} {mib}MiB",
        limit_bytes >> 20
    )
}

/// Names what cannot be moved, where that takes most of the limit: it is what makes the rest come
/// and go. Empty otherwise.
fn stays(unmovable: &Unmovable, limit_bytes: u64) -> String {
    match unmovable.staying_bytes(limit_bytes) {
        bytes if bytes > limit_bytes / 2 => {
            format!("; {bytes} bytes of the program cannot be moved: {}", unmovable.text())
        }
        _ => String::new(),
    }
}

fn concluded(found: WorkingSet, limit_bytes: u64) -> String {
    let (mib, about) = size_in_words(found);
    format!(
        "the program worked on more memory than it had: {about} {mib} MiB of local memory would \
         have held it, and it had {} MiB; give it --local {mib}MiB the next time",
        limit_bytes >> 20
    )
}

fn size_in_words(found: WorkingSet) -> (u64, &'static str) {
    (found.pages.div_ceil(PAGES_PER_MIB), if found.is_guess { "perhaps" } else { "about" })
}

fn too_much(all: &Unmovable, limit_bytes: u64) -> String {
    format!(
        "{} bytes of the program cannot be moved, more than its limit of {limit_bytes}: {}; the \
         limit cannot hold, raise it (--local, farpool limit). This is said once",
        all.staying_bytes(limit_bytes),
        all.text()
    )
}

/// The CPU time of all threads of a process.
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = cpu_ticks(&stat)?;
    Some(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1)))
}

/// User and system time in a process's `stat`, in clock ticks. Pure.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // The name may hold anything; fields 14 and 15 are the twelfth and thirteenth after it.
    let (_, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_ascii_whitespace().skip(11).map(str::parse::<u64>);
    Some(fields.next()?.ok()? + fields.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_come_after_any_name() {
        let stat = "7 (a) 3 (x)) S 1 7 7 0 -1 4194304 1 2 3 4 150 25 5 6 20 0 1 0 99 1 2";
        assert_eq!(cpu_ticks(stat), Some(175));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
        assert!(cpu_time(std::process::id()).is_some());
    }

    #[test]
    fn the_line_names_the_size_and_what_to_do() {
        let found = WorkingSet { pages: 130 * 256 - 5, is_guess: false };
        let line = told(found, 64 << 20, 4711);
        assert!(line.contains("about 130 MiB") && line.contains("farpool limit 4711 130MiB"));
        let mut unmovable = Unmovable::default();
        unmovable.set(Kind::Other, 40 << 20);
        assert_eq!(stays(&unmovable, 80 << 20), "");
        assert!(stays(&unmovable, 64 << 20).contains("41943040 stacks, small and unregistered"));
        let line = concluded(WorkingSet { is_guess: true, ..found }, 64 << 20);
        assert!(line.contains("perhaps 130 MiB") && line.contains("had 64 MiB"));
    }
}
