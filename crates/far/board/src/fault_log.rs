//! The faults of a run in order, for capturing them (`farpool trace --via fault`).
//!
//! A bounded ring with many writers, the fault threads of all processes, and one reader, the
//! keeper. Writers take no lock and never wait: with the ring full a fault is counted as missed and
//! served all the same. Each entry carries the number of its turn, which says whose it is (D.
//! Vyukov's bounded queue): `turn = position` is free for the writer of that position, `position +
//! 1` is written, `position + ENTRIES` is free for the next lap.
//!
//! A writer that dies between taking a position and writing it leaves a hole; the reader skips it
//! ([`FaultLog::pass_over`]). Only the trace is at risk here, no memory.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Most faults that can wait for the reader: a tenth of a second at the highest rate of a machine.
/// It takes 8 MiB of addresses; memory only as far as it is used.
pub const FAULT_ENTRIES: usize = 1 << 18;
/// The lowest bit of a page's word.
const WRITE_BIT: u64 = 1;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The page's address divided by its bytes.
    pub page_number: u64,
    /// The program wanted to write.
    pub is_write: bool,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    pub pid: u32,
    pub thread: u32,
}

#[repr(C)]
#[derive(Debug)]
struct Entry {
    turn: AtomicU64,
    page: AtomicU64,
    time_ns: AtomicU64,
    pid: AtomicU32,
    thread: AtomicU32,
}

const _: () = assert!(size_of::<Entry>() == 32);

/// See the module's description. All zeros is a log that is off and empty.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct FaultLog {
    is_on: AtomicU32,
    /// Position of the next fault. On a cache line of its own: all writers change it.
    head: Line,
    /// Position of the reader.
    tail: Line,
    missed: Line,
    entries: [Entry; FAULT_ENTRIES],
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Line(AtomicU64);

impl FaultLog {
    /// Turns the log on. The keeper does this before the program starts.
    pub fn switch_on(&self) {
        for (position, entry) in (0..).zip(&self.entries) {
            entry.turn.store(position, Relaxed);
        }
        self.is_on.store(1, Release);
    }

    /// True if faults are to be logged.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed) != 0
    }

    /// Faults that found the ring full.
    pub fn missed(&self) -> u64 {
        self.missed.0.load(Relaxed)
    }

    /// Writes a fault, or counts it as missed.
    pub fn write(&self, fault: Fault) {
        let mut position = self.head.0.load(Relaxed);
        let entry = loop {
            let entry = &self.entries[place(position)];
            let turn = entry.turn.load(Acquire);
            if turn < position {
                self.missed.0.fetch_add(1, Relaxed);
                return;
            }
            let next = position + 1;
            let taken = turn == position
                && self.head.0.compare_exchange_weak(position, next, Relaxed, Relaxed).is_ok();
            if taken {
                break entry;
            }
            position = self.head.0.load(Relaxed);
        };
        entry.page.store(fault.page_number << 1 | u64::from(fault.is_write), Relaxed);
        entry.time_ns.store(fault.time_ns, Relaxed);
        entry.pid.store(fault.pid, Relaxed);
        entry.thread.store(fault.thread, Relaxed);
        entry.turn.store(position + 1, Release);
    }

    /// The next fault, if it is written. One reader only.
    pub fn read(&self) -> Option<Fault> {
        let position = self.tail.0.load(Relaxed);
        let entry = &self.entries[place(position)];
        if entry.turn.load(Acquire) != position + 1 {
            return None;
        }
        let page = entry.page.load(Relaxed);
        let fault = Fault {
            page_number: page >> 1,
            is_write: page & WRITE_BIT != 0,
            time_ns: entry.time_ns.load(Relaxed),
            pid: entry.pid.load(Relaxed),
            thread: entry.thread.load(Relaxed),
        };
        self.free(entry, position);
        Some(fault)
    }

    /// True if the next fault's position was taken but is not written: for long only if its writer
    /// died.
    pub fn has_hole(&self) -> bool {
        let position = self.tail.0.load(Relaxed);
        position < self.head.0.load(Relaxed)
            && self.entries[place(position)].turn.load(Acquire) == position
    }

    /// Skips the hole at the reader's position, counting it as missed. Only for dead writers.
    pub fn pass_over(&self) {
        let position = self.tail.0.load(Relaxed);
        if self.has_hole() {
            self.missed.0.fetch_add(1, Relaxed);
            self.free(&self.entries[place(position)], position);
        }
    }

    fn free(&self, entry: &Entry, position: u64) {
        entry.turn.store(position + FAULT_ENTRIES as u64, Release);
        self.tail.0.store(position + 1, Relaxed);
    }
}

#[allow(clippy::cast_possible_truncation)] // Masked to the ring's size.
fn place(position: u64) -> usize {
    position as usize & (FAULT_ENTRIES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Box<FaultLog> {
        // SAFETY: zeros are a valid log: all its fields are atomics.
        let log: Box<FaultLog> = unsafe { Box::new_zeroed().assume_init() };
        log.switch_on();
        log
    }

    fn fault(number: u64) -> Fault {
        Fault {
            page_number: number,
            is_write: number.is_multiple_of(3),
            time_ns: number,
            pid: 1,
            thread: 2,
        }
    }

    #[test]
    fn faults_come_out_as_they_went_in_lap_after_lap() {
        let log = log();
        for number in 0..FAULT_ENTRIES as u64 * 2 + 5 {
            log.write(fault(number));
            assert_eq!(log.read(), Some(fault(number)));
        }
        assert_eq!((log.read(), log.missed()), (None, 0));
    }

    #[test]
    fn a_full_ring_misses_and_says_so() {
        let log = log();
        for number in 0..FAULT_ENTRIES as u64 + 7 {
            log.write(fault(number));
        }
        assert_eq!((log.read(), log.missed()), (Some(fault(0)), 7));
        log.write(fault(1 << 40));
        let last = std::iter::from_fn(|| log.read()).last();
        assert_eq!((last, log.missed()), (Some(fault(1 << 40)), 7));
    }

    #[test]
    fn a_writer_that_died_leaves_a_hole_that_is_passed_over() {
        let log = log();
        log.head.0.store(1, Relaxed);
        log.write(fault(9));
        assert!(log.read().is_none() && log.has_hole());
        log.pass_over();
        assert_eq!((log.read(), log.missed(), log.has_hole()), (Some(fault(9)), 1, false));
        log.pass_over();
        assert_eq!(log.missed(), 1, "nothing is passed over that is no hole");
    }

    #[test]
    fn many_writers_lose_nothing_and_keep_their_order() {
        const WRITERS: u32 = 4;
        const EACH: u64 = 200_000;
        let log = log();
        let mut next = [0; WRITERS as usize];
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let log = &log;
                scope.spawn(move || {
                    for number in 0..EACH {
                        log.write(Fault { thread: writer, ..fault(number) });
                    }
                });
            }
            let mut seen = 0;
            while seen + log.missed() < u64::from(WRITERS) * EACH {
                let Some(read) = log.read() else { continue };
                let expected: &mut u64 = &mut next[read.thread as usize];
                assert!(read.page_number >= *expected && read.time_ns == read.page_number);
                *expected = read.page_number + 1;
                seen += 1;
            }
        });
        assert!(log.read().is_none() && !log.has_hole());
    }
}
