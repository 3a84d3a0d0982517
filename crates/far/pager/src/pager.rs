//! The pager of one process, as the program's own threads call it.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use farpool_board::{Board, Settings, WhenFull};
use farpool_units::exactly;

use crate::error::StartError;
use crate::life::process::Pager;
use crate::life::requests::{Answer, Kind, Request};
use crate::space::registry::Registry;
use crate::{abort, sys};

impl Pager {
    /// Prepares the pager of this process without starting a thread. The value lives for ever.
    pub fn prepare(board_path: &Path) -> Result<&'static Pager, StartError> {
        abort::end_loudly();
        let board: &'static Board = Box::leak(Box::new(Board::open(board_path, true)?));
        Pager::with_board(board, Box::leak(board_path.to_owned().into_boxed_path()))
    }

    /// The settings of the run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether an allocation must fail because no blade has memory left and the user chose that.
    pub fn must_refuse(&self) -> bool {
        self.settings.when_full == WhenFull::Fail
            && self.core().is_some_and(|core| core.full.load(Relaxed) || core.refused.load(Relaxed))
    }

    /// Notes that `[start, end)` is anonymous private memory that may be far from now on.
    pub fn add(&'static self, start: usize, end: usize) {
        let bytes = self.natively(|registry| {
            registry.add(start, end);
            registry.bytes()
        });
        match bytes {
            Some(bytes) if bytes as u64 >= self.start_bytes => {
                self.start_steward();
                self.before_growth();
            }
            Some(_) => {}
            None => {
                self.ask(Kind::Add, start, end, 0);
            }
        }
    }

    /// As [`Pager::add`], for the growth of a mapping that ended at `start`.
    pub fn add_to(&self, start: usize, end: usize) {
        let added = self.natively(|registry| {
            let unshared = registry.is_unshared(start - 1, start);
            registry.add(start, end);
            registry.set_unshared(start, end, unshared);
        });
        if added.is_none() {
            self.ask(Kind::Add, start, end, start);
        }
    }

    /// Sets whether a child of fork inherits nothing of `[start, end)` (`unshared`) or all of it.
    pub fn set_unshared(&self, start: usize, end: usize, unshared: bool) {
        let noted = self.natively(|registry| registry.set_unshared(start, end, unshared));
        if noted.is_none() {
            self.ask(Kind::Unshare, start, end, usize::from(unshared));
        }
    }

    /// Removes `[start, end)`, which is about to be unmapped or mapped over.
    pub fn remove(&self, start: usize, end: usize) {
        if self.natively(|registry| registry.remove(start, end)).is_none() {
            self.ask(Kind::Remove, start, end, 0);
        }
    }

    /// Discards the contents of `[start, end)` as `madvise` with this advice does. None: nothing of
    /// the process is far, and the caller makes the system call itself.
    pub fn discard(&self, start: usize, end: usize, advice: i32) -> Option<Result<(), i32>> {
        if !self.is_active() {
            return None;
        }
        // Callers pass only the advice values they know, which are not negative.
        let extra = exactly(advice);
        let request = Request { kind: Kind::Discard, start, end, extra, more: 0 };
        Some(self.requests.call(request).map(|_| ()))
    }

    /// Keeps `[start, end)` local (mlock), or ends that.
    pub fn pin(&self, start: usize, end: usize, pinned: bool) {
        if self.natively(|registry| registry.pin(start, end, pinned)).is_none() {
            self.ask(if pinned { Kind::Pin } else { Kind::Unpin }, start, end, 0);
        }
    }

    /// Notes that `[start, end)` is cold.
    pub fn retire(&self, start: usize, end: usize) {
        if self.is_active() {
            self.ask(Kind::Retire, start, end, 0);
        }
    }

    /// Whether any of `[start, end)` may be far.
    pub fn touches_far(&self, start: usize, end: usize) -> bool {
        self.first_far(start, end).is_some()
    }

    /// The first part of `[start, end)` that may be far, as start and end.
    pub fn first_far(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        if let Some(found) = self.natively(|registry| registry.first_in(start, end)) {
            return found;
        }
        let found = self.ask(Kind::FindFar, start, end, 0);
        (found.0 < found.1).then_some(found)
    }

    /// Moves a mapping with everything in it, local and far, to the range of `bytes` at `to`
    /// (mremap); whatever is mapped there is replaced. `keeps`: the old range stays mapped, empty.
    pub fn carry(
        &self,
        start: usize,
        end: usize,
        to: usize,
        bytes: usize,
        keeps: bool,
    ) -> Result<(), i32> {
        let more = bytes | usize::from(keeps);
        self.requests.call(Request { kind: Kind::Carry, start, end, extra: to, more }).map(|_| ())
    }

    /// Lets the kernel move or resize a mapping, while nothing of the process can become far; the
    /// new range takes the old one's place. None: something is far, see [`Pager::carry`].
    pub fn remap_natively(
        &self,
        old: (usize, usize),
        keeps: bool,
        remap: impl FnOnce() -> Option<(usize, usize)>,
    ) -> Option<bool> {
        self.natively(|registry| {
            let Some((start, end)) = remap() else {
                return false;
            };
            let unshared = registry.is_unshared(old.0, old.1);
            if !keeps {
                registry.remove(old.0, old.1);
            }
            registry.add(start, end);
            registry.set_unshared(start, end, unshared);
            true
        })
    }

    pub(crate) fn ask(&self, kind: Kind, start: usize, end: usize, extra: usize) -> Answer {
        self.requests.call(Request { kind, start, end, extra, more: 0 }).unwrap_or_else(|errno| {
            let error = std::io::Error::from_raw_os_error(errno);
            abort::fail_closed(&format!("{kind:?} of far memory failed: {error}"))
        })
    }

    /// Changes the registry directly while the process is native; None when it is active.
    pub(crate) fn natively<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> Option<T> {
        if self.is_active() {
            return None;
        }
        let _signals = sys::SignalGuard::block_all();
        let _doors = self.lock_doors();
        // It may have become active while we waited. While we hold the lock it cannot: nothing is
        // far then, not even our stack, so it is safe to hold the registry's lock.
        (!self.is_active()).then(|| change(&mut self.lock_registry()))
    }
}
