//! A child of the program that its parent's pager serves: a page that was far at the fork is
//! fetched when the child touches it.
//!
//! A thread of the child that touches a missing page waits, as in any program with a userfaultfd.
//! The child's changes of its own address space are reported as events: a page that it has dropped
//! stays dropped, one that it has moved arrives at the new place. While such an event waits to be
//! read the kernel refuses to fill pages (EAGAIN): the missing page at an address is then looked up
//! again.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_pool::PageError;
use farpool_uffd::{Change, Message, Outcome, Uffd};
use farpool_units::PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::remains::{Lacking, Remains};
use crate::abort::fail_closed;
use crate::life::fetcher::FETCHED_AT_ONCE;
use crate::space::birth;
use crate::space::layout::ORDER_TIME;
use crate::space::order::{self, Next, Owed, Place};
use crate::space::page::Phase;

/// How long a child has to exec before its pages are shared with it, unless it needs one of them
/// earlier.
const EXEC_TIME: Duration = Duration::from_millis(3);
const EXEC_STEP: Duration = Duration::from_micros(200);
/// How long a child may take to change its address space, until the event is there.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// Messages read at a time.
const MESSAGES: usize = 16;
/// The most pages fetched for one fault: the following ones, too, where a child reads in order.
pub const RUN_PAGES: usize = 16;

/// Counts calls that filled pages of any child.
static FILLS: AtomicU64 = AtomicU64::new(0);

/// The count, which changes while children are given pages.
pub fn fills() -> u64 {
    FILLS.load(Relaxed)
}

/// Where a child's pages come from.
pub trait Source {
    /// Fetches pages, at most `FETCHED_AT_ONCE`. Returns the bits of those that arrived.
    fn fetch(&mut self, pages: &[Lacking]) -> u64;
    /// Why one of the last pages did not arrive, if a blade's answer says so.
    fn failure(&self) -> Option<PageError>;
    /// The address of the fetched page with this number.
    fn address(&self, number: usize) -> usize;
}

/// See the module's description.
#[derive(Debug)]
pub struct Child {
    /// Its number for the keeper.
    pub number: u64,
    /// When it was first known.
    since: Instant,
    uffd: Uffd,
    inherited: Inheritance,
    is_gone: bool,
    /// Faults that were read but not served yet.
    postponed: Vec<usize>,
    /// Its changes whose order is not known yet, see [`crate::space::order`].
    changes: VecDeque<Change>,
    changes_wait_since: Option<Instant>,
    owed: Owed,
    /// Counts calls that filled pages.
    fills: u64,
    /// Its own children.
    born: Vec<Born>,
}

/// What a child lacks at its birth.
#[derive(Clone, Debug, Default)]
pub struct Inheritance {
    pub remains: Remains,
    /// Pages that no blade has, by their addresses at the fork.
    pub local: Arc<BTreeMap<usize, Box<[u8; PAGE_BYTES]>>>,
}

/// A child's child, before it is served: its number, its userfaultfd, and what it lacks.
pub type Born = (u64, OwnedFd, Inheritance);

impl Child {
    pub fn new(number: u64, uffd: OwnedFd, inherited: Inheritance) -> Child {
        if let Err(error) = rustix::fs::fcntl_setfl(&uffd, rustix::fs::OFlags::NONBLOCK) {
            fail_closed(&format!("a child's userfaultfd cannot be used: {error}"));
        }
        let uffd = Uffd::adopt(uffd);
        Child {
            number,
            since: Instant::now(),
            uffd,
            inherited,
            is_gone: false,
            postponed: Vec::new(),
            changes: VecDeque::new(),
            changes_wait_since: None,
            owed: Owed::default(),
            fills: 0,
            born: Vec::new(),
        }
    }

    /// Its userfaultfd. The child is not served any more then.
    pub fn into_descriptor(self) -> OwnedFd {
        self.uffd.into_descriptor()
    }

    /// Sets what it lacks, which is known only now; no message of it has been read before.
    pub fn inherit(&mut self, inherited: Inheritance) {
        self.inherited = inherited;
    }

    pub fn remains(&self) -> &Remains {
        &self.inherited.remains
    }

    /// How long it has been known.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether faults or changes were read that are not handled yet.
    pub fn is_waiting(&self) -> bool {
        !self.postponed.is_empty() || !self.changes.is_empty()
    }

    /// Whether it needs no other process any more.
    pub fn is_settled(&self) -> bool {
        self.is_gone || (self.inherited.remains.is_empty() && self.postponed.is_empty())
    }

    /// Whether nothing is left to do here before its own pager takes over.
    pub fn is_ready_to_leave(&self) -> bool {
        self.next_to_settle().is_none() && !self.is_waiting()
    }

    /// Takes its children that were born since the last call.
    pub fn take_born(&mut self) -> Vec<Born> {
        std::mem::take(&mut self.born)
    }

    /// Waits a moment for the child to exec or end. True if it has not.
    pub fn may_need_pages(&mut self) -> bool {
        let until = Instant::now() + EXEC_TIME;
        let step = Timespec { tv_sec: 0, tv_nsec: EXEC_STEP.subsec_nanos().into() };
        while Instant::now() < until {
            if self.look_whether_gone() {
                return false;
            }
            let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&step)).is_ok_and(|ready| ready > 0) {
                return true;
            }
        }
        true
    }

    /// Checks whether its address space is gone: it has ended, or runs another image.
    pub fn look_whether_gone(&mut self) -> bool {
        self.is_gone |= self.uffd.is_gone();
        self.is_gone
    }

    /// Answers the waiting faults, each with at most `run_pages`. Returns how many it answered.
    pub fn serve(&mut self, run_pages: usize, source: &mut impl Source) -> usize {
        self.read_messages();
        let mut served = 0;
        while let Some(address) = self.postponed.pop() {
            self.serve_fault(address, run_pages, source);
            served += 1;
            if self.is_gone || served >= MESSAGES {
                return served;
            }
            self.read_messages();
        }
        served
    }

    /// Gives it all pages that it lacks.
    pub fn finish(&mut self, source: &mut impl Source) {
        self.serve(RUN_PAGES, source);
        let next = |remains: &Remains| remains.next_moved().or_else(|| remains.next(0));
        while !self.is_gone
            && let Some((address, _)) = next(&self.inherited.remains)
        {
            self.fill(address, FETCHED_AT_ONCE, source);
        }
        self.serve(RUN_PAGES, source);
    }

    /// Gives it the pages that the pager that takes over could not find: those that it lacks
    /// elsewhere than at the fork, and those that no blade has.
    pub fn settle_special(&mut self, source: &mut impl Source) {
        while !self.is_gone
            && let Some(address) = self.next_to_settle()
        {
            self.fill(address, FETCHED_AT_ONCE, source);
        }
    }

    fn next_to_settle(&self) -> Option<usize> {
        let Inheritance { remains, local } = &self.inherited;
        let is_lacking = |address: &usize| remains.get(*address).is_some();
        let moved = remains.next_moved().map(|(address, _)| address);
        moved.or_else(|| local.keys().copied().find(is_lacking))
    }

    fn serve_fault(&mut self, address: usize, run_pages: usize, source: &mut impl Source) {
        if self.inherited.remains.get(address).is_some() {
            self.fill(address, run_pages, source);
            return;
        }
        let outcome = self.uffd.zero(address, PAGE_BYTES, true);
        self.count(outcome);
        match outcome.errno {
            // The page missing here may be another one once the event has been read.
            Some(libc::EAGAIN) => self.postpone(address),
            // Another thread was faster: the page is there, or its mapping has ended.
            Some(libc::EEXIST | libc::ENOENT) => {
                let _ = self.uffd.wake(address, PAGE_BYTES);
            }
            _ => self.check(address, outcome),
        }
    }

    /// Fetches the page that the child lacks at `address`, and following ones up to `most` in all,
    /// and copies them to it.
    fn fill(&mut self, address: usize, most: usize, source: &mut impl Source) {
        let places = (0..most).map(|number| address + number * PAGE_BYTES);
        let wanted: Vec<(usize, Lacking)> =
            places.map_while(|place| Some((place, self.inherited.remains.get(place)?))).collect();
        if let Some((_, first)) = wanted.first()
            && let Some(page) = self.inherited.local.clone().get(&first.source)
        {
            self.copy(address, page.as_ptr() as usize, *first);
            return;
        }
        let far: Vec<Lacking> = wanted
            .iter()
            .map_while(|(_, lacking)| self.is_on_blades(lacking).then_some(*lacking))
            .collect();
        if far.is_empty() {
            return self.poison(address);
        }
        let fetched = source.fetch(&far);
        for (number, (place, lacking)) in wanted.iter().take(far.len()).enumerate() {
            if fetched & (1 << number) == 0 {
                // The later ones are requested again.
                if number == 0 {
                    let why = source.failure().map(|error| format!(": {error}"));
                    let why = why.unwrap_or_default();
                    crate::sys::say(&format!("page {place:#x} of a child is lost{why}"));
                    self.poison(*place);
                }
                return;
            }
            if !self.copy(*place, source.address(number), *lacking) {
                return;
            }
        }
    }

    fn is_on_blades(&self, lacking: &Lacking) -> bool {
        lacking.state.phase() == Phase::Far && !self.inherited.local.contains_key(&lacking.source)
    }

    /// Copies a page to where the child lacks it. False: it does not lack it any more, or the child
    /// is changing its address space, and a fault there is served again.
    fn copy(&mut self, place: usize, bytes: usize, lacking: Lacking) -> bool {
        if self.inherited.remains.get(place) != Some(lacking) {
            return false;
        }
        let outcome = self.uffd.copy(place, bytes, PAGE_BYTES, true);
        self.count(outcome);
        if self.is_too_early(outcome) {
            self.postpone(place);
            return false;
        }
        self.check(place, outcome);
        self.inherited.remains.remove(place, place + PAGE_BYTES);
        true
    }

    /// Counts filled pages, which show that every change has been read, see [`Owed`].
    fn count(&mut self, outcome: Outcome) {
        let has_filled = u64::from(outcome.done_bytes > 0);
        self.fills += has_filled;
        FILLS.fetch_add(has_filled, Relaxed);
    }

    /// Puts a fault off until the child's current change is known.
    fn postpone(&mut self, address: usize) {
        self.read_messages();
        if !self.postponed.contains(&address) {
            self.postponed.push(address);
        }
        std::thread::yield_now();
    }

    /// Poisons a page that is lost: touching it is a SIGBUS.
    fn poison(&mut self, address: usize) {
        let outcome = self.until_settled(|uffd| uffd.poison(address, PAGE_BYTES));
        self.check(address, outcome);
        let _ = self.uffd.wake(address, PAGE_BYTES);
        self.inherited.remains.remove(address, address + PAGE_BYTES);
    }

    fn until_settled(&mut self, operation: impl Fn(&Uffd) -> Outcome) -> Outcome {
        let until = Instant::now() + SETTLE_TIME;
        while Instant::now() < until {
            let outcome = operation(&self.uffd);
            if !self.is_too_early(outcome) {
                return outcome;
            }
            self.read_messages();
            std::thread::yield_now();
        }
        fail_closed("a child's address space does not settle");
    }

    /// Whether a page could not be filled because the child is changing its address space, which
    /// has to be read first. The kernel says so (EAGAIN), except when its lookup begins before the
    /// change and finds no mapping after it (ENOENT): the page is not gone then, mremap has moved
    /// it.
    fn is_too_early(&self, outcome: Outcome) -> bool {
        match outcome.errno {
            Some(libc::EAGAIN) => true,
            Some(libc::ENOENT) => self.uffd.is_changing(),
            _ => false,
        }
    }

    /// Handles the outcome of a fill: the page was filled, or need not be, because its mapping is
    /// gone (ENOENT; MADV_DONTFORK) or it is present.
    fn check(&mut self, address: usize, outcome: Outcome) {
        match outcome.errno {
            None => {}
            Some(libc::EEXIST | libc::ENOENT) => {
                let _ = self.uffd.wake(address, PAGE_BYTES);
            }
            Some(libc::ESRCH) => self.is_gone = true,
            Some(errno) => fail_closed(&format!(
                "a child does not get its page {address:#x}: {}",
                std::io::Error::from_raw_os_error(errno)
            )),
        }
    }

    /// Reads the child's changes and the pages that it waits for.
    fn read_messages(&mut self) {
        while self.take_messages() {
            self.follow_changes(false);
        }
        let is_settled =
            !self.changes.is_empty() && (!self.uffd.is_changing() || self.have_changes_waited());
        self.follow_changes(is_settled);
    }

    /// Reads some messages, to be handled later. False: there are none.
    fn take_messages(&mut self) -> bool {
        let mut messages = [Message::default(); MESSAGES];
        let read = match self.uffd.read(&mut messages) {
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
            // A fork in it would stay unknown, and the child's own child would never be served.
            Err(error) => fail_closed(&format!("a child's userfaultfd cannot be read: {error}")),
        };
        for message in read {
            match message.change() {
                Some(change) => self.changes.push_back(change),
                None => self.postponed.extend(message.event().page_address),
            }
        }
        true
    }

    /// Whether the next change has waited so long that no change can have been overtaken.
    fn have_changes_waited(&mut self) -> bool {
        self.changes_wait_since.get_or_insert_with(Instant::now).elapsed() > ORDER_TIME
    }

    /// Applies the child's changes whose order is known. While it is not known the kernel fills no
    /// pages.
    fn follow_changes(&mut self, is_settled: bool) {
        loop {
            let remains = &self.inherited.remains;
            let look = |place: &Range<usize>| {
                if remains.lacks_in(place) { Place::Taken } else { Place::Free }
            };
            let mut next = order::next(&self.changes, look, false);
            if next == Next::Wait && is_settled {
                next = order::next(&self.changes, look, true);
            }
            let at = match next {
                Next::Nothing | Next::Wait => return,
                Next::Apply(at) => at,
                Next::Ambiguous => fail_closed(
                    "threads of a child have moved memory to one place at a time, and what came \
                     first is not known",
                ),
            };
            self.changes_wait_since = None;
            if let Some(change) = self.changes.remove(at) {
                self.follow(change);
            }
        }
    }

    fn follow(&mut self, change: Change) {
        match change {
            Change::Unmapped { start, end } if self.owed.takes(start, end, self.fills) => {}
            Change::Removed { start, end } | Change::Unmapped { start, end } => {
                self.inherited.remains.remove(start, end);
            }
            Change::Moved { from, to, bytes } => {
                self.owed.note(from, bytes, self.fills);
                self.inherited.remains.follow_move(from, to, bytes);
            }
            Change::Forked { descriptor } => {
                // SAFETY: the kernel made the descriptor for this process when the event was read.
                let uffd = unsafe { OwnedFd::from_raw_fd(descriptor) };
                self.born.push((birth::announce(&uffd), uffd, self.inherited.clone()));
            }
        }
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}
