//! The requests of the program's threads to the steward.
//!
//! A thread of the program must never hold a lock that a fault thread could need, nor change page
//! states itself: its very stack may be far. So it fills a cell here, wakes the steward, and sleeps
//! until the cell is done. Cells are fixed; nothing allocates.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};
use std::time::Duration;

use farpool_units::exactly;

use crate::sys;

/// Requests under way at a time; further threads wait for a cell.
const CELLS: usize = 64;

const FREE: u32 = 0;
const CLAIMED: u32 = 1;
const POSTED: u32 = 2;
const DONE: u32 = 3;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The range may be far from now on; it continues a mapping that ends at the third argument, if
    /// that is not 0.
    Add = 1,
    /// The range is about to be unmapped or mapped over: forget its pages.
    Remove = 2,
    /// `madvise` with an advice that discards (third argument).
    Discard = 3,
    /// Bring the range in and keep it (mlock).
    Pin = 4,
    Unpin = 5,
    /// Move the range's pages out soon (MADV_PAGEOUT, MADV_COLD).
    Retire = 6,
    /// Move the mapping to another address (mremap): third argument the address, fourth the new
    /// length, whose lowest bit says that the old range stays mapped.
    Carry = 7,
    /// A thread (first argument) is about to fork.
    PrepareFork = 8,
    /// The fork is over, in the parent.
    FinishFork = 9,
    /// Find the first part of the range that may be far. The only kind with an answer.
    FindFar = 10,
    /// Check whether a fork could share far memory with a child; fails with the errno for `fork` if
    /// not.
    MayFork = 11,
    /// A child of fork gets nothing of the range (MADV_DONTFORK), or all of it again if the third
    /// argument is 0.
    Unshare = 12,
    /// Hand the guest's memory over, see [`crate::life::guest`].
    GiveGuest = 13,
    /// Take a guest's memory over.
    BindGuest = 14,
}

impl Kind {
    fn from_number(number: u64) -> Option<Kind> {
        [
            Kind::Add,
            Kind::Remove,
            Kind::Discard,
            Kind::Pin,
            Kind::Unpin,
            Kind::Retire,
            Kind::Carry,
            Kind::PrepareFork,
            Kind::FinishFork,
            Kind::FindFar,
            Kind::MayFork,
            Kind::Unshare,
            Kind::GiveGuest,
            Kind::BindGuest,
        ]
        .into_iter()
        .find(|kind| *kind as u64 == number)
    }
}

/// One request, as the steward sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub kind: Kind,
    pub start: usize,
    pub end: usize,
    pub extra: usize,
    pub more: usize,
}

/// The steward's answer: a range, empty unless one was requested.
pub type Answer = (usize, usize);

#[derive(Debug)]
struct Cell {
    state: AtomicU32,
    /// 0, or the errno with which the program's call fails.
    errno: AtomicI32,
    kind: AtomicU64,
    words: [AtomicU64; 4],
}

/// The cells and the bell.
#[derive(Debug)]
pub struct Requests {
    bell: AtomicU32,
    /// Only for both ends of a fork: between them all other cells may be taken by threads that wait
    /// for its end.
    fork: Cell,
    cells: [Cell; CELLS],
}

impl Requests {
    #[allow(clippy::new_without_default)] // A const constructor for a static; Default cannot be const.
    pub const fn new() -> Requests {
        Requests {
            bell: AtomicU32::new(0),
            fork: Cell::new(),
            cells: [const { Cell::new() }; CELLS],
        }
    }

    /// Posts a request and waits for its completion. The error is an errno.
    pub fn call(&self, request: Request) -> Result<Answer, i32> {
        let cell = self.claim(request.kind);
        cell.kind.store(request.kind as u64, Relaxed);
        let values = [request.start, request.end, request.extra, request.more];
        cell.write(&values);
        cell.state.store(POSTED, Release);
        self.ring();
        loop {
            let state = cell.state.load(Acquire);
            if state == DONE {
                break;
            }
            sys::wait(&cell.state, state, None);
        }
        let errno = cell.errno.load(Relaxed);
        let answer = (cell.word(0), cell.word(1));
        cell.state.store(FREE, Release);
        if errno == 0 { Ok(answer) } else { Err(errno) }
    }

    /// Handles, on the steward, the posted requests that `accept` does not leave for later.
    pub fn serve(
        &self,
        mut accept: impl FnMut(Kind) -> bool,
        mut handle: impl FnMut(Request) -> Result<Answer, i32>,
    ) {
        for cell in self.all() {
            if cell.state.load(Acquire) != POSTED {
                continue;
            }
            if Kind::from_number(cell.kind.load(Relaxed)).is_some_and(|kind| !accept(kind)) {
                continue;
            }
            let word = |index| cell.word(index);
            let kind = Kind::from_number(cell.kind.load(Relaxed));
            let result = match kind {
                Some(kind) => {
                    let (start, end, extra, more) = (word(0), word(1), word(2), word(3));
                    handle(Request { kind, start, end, extra, more })
                }
                None => Err(libc::EINVAL),
            };
            cell.errno.store(result.err().unwrap_or(0), Relaxed);
            let (start, end) = result.unwrap_or_default();
            cell.write(&[start, end]);
            cell.state.store(DONE, Release);
            sys::wake(&cell.state);
        }
    }

    /// The bell's value, to be read before checking the cells.
    pub fn bell(&self) -> u32 {
        self.bell.load(SeqCst)
    }

    /// Waits for a request posted since `bell` was read, at most for `timeout`.
    pub fn wait(&self, bell: u32, timeout: Duration) {
        sys::wait(&self.bell, bell, Some(timeout));
    }

    /// Frees all cells in a forked child, which does not have its parent's threads.
    pub fn reset(&self) {
        for cell in self.all() {
            cell.state.store(FREE, SeqCst);
        }
    }

    /// Makes the steward check the cells again.
    pub fn ring(&self) {
        self.bell.fetch_add(1, SeqCst);
        sys::wake(&self.bell);
    }

    fn all(&self) -> impl Iterator<Item = &Cell> {
        std::iter::once(&self.fork).chain(&self.cells)
    }

    fn claim(&self, kind: Kind) -> &Cell {
        let usable = match kind {
            Kind::PrepareFork | Kind::FinishFork => std::slice::from_ref(&self.fork),
            _ => &self.cells,
        };
        loop {
            let free = usable
                .iter()
                .find(|cell| cell.state.compare_exchange(FREE, CLAIMED, Acquire, Relaxed).is_ok());
            if let Some(cell) = free {
                return cell;
            }
            rustix::thread::sched_yield();
        }
    }
}

impl Cell {
    const fn new() -> Cell {
        Cell {
            state: AtomicU32::new(FREE),
            errno: AtomicI32::new(0),
            kind: AtomicU64::new(0),
            words: [const { AtomicU64::new(0) }; 4],
        }
    }

    fn word(&self, index: usize) -> usize {
        exactly(self.words[index].load(Relaxed))
    }

    fn write(&self, values: &[usize]) {
        for (word, value) in self.words.iter().zip(values) {
            word.store(*value as u64, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn every_caller_gets_its_own_answer() {
        let requests: &'static Requests = Box::leak(Box::new(Requests::new()));
        let stop: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let steward = std::thread::spawn(move || {
            while !stop.load(SeqCst) {
                let bell = requests.bell();
                requests.serve(
                    |_| true,
                    |request| match request.start % 3 {
                        0 => Ok((request.start, request.end)),
                        _ => Err(i32::try_from(request.start).expect("small")),
                    },
                );
                requests.wait(bell, Duration::from_millis(50));
            }
        });
        let callers: Vec<_> = (0..100)
            .map(|number| {
                std::thread::spawn(move || {
                    let request =
                        Request { kind: Kind::Add, start: number, end: 7, extra: 0, more: 0 };
                    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
                    let expected =
                        if number % 3 == 0 { Ok((number, 7)) } else { Err(number as i32) };
                    assert_eq!(requests.call(request), expected);
                })
            })
            .collect();
        for caller in callers {
            caller.join().expect("caller");
        }
        stop.store(true, SeqCst);
        steward.join().expect("steward");
    }

    /// More threads than there are cells wait for the end of a fork; the forking thread's requests
    /// still get through.
    #[test]
    fn a_fork_ends_though_all_cells_are_taken() {
        let requests: &'static Requests = Box::leak(Box::new(Requests::new()));
        let request = |kind| Request { kind, start: 0, end: 0, extra: 0, more: 0 };
        let callers: Vec<_> = (0..2 * CELLS)
            .map(|_| std::thread::spawn(move || requests.call(request(Kind::Remove))))
            .collect();
        while requests.cells.iter().any(|cell| cell.state.load(SeqCst) != POSTED) {
            std::thread::yield_now();
        }
        let forker = std::thread::spawn(move || {
            requests.call(request(Kind::PrepareFork)).and(requests.call(request(Kind::FinishFork)))
        });
        let mut ends = 0;
        while ends < 2 {
            let bell = requests.bell();
            let is_end = |kind| matches!(kind, Kind::PrepareFork | Kind::FinishFork);
            requests.serve(is_end, |_| {
                ends += 1;
                Ok((0, 0))
            });
            requests.wait(bell, Duration::from_millis(50));
        }
        assert_eq!(forker.join().expect("forker"), Ok((0, 0)));
        let mut served = 0;
        while served < callers.len() {
            requests.serve(
                |_| true,
                |_| {
                    served += 1;
                    Ok((0, 0))
                },
            );
        }
        for caller in callers {
            assert_eq!(caller.join().expect("caller"), Ok((0, 0)));
        }
    }
}
