//! The trace of a run's page faults: what the pager sees of a program (`farpool trace --via
//! fault`).
//!
//! The pager's threads write each fault to the board's log; a thread of the keeper empties it into
//! a trace. A reader that cannot keep up loses faults, which the trace's notes count: the program
//! never waits for it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_board::{Board, Fault};
use farpool_trace::{Access, Clock, PROCESS_SHIFT, Record, TraceError, TraceInfo, TraceWriter};
use farpool_units::{PAGE_BYTES_U64, exactly};

/// The pause when the log was empty: the ring holds many times what a machine logs in that time.
const PAUSE: Duration = Duration::from_millis(1);
/// An entry that was begun this long ago and is not written has lost its writer.
const HOLE_PATIENCE: Duration = Duration::from_secs(1);

/// What a trace of faults holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultTrace {
    /// Faults in the trace.
    pub records: u64,
    /// Threads that had faults.
    pub threads: u64,
    /// What is missing from the trace, for people.
    pub notes: Vec<String>,
}

/// A trace that is about to be recorded: its file can be written.
#[derive(Debug)]
pub(crate) struct FaultRecorder {
    writer: TraceWriter,
    numbers: Numbers,
    /// False if the program ran before.
    is_whole: bool,
}

/// Numbers of processes and threads in order of appearance, and when each thread last faulted.
#[derive(Debug, Default)]
struct Numbers {
    processes: HashMap<u32, u64>,
    threads: HashMap<(u32, u32), (u32, u64)>,
}

/// A trace that is being recorded.
pub(crate) struct Recording {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Result<FaultTrace, TraceError>>,
}

impl FaultRecorder {
    /// `program` is its name and arguments; `is_whole` if it is recorded from its beginning.
    pub(crate) fn create(
        program: Vec<String>,
        is_whole: bool,
        out: &Path,
    ) -> Result<Self, TraceError> {
        let mut info = TraceInfo::new("pager faults", PAGE_BYTES_U64, Clock::Nanoseconds);
        info.program = program;
        Ok(Self { writer: TraceWriter::create(out, info)?, numbers: Numbers::default(), is_whole })
    }

    /// Empties the log, which has been on since before there was a pager.
    pub(crate) fn start(self, board: &Arc<Board>) -> Recording {
        let ends = Arc::new(AtomicBool::new(false));
        let (board, seen) = (Arc::clone(board), Arc::clone(&ends));
        let thread = std::thread::spawn(move || self.record(&board, &seen));
        Recording { ends, thread }
    }

    fn record(mut self, board: &Board, ends: &AtomicBool) -> Result<FaultTrace, TraceError> {
        let log = board.fault_log();
        let mut hole_since: Option<Instant> = None;
        loop {
            // Read before the log is emptied, so that all that was written before the end is read.
            let is_over = ends.load(Acquire);
            while let Some(fault) = log.read() {
                self.writer.push(self.numbers.record(fault))?;
                hole_since = None;
            }
            if log.has_hole() {
                let since = *hole_since.get_or_insert_with(Instant::now);
                if is_over || since.elapsed() > HOLE_PATIENCE {
                    log.pass_over();
                    continue;
                }
            } else if is_over {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        self.finish(log.missed())
    }

    fn finish(mut self, missed: u64) -> Result<FaultTrace, TraceError> {
        let mut notes = vec![
            "page faults only: what was resident when it was used is not in the trace".to_owned(),
        ];
        if !self.is_whole {
            notes.push("what was used before Farpool was attached is not in the trace".to_owned());
        }
        if self.numbers.processes.len() > 1 {
            let processes = self.numbers.processes.len();
            notes.push(format!(
                "{processes} processes; page numbers carry theirs above bit {PROCESS_SHIFT}"
            ));
        }
        if missed > 0 {
            notes.push(format!(
                "{missed} faults are missing: they came faster than they were written"
            ));
        }
        if self.writer.records() == 0 {
            notes.push("the program fitted into its local memory: no fault was seen".to_owned());
        }
        self.writer.info_mut().notes.clone_from(&notes);
        let threads = self.numbers.threads.len() as u64;
        Ok(FaultTrace { records: self.writer.finish()?, threads, notes })
    }
}

impl Recording {
    /// The program and its descendants have ended, or were left: reads the rest.
    pub(crate) fn finish(self) -> Result<FaultTrace, TraceError> {
        self.ends.store(true, Release);
        let died = |_| TraceError::Capture("the recorder of faults died".to_owned());
        self.thread.join().map_err(died)?
    }
}

impl Numbers {
    fn record(&mut self, fault: Fault) -> Record {
        let Fault { page_number, is_write, time_ns, pid, thread } = fault;
        let next = self.processes.len() as u64;
        let process = *self.processes.entry(pid).or_insert(next);
        let next = exactly(self.threads.len());
        let (number, last_ns) = self.threads.entry((pid, thread)).or_insert((next, time_ns));
        // Two fault threads may write in another order than that of their clocks.
        let ticks = time_ns.saturating_sub(*last_ns);
        *last_ns = time_ns.max(*last_ns);
        let access = if is_write { Access::Write } else { Access::Read };
        Record { block: page_number | process << PROCESS_SHIFT, ticks, access, thread: *number }
    }
}
