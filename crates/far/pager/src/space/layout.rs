//! Follows the program's changes of its address space, reported by userfaultfd's events, while
//! pages are on their way.
//!
//! A thread of the program that unmaps, moves or drops registered memory, or forks, waits until its
//! event is read, and then continues at once. From then on the pager's knowledge of the range is
//! out of date. So:
//! * pages are moved or copied into the program or out of it under a shared hold of the turnstile,
//!   one hold for each kernel call; messages are read under an exclusive hold, which takes
//!   precedence over new shared ones;
//! * a change that was read is queued under the same hold, and the steward applies it to the page
//!   states;
//! * while a change waits to be applied nothing is moved ([`Layout::enter`] refuses), and no fault
//!   is served.
//!
//! Between the call itself and the reading of its event the kernel refuses moves to every range
//! registered with the same userfaultfd with EAGAIN (`mmap_changing`): hence trays are registered
//! with the program's userfaultfd.
//!
//! Where no events are requested (the preloaded library intercepts the calls) entering costs
//! nothing.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use farpool_kernel::{lock, read_lock, write_lock};
use farpool_uffd::{Change, Message, Outcome, Uffd};
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::space::birth;
use crate::space::order::{self, Next, Place};
use crate::sys;

/// Capacity, without allocating, for changes and for postponed faults: each of the program's
/// threads waits for one of either at a time.
const ROOM: usize = 4096;
/// Messages read at a time by [`Layout::take_in`].
const MESSAGES: usize = 8;

/// How long the next change waits for an unread one. A thread that has freed a place reports it
/// within microseconds, or when it gets a processor again. In a program whose threads change its
/// memory all the time there may never be a moment at which everything is read.
pub const ORDER_TIME: Duration = Duration::from_secs(1);

/// The longest wait for a moment of rest. A change is read after some 10 us, and much later only if
/// its thread has no processor.
const REST_TIME: Duration = Duration::from_millis(1);

/// The refusal of a step while a change waits to be applied.
pub const CANCELLED: Outcome = Outcome { done_bytes: 0, errno: Some(libc::ECANCELED) };

/// See the module's description.
#[derive(Debug)]
pub struct Layout {
    /// Whether events were requested.
    follows: bool,
    /// Held shared by threads that move pages, for one kernel call; exclusively by threads that
    /// read messages.
    turnstile: RwLock<()>,
    /// Locked after the turnstile, by threads that hold it exclusively or only read what is queued.
    state: Mutex<State>,
    /// Changes that were read but not applied yet.
    unapplied: AtomicU32,
    /// Children whose fork was read and that have not got their pages yet. Until they have, this
    /// process must not end.
    children: AtomicU32,
    /// Counts calls that moved or filled pages. Each shows that at that moment every change was
    /// applied.
    moves: AtomicU64,
    /// Counts applied changes; fault threads wait on it.
    applied: AtomicU32,
    /// Counts rings: for queued changes and whatever else the steward has to do. The steward waits
    /// on it.
    bell: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    changes: VecDeque<Change>,
    /// Whether one of them was read while the program had several threads. The changes of one
    /// thread are reported in order, and a second thread that it starts afterwards can only act
    /// later.
    are_of_several: bool,
    /// The directory of the program's threads.
    threads: Option<OwnedFd>,
    /// Registered memory of the pager's own: changes there are no news.
    ignored: Range<usize>,
    /// Since when the next change has waited for an unread one.
    waits_since: Option<Instant>,
}

/// Permission to move pages, as long as it is held.
#[derive(Debug)]
pub struct Entry<'a> {
    _shared: Option<RwLockReadGuard<'a, ()>>,
}

impl Layout {
    /// `ignored`: the victim buffer.
    pub fn new(follows: bool, ignored: (usize, usize)) -> Layout {
        let room = if follows { ROOM } else { 0 };
        let state = State {
            changes: VecDeque::with_capacity(room),
            are_of_several: false,
            // Without it the program is treated as having several threads.
            threads: if follows { sys::open_own_tasks().ok() } else { None },
            ignored: ignored.0..ignored.0 + ignored.1,
            waits_since: None,
        };
        Layout {
            follows,
            turnstile: RwLock::new(()),
            state: Mutex::new(state),
            unapplied: AtomicU32::new(0),
            moves: AtomicU64::new(0),
            children: AtomicU32::new(0),
            applied: AtomicU32::new(0),
            bell: AtomicU32::new(0),
        }
    }

    /// Whether changes come as events.
    pub fn follows(&self) -> bool {
        self.follows
    }

    /// Permission to move pages; None while a change waits to be applied. To be held for one kernel
    /// call.
    pub fn enter(&self) -> Option<Entry<'_>> {
        if !self.follows {
            return Some(Entry { _shared: None });
        }
        let shared = self.pass();
        (self.unapplied.load(SeqCst) == 0).then_some(Entry { _shared: Some(shared) })
    }

    /// One step that moves or fills pages of the program, or its refusal ([`CANCELLED`]).
    pub fn step(&self, operation: impl FnOnce() -> Outcome) -> Outcome {
        let Some(_entry) = self.enter() else { return CANCELLED };
        self.counted(operation())
    }

    fn counted(&self, outcome: Outcome) -> Outcome {
        if self.follows && outcome.done_bytes > 0 {
            self.moves.fetch_add(1, SeqCst);
        }
        outcome
    }

    /// A count that changes whenever pages were moved or filled, see `space::order::Owed`.
    pub fn moves(&self) -> u64 {
        self.moves.load(SeqCst)
    }

    /// As [`Layout::step`], for the steward while it applies a change: refused if a later queued
    /// change concerns the page at `address`. A move is reported twice: what it has left has always
    /// gone by then.
    pub fn step_of_steward(&self, address: usize, operation: impl FnOnce() -> Outcome) -> Outcome {
        if !self.follows {
            return operation();
        }
        let _shared = self.pass();
        // Messages are queued under an exclusive hold: nothing is added while this one lasts.
        let (is_changed, is_last) = {
            let changes = &self.lock().changes;
            (changes.iter().any(|change| concerns(*change, address)), changes.is_empty())
        };
        match (is_changed, is_last) {
            (true, _) => CANCELLED,
            (false, true) => self.counted(operation()),
            // Everything that was done has been read, but not all of it is applied.
            (false, false) => operation(),
        }
    }

    /// Reads the waiting messages and queues the changes among them. Returns how many messages
    /// `buffer` holds. `give_up` is asked to apply at once that a range is dropped, if no change
    /// waits to be applied first; it must not wait for anything.
    pub fn read(
        &self,
        uffd: &Uffd,
        buffer: &mut [Message],
        give_up: impl Fn(&Range<usize>) -> bool,
    ) -> Result<usize, std::io::Error> {
        if !self.follows {
            return uffd.read(buffer).map(<[Message]>::len);
        }
        let _alone = self.close();
        let mut state = self.lock();
        let count = uffd.read(buffer)?.len();
        self.queue_changes(&mut state, &buffer[..count], give_up);
        Ok(count)
    }

    /// Reads messages for a thread that cannot continue before the pending change is read. The
    /// threads whose faults are read with it touch their pages again, so that a thread that sleeps
    /// until there is a fault is woken by them. `give_up`: see [`Layout::read`].
    pub fn take_in(&self, uffd: &Uffd, give_up: impl Fn(&Range<usize>) -> bool) {
        if !self.follows {
            return;
        }
        let mut messages = [Message::default(); MESSAGES];
        let _alone = self.close();
        let mut state = self.lock();
        // EAGAIN: there is nothing yet. The next reader meets any other error.
        if let Ok(messages) = uffd.read(&mut messages) {
            self.queue_changes(&mut state, messages, give_up);
            for address in messages.iter().filter_map(|message| message.event().page_address) {
                // It fails where the mapping has gone, which wakes the threads that wait there.
                let _ = uffd.wake(address, PAGE_BYTES);
            }
        }
    }

    fn queue_changes(
        &self,
        state: &mut State,
        messages: &[Message],
        give_up: impl Fn(&Range<usize>) -> bool,
    ) {
        let before = state.changes.len();
        for change in messages.iter().filter_map(Message::change) {
            let is_done = match change {
                Change::Removed { start, end } => {
                    state.is_own(change) || (!self.is_behind() && give_up(&(start..end)))
                }
                _ => false,
            };
            if !is_done {
                if let Change::Forked { descriptor } = change {
                    self.children.fetch_add(1, SeqCst);
                    birth::announce_unapplied(descriptor);
                }
                state.queue(change);
                self.unapplied.fetch_add(1, SeqCst);
            }
        }
        if state.changes.len() > before {
            self.ring();
        }
    }

    /// Whether a queued change moves a mapping to this address.
    pub fn is_moved_to(&self, address: usize) -> bool {
        self.lock().changes.iter().any(|change| change.moves_to(address))
    }

    /// Whether a change waits to be applied.
    pub fn is_behind(&self) -> bool {
        self.unapplied.load(SeqCst) != 0
    }

    /// Whether there is a moment, now or very soon, at which every change of the program is
    /// applied.
    pub fn is_at_rest(&self, uffd: &Uffd) -> bool {
        let until = Instant::now() + REST_TIME;
        while uffd.is_changing() {
            if self.is_behind() || Instant::now() > until {
                return false;
            }
            std::thread::yield_now();
        }
        self.is_still(uffd)
    }

    /// Whether every change of the program is applied now. A change that was just read is not
    /// queued yet, so no thread may be about to queue one.
    pub fn is_still(&self, uffd: &Uffd) -> bool {
        let _shared = self.pass();
        !uffd.is_changing() && !self.is_behind()
    }

    /// Waits until a change was applied, at most for `timeout`, unless none waits.
    pub fn wait_for_steward(&self, timeout: Duration) {
        let applied = self.applied.load(SeqCst);
        if self.is_behind() {
            sys::wait(&self.applied, applied, Some(timeout));
        }
    }

    // ---- the steward's side
    // ----------------------------------------------------------------------

    /// The change that comes next, see `space::order`. It counts as not applied until
    /// [`Layout::has_applied`]. `look`: what is known of a range. None: there is no change, or it
    /// has to wait for one that was not read yet.
    pub fn next(&self, look: impl Fn(&Range<usize>) -> Place, uffd: &Uffd) -> Option<Change> {
        {
            let mut state = self.lock();
            let is_move = matches!(state.changes.front(), Some(Change::Moved { .. }));
            if !is_move || !state.are_of_several {
                return state.take_change(0);
            }
        }
        // No other thread takes changes, so places in the queue stay valid.
        let next = |all_read| {
            // A statement of its own, so that the lock is released before other locks are taken.
            let changes = self.lock().changes.clone();
            order::next(&changes, &look, all_read)
        };
        let mut next_change = next(false);
        if next_change == Next::Wait && (!uffd.is_changing() || self.has_waited()) {
            // More may have been read since; the queue now holds everything.
            next_change = next(true);
        }
        let at = match next_change {
            Next::Nothing | Next::Wait => return None,
            Next::Apply(at) => at,
            Next::Ambiguous => fail_closed(
                "threads have moved memory to one place at a time, and what came first is not \
                 known",
            ),
        };
        let mut state = self.lock();
        state.waits_since = None;
        state.take_change(at)
    }

    /// Whether the next change has waited so long that no change can have been overtaken.
    fn has_waited(&self) -> bool {
        let mut state = self.lock();
        state.waits_since.get_or_insert_with(Instant::now).elapsed() > ORDER_TIME
    }

    /// Notes that a child of a child was born, which needs the pages its parent lacks.
    pub fn expects_child(&self) {
        let _state = self.lock();
        self.children.fetch_add(1, SeqCst);
    }

    /// Notes that a child has its pages.
    pub fn has_settled_child(&self) {
        self.children.fetch_sub(1, SeqCst);
    }

    /// Whether a child still has to get its pages. A thread that has read of one and not counted it
    /// yet holds the lock.
    pub fn owes_children(&self) -> bool {
        let _state = self.lock();
        self.children.load(SeqCst) != 0
    }

    /// Notes that the change taken last is applied.
    pub fn has_applied(&self) {
        self.unapplied.fetch_sub(1, SeqCst);
        self.applied.fetch_add(1, SeqCst);
        sys::wake(&self.applied);
    }

    /// The bell's count, to be read before checking for changes.
    pub fn bell(&self) -> u32 {
        self.bell.load(SeqCst)
    }

    /// Wakes the steward.
    pub fn ring(&self) {
        self.bell.fetch_add(1, SeqCst);
        sys::wake(&self.bell);
    }

    /// Waits until the bell has rung since `bell` was read, at most for `timeout`.
    pub fn wait_for_changes(&self, bell: u32, timeout: Duration) {
        sys::wait(&self.bell, bell, Some(timeout));
    }

    /// A shared hold of the turnstile.
    fn pass(&self) -> RwLockReadGuard<'_, ()> {
        read_lock(&self.turnstile)
    }

    /// An exclusive hold of the turnstile.
    fn close(&self) -> RwLockWriteGuard<'_, ()> {
        write_lock(&self.turnstile)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// An empty queue restarts at its beginning, so that a queue of few entries takes little of the
/// memory it has reserved.
fn begin_anew<T>(queue: &mut VecDeque<T>) {
    if queue.is_empty() {
        queue.clear();
    }
}

/// Whether the change can replace the page at this address, or needs it as it was before. Pure.
fn concerns(change: Change, address: usize) -> bool {
    match change {
        // The child has the page as it was at the fork.
        Change::Forked { .. } => true,
        Change::Moved { from, to, bytes } => {
            (from..from + bytes).contains(&address) || (to..to + bytes).contains(&address)
        }
        Change::Removed { start, end } | Change::Unmapped { start, end } => {
            (start..end).contains(&address)
        }
    }
}

impl State {
    fn queue(&mut self, change: Change) {
        let threads = self.threads.as_ref().map_or(u64::MAX, sys::count_tasks);
        self.are_of_several |= threads > 1;
        self.changes.push_back(change);
    }

    fn take_change(&mut self, at: usize) -> Option<Change> {
        let change = self.changes.remove(at);
        if self.changes.is_empty() {
            self.are_of_several = false;
            begin_anew(&mut self.changes);
        }
        change
    }

    /// Whether the change is the pager's own return of frames to the kernel.
    fn is_own(&self, change: Change) -> bool {
        matches!(change, Change::Removed { start, .. } if self.ignored.contains(&start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES;

    #[test]
    fn without_events_entering_is_always_allowed() {
        let layout = Layout::new(false, (0, 0));
        assert!(layout.enter().is_some() && !layout.is_behind());
    }

    #[test]
    fn nothing_moves_until_a_change_is_applied() {
        let layout = Layout::new(true, (0x10_0000, 0x1000));
        layout.lock().changes.push_back(Change::Unmapped { start: 0, end: PAGE });
        layout.unapplied.fetch_add(1, SeqCst);
        assert!(layout.enter().is_none());
        assert_eq!(layout.step(|| unreachable!()), CANCELLED);
        let uffd = Uffd::adopt(std::fs::File::open("/dev/null").expect("a descriptor").into());
        let next = layout.next(|_| Place::Taken, &uffd);
        assert_eq!(next, Some(Change::Unmapped { start: 0, end: PAGE }));
        assert!(layout.enter().is_none(), "taken is not applied");
        layout.has_applied();
        assert!(layout.enter().is_some());
    }

    #[test]
    fn a_page_arrives_although_what_it_has_left_is_told_of() {
        let layout = Layout::new(true, (0, 0));
        let (from, to) = (0x10_0000, 0x20_0000);
        layout.lock().changes.push_back(Change::Unmapped { start: from, end: from + 2 * PAGE });
        let filled = Outcome { done_bytes: PAGE, errno: None };
        assert_eq!(layout.step_of_steward(to, || filled), filled);
        assert_eq!(layout.moves(), 0, "something is not applied yet");
        assert_eq!(layout.step_of_steward(from + PAGE, || unreachable!()), CANCELLED);
        layout.lock().changes.push_back(Change::Moved { from: to, to: 0x30_0000, bytes: PAGE });
        assert_eq!(layout.step_of_steward(to, || unreachable!()), CANCELLED);
        assert_eq!(layout.step_of_steward(to + PAGE, || filled), filled);
        layout.lock().changes.push_back(Change::Forked { descriptor: 0 });
        assert_eq!(layout.step_of_steward(to + PAGE, || unreachable!()), CANCELLED);
        layout.lock().changes.clear();
        assert_eq!(layout.step_of_steward(to, || filled), filled);
        assert_eq!(layout.moves(), 1);
    }

    #[test]
    fn what_happens_in_the_victim_buffer_is_no_news() {
        let state = State { ignored: 4096..8192, ..State::default() };
        assert!(state.is_own(Change::Removed { start: 4096, end: 8192 }));
        assert!(!state.is_own(Change::Removed { start: 8192, end: 12288 }));
        assert!(!state.is_own(Change::Unmapped { start: 4096, end: 8192 }));
    }
}
