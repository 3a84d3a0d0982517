//! The statistics of a run, read from its board.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use farpool_board::{
    BUCKET_COUNT, Board, BoardError, Counter, Header, ProcessState, Slot, quantile_ns,
};
use farpool_units::PAGE_BYTES_U64;

use crate::RunError;
use crate::unmovable::{Kind, Unmovable};
use crate::working_set::WorkingSet;

/// Counters of one process, or of all processes of a run together.
#[derive(Clone, Debug)]
pub struct ProcessStatistics {
    pub pid: u32,
    pub name: String,
    pub active: bool,
    pub counters: Vec<(&'static str, u64)>,
    /// Latencies of faults that needed a fetch, and of the others.
    pub fetch_latency: [u64; BUCKET_COUNT],
    pub other_latency: [u64; BUCKET_COUNT],
}

/// A run as a whole.
#[derive(Clone, Debug)]
pub struct RunStatistics {
    pub program: String,
    pub keeper_pid: u32,
    /// Local memory of the tree; where it is a share, the least it may be.
    pub limit_bytes: u64,
    /// That share in percent; 0 without one.
    pub local_percent: u32,
    pub blades: Vec<String>,
    pub processes: Vec<ProcessStatistics>,
    /// Sums over ended and living processes.
    pub total: ProcessStatistics,
    pub peak: Peak,
    /// Pages of processes without a pager that count against the limit.
    pub unpublished_pages: u64,
    /// Processes that cannot have a pager, and their pages.
    pub outside_processes: u32,
    pub outside_pages: u64,
    /// Local memory that would hold the tree's working set, if that does not fit now; in the final
    /// statistics the largest that did not.
    pub working_set: Option<WorkingSet>,
    /// What was resident and could not be moved at the keeper's last check.
    pub unmovable: Unmovable,
}

/// The highest values seen, summed over the tree.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peak {
    pub far_pages: u64,
    pub pager_pages: u64,
    pub buffer_pages: u64,
    /// Pages that count against the limit and cannot be far: files, the pager itself, stacks.
    pub fixed_pages: u64,
    /// The tree's own memory, local and far, without the pager's.
    pub held_pages: u64,
}

impl Peak {
    /// Takes the board's present values into account.
    pub fn observe(&mut self, board: &Board) {
        let sum = |counter| board.processes().map(|slot| slot.get(counter)).sum::<u64>();
        self.far_pages = self.far_pages.max(sum(Counter::FarPages));
        self.pager_pages = self.pager_pages.max(sum(Counter::PagerPages));
        self.buffer_pages = self.buffer_pages.max(sum(Counter::BufferPages));
        let counted = sum(Counter::ResidentPages) + sum(Counter::SharedPages);
        let held = counted + sum(Counter::FarPages);
        self.held_pages = self.held_pages.max(held.saturating_sub(sum(Counter::PagerPages)));
        let movable = sum(Counter::EvictablePages) + sum(Counter::BufferPages);
        // Before memory is registered nothing is known to be movable.
        if movable > 0 {
            self.fixed_pages = self.fixed_pages.max(counted.saturating_sub(movable));
        }
    }
}

/// Counters with their names in JSON and tables.
const COUNTERS: [(Counter, &str); 35] = [
    (Counter::Faults, "faults"),
    (Counter::ZeroFills, "zero_fills"),
    (Counter::PagesZeroed, "pages_zeroed"),
    (Counter::VictimHits, "victim_hits"),
    (Counter::DemandFetches, "demand_fetches"),
    (Counter::Prefetches, "prefetches"),
    (Counter::Evictions, "evictions"),
    (Counter::EvictedChunks, "evicted_chunks"),
    (Counter::PagesWritten, "pages_written"),
    (Counter::CleanDrops, "clean_drops"),
    (Counter::Refused, "refused"),
    (Counter::Lost, "lost"),
    (Counter::Overruns, "overruns"),
    (Counter::GiveUps, "give_ups"),
    (Counter::Rests, "rests"),
    (Counter::Standstills, "standstills"),
    (Counter::ResidentPages, "resident_pages"),
    (Counter::FarPages, "far_pages"),
    (Counter::EvictablePages, "evictable_pages"),
    (Counter::BufferPages, "buffer_pages"),
    (Counter::SharedPages, "shared_pages"),
    (Counter::PagerPages, "pager_pages"),
    (Counter::ElsewherePages, "elsewhere_pages"),
    (Counter::GrowingThreads, "growing_threads"),
    (Counter::StalledFetches, "stalled_fetches"),
    (Counter::FirstReturns, "first_returns"),
    (Counter::UsedAwayPages, "used_away_pages"),
    (Counter::SplitMappings, "split_mappings"),
    (Counter::PinnedPages, "pinned_pages"),
    (Counter::WithoutRoom, "without_room"),
    (Counter::DegradedSuperpages, "degraded_superpages"),
    (Counter::VerifiedPages, "verified_pages"),
    (Counter::DamagedPages, "damaged_pages"),
    (Counter::ReplacedCopies, "replaced_copies"),
    (Counter::HedgedReads, "hedged_reads"),
];

/// Reads a run's statistics from its board.
pub fn read_statistics(board_path: &Path) -> Result<RunStatistics, BoardError> {
    let board = Board::open(board_path, false)?;
    let mut peak = Peak::default();
    peak.observe(&board);
    Ok(collect(&board, &ProcessStatistics::empty(), peak))
}

/// Opens the file for the final statistics before the program starts: a mistake in its name must
/// not cost the run its statistics.
pub fn create_file(path: &Path) -> Result<std::fs::File, RunError> {
    std::fs::File::create(path)
        .map_err(|error| RunError::Statistics { path: path.to_owned(), error })
}

/// Sums up a board. `gone` holds what processes had counted before their slots were freed.
pub fn collect(board: &Board, gone: &ProcessStatistics, peak: Peak) -> RunStatistics {
    let header = board.header();
    let settings = header.settings();
    let processes: Vec<ProcessStatistics> = board.processes().map(ProcessStatistics::of).collect();
    let mut total = gone.clone();
    processes.iter().for_each(|process| total.add(process));
    RunStatistics {
        program: settings.program,
        keeper_pid: header.keeper_pid.load(Relaxed),
        limit_bytes: settings.limit_bytes,
        local_percent: settings.local_percent,
        blades: settings.blades.into_iter().map(|blade| blade.address).collect(),
        processes,
        total,
        peak,
        unpublished_pages: header.unpublished_pages.load(Relaxed),
        outside_processes: header.outside_processes.load(Relaxed),
        outside_pages: header.outside_pages.load(Relaxed),
        working_set: working_set(header),
        unmovable: unmovable(header),
    }
}

fn working_set(header: &Header) -> Option<WorkingSet> {
    let is_guess = header.working_set_is_guess.load(Relaxed) != 0;
    let pages = header.working_set_pages.load(Relaxed);
    (pages > 0).then_some(WorkingSet { pages, is_guess })
}

fn unmovable(header: &Header) -> Unmovable {
    let mut unmovable = Unmovable::default();
    for kind in Kind::ALL {
        let pages = header.unmovable_pages[kind as usize].load(Relaxed);
        unmovable.set(kind, pages * PAGE_BYTES_U64);
    }
    unmovable
}

impl ProcessStatistics {
    pub fn empty() -> ProcessStatistics {
        ProcessStatistics {
            pid: 0,
            name: String::new(),
            active: false,
            counters: COUNTERS.iter().map(|(_, name)| (*name, 0)).collect(),
            fetch_latency: [0; BUCKET_COUNT],
            other_latency: [0; BUCKET_COUNT],
        }
    }

    pub fn of(slot: &Slot) -> ProcessStatistics {
        let mut statistics = ProcessStatistics {
            pid: slot.pid.load(Relaxed),
            name: slot.name(),
            active: slot.state() == ProcessState::Active,
            counters: COUNTERS.iter().map(|(counter, name)| (*name, slot.get(*counter))).collect(),
            ..ProcessStatistics::empty()
        };
        slot.fetch_latency.add_to(&mut statistics.fetch_latency);
        slot.other_latency.add_to(&mut statistics.other_latency);
        statistics
    }

    /// The statistics of an ended process: only counters that grow are kept, gauges are zeroed.
    pub fn ended(mut self) -> ProcessStatistics {
        for ((counter, _), (_, value)) in COUNTERS.iter().zip(&mut self.counters) {
            if counter.is_gauge() {
                *value = 0;
            }
        }
        self
    }

    pub fn add(&mut self, other: &ProcessStatistics) {
        self.active |= other.active;
        for ((_, sum), (_, value)) in self.counters.iter_mut().zip(&other.counters) {
            *sum += value;
        }
        let latencies = self.fetch_latency.iter_mut().zip(&other.fetch_latency);
        latencies.for_each(|(sum, value)| *sum += value);
        let latencies = self.other_latency.iter_mut().zip(&other.other_latency);
        latencies.for_each(|(sum, value)| *sum += value);
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    }

    /// Pages in local memory that count against the limit: files and shared memory, too.
    pub fn local_pages(&self) -> u64 {
        self.counter("resident_pages") + self.counter("shared_pages")
    }

    /// Those of them that stay whatever the limit: pinned, stacks, files, the pager itself. Not
    /// known before memory is registered.
    pub fn fixed_pages(&self) -> Option<u64> {
        let movable = self.counter("evictable_pages") + self.counter("buffer_pages");
        (movable > 0).then(|| self.local_pages().saturating_sub(movable))
    }

    pub fn to_json(&self) -> serde_json::Value {
        let mut object = serde_json::Map::new();
        object.insert("pid".into(), self.pid.into());
        object.insert("name".into(), self.name.clone().into());
        object.insert("active".into(), self.active.into());
        for (name, value) in &self.counters {
            object.insert((*name).into(), (*value).into());
        }
        for (name, sums) in [("fetch", &self.fetch_latency), ("other", &self.other_latency)] {
            for (quantile, fraction) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
                let value = quantile_ns(sums, fraction);
                object.insert(format!("{name}_{quantile}_ns"), value.into());
            }
        }
        object.into()
    }
}

impl RunStatistics {
    /// Local memory of the tree.
    pub fn local_bytes(&self) -> u64 {
        (self.total.local_pages() + self.unpublished_pages) * PAGE_BYTES_U64
    }

    /// Far memory of the tree.
    pub fn far_bytes(&self) -> u64 {
        self.total.counter("far_pages") * PAGE_BYTES_U64
    }

    /// The present limit: a share is of what the tree holds, local and far.
    pub fn limit_now_bytes(&self) -> u64 {
        let held = (self.total.local_pages() + self.total.counter("far_pages")) * PAGE_BYTES_U64;
        self.limit_bytes.max(held / 100 * u64::from(self.local_percent))
    }

    fn unmovable_json(&self) -> serde_json::Value {
        let kinds = Kind::ALL.map(|kind| (kind.key().to_owned(), self.unmovable.get(kind).into()));
        serde_json::Value::Object(kinds.into_iter().collect())
    }

    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "program": self.program,
            "keeper_pid": self.keeper_pid,
            "limit_bytes": self.limit_bytes,
            "local_percent": self.local_percent,
            "limit_now_bytes": self.limit_now_bytes(),
            "local_bytes": self.local_bytes(),
            "fixed_now_bytes": self.total.fixed_pages().map(|pages| pages * PAGE_BYTES_U64),
            "working_set_bytes": self.working_set.map(|it| it.pages * PAGE_BYTES_U64),
            "working_set_is_guess": self.working_set.map(|it| it.is_guess),
            "pinned_bytes": self.total.counter("pinned_pages") * PAGE_BYTES_U64,
            "unmovable_bytes": self.unmovable_json(),
            "outside_processes": self.outside_processes,
            "outside_bytes": self.outside_pages * PAGE_BYTES_U64,
            "blades": self.blades,
            "far_pages_peak": self.peak.far_pages,
            "peak_bytes": self.peak.held_pages * PAGE_BYTES_U64,
            "pager_bytes": self.peak.pager_pages * PAGE_BYTES_U64,
            "fixed_bytes": self.peak.fixed_pages * PAGE_BYTES_U64,
            "victim_buffer_bytes": self.peak.buffer_pages * PAGE_BYTES_U64,
            "total": self.total.to_json(),
            "processes": self.processes.iter().map(ProcessStatistics::to_json).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_ended_process_counted_stays_and_what_it_had_is_gone() {
        let mut process = ProcessStatistics::empty();
        process.counters.iter_mut().for_each(|(_, value)| *value = 7);
        let ended = process.ended();
        let of = |names: [&str; 4]| names.map(|name| ended.counter(name));
        let counted = ["faults", "verified_pages", "damaged_pages", "evictions"];
        assert_eq!(of(counted), [7; 4]);
        let had = ["far_pages", "without_room", "degraded_superpages", "growing_threads"];
        assert_eq!(of(had), [0; 4]);
    }
}
