//! The steward of a sidecar: applies the program's changes of its address space, which
//! userfaultfd's events report, and finds new memory in the kernel's list of mappings.
//!
//! The order matters: mappings are looked for only when all changes that were read are applied, so
//! that what is found at an address is not confused with what was there before. A change that is
//! not read yet is harmless: until it is read, the kernel refuses to move pages (see
//! [`crate::space::layout`]).

use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_uffd::{Change, register_mode};
use farpool_units::PAGE_BYTES;

use super::leaving::Left;
use crate::abort::{fail_closed, panic_if_asked};
use crate::core::Core;
use crate::life::activation::{learn, register};
use crate::life::attached::{Attached, Sizes};
use crate::life::steward::state::Steward;
use crate::space::layout::ORDER_TIME;
use crate::space::maps::{self, Eligible};
use crate::space::order::Place;
use crate::space::page::{PageState, Phase};
use crate::space::registry::{Region, Registry};
use crate::space::way::Way;
use crate::space::{Page, known_pages, moves};
use crate::sys;
use crate::sys::standstill::PAUSE_PARTS;

/// How often the sizes of the address space and of the resident set are checked; newly mapped
/// memory is unknown for this long. One thread can touch some 5 MB meanwhile, or twice that with
/// huge pages.
const LOOK_STEP: Duration = Duration::from_millis(2);
/// The same when nothing has changed for [`QUIET_AFTER`].
const QUIET_STEP: Duration = Duration::from_millis(20);
/// After this long without a moment at rest the program is made to stand still for one.
const UNSURE_TIME: Duration = Duration::from_millis(20);
/// After this long new mappings are registered without one.
const KEEPING_TIME: Duration = Duration::from_millis(250);
/// How long the keeper may take to stop the program, and how long the reading of its changes may
/// take then.
const STANDSTILL_TIME: Duration = Duration::from_millis(50);
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// How often changed rights (mprotect), which nothing reports, are checked for.
const RESCAN_STEP: Duration = Duration::from_millis(500);

/// While threads of the program change its memory all the time the kernel does not say what is
/// registered. It is asked for this long, with pauses, because the threads have to run for their
/// changes to complete; then its list is read.
const ASKING_TIME: Duration = Duration::from_secs(1);
/// The time between two reads while the steward waits for changes made before the list was read. A
/// thread whose change is not read waits, so not much is queued meanwhile.
const LISTENING_STEP: Duration = Duration::from_millis(1);

/// The steward's state between two checks of the program's mappings.
#[derive(Debug)]
struct Looks {
    sizes: Sizes,
    changed: Instant,
    scanned: Instant,
    /// Mappings have gone since the last check.
    is_overdue: bool,
    /// Since when there has been no moment at rest after new mappings were found.
    unsure_since: Option<Instant>,
}

impl Steward {
    /// Serves until the program ends, or until the pager is told to leave: then all pages are in
    /// the program, and nothing is registered any more.
    pub fn attend(mut self, attached: &'static Attached) -> Left {
        self.prepare_rests(attached.threshold_bytes());
        let now = Instant::now();
        let mut looks = Looks {
            sizes: Sizes::default(),
            changed: now,
            scanned: now,
            is_overdue: true,
            unsure_since: None,
        };
        loop {
            panic_if_asked();
            let bell = self.core.layout.bell();
            while let Some(change) = self.next_change() {
                // Something else may be mapped there now.
                looks.is_overdue |=
                    matches!(change, Change::Unmapped { .. } | Change::Moved { .. });
                self.apply(attached, change);
            }
            if attached.must_leave() && self.core.layout.owes_children() {
                attached.finish_children();
            } else if attached.must_leave()
                && let Some(left) = self.leave()
            {
                return left;
            }
            looks.is_overdue |= self.look_after_rests();
            self.look(attached, &mut looks);
            self.keep_lease();
            self.free_empty();
            self.thaw_unshared();
            sys::measure_ticks();
            let is_quiet = looks.changed.elapsed() > QUIET_AFTER;
            let step = if is_quiet { QUIET_STEP } else { LOOK_STEP };
            self.core.layout.wait_for_changes(bell, step);
        }
    }

    /// Applies all changes that were read.
    pub(super) fn apply_all(&mut self, attached: &'static Attached) {
        while let Some(change) = self.next_change() {
            self.apply(attached, change);
        }
    }

    fn next_change(&self) -> Option<Change> {
        let stamp = self.core.layout.moves();
        let look = |place: &Range<usize>| {
            let is_known = |page: Page| page.cell().load().phase() != Phase::Untouched;
            let is_mapped =
                !self.pager.lock_registry().overlapping(place.start, place.end).is_empty();
            let is_unsure = |(part, added): &(Range<usize>, u64)| {
                *added == stamp && part.start < place.end && place.start < part.end
            };
            if self.unsure.iter().any(is_unsure) {
                Place::Unsure
            } else if is_mapped
                || known_pages(self.core.space, place.start, place.end).any(is_known)
            {
                Place::Taken
            } else {
                Place::Free
            }
        };
        self.core.layout.next(look, &self.core.uffd)
    }

    /// Applies a change to the page states; faults are served again afterwards.
    fn apply(&mut self, attached: &'static Attached, change: Change) {
        match change {
            Change::Removed { start, end } => {
                self.core.count(Counter::GiveUps, 1);
                self.rests.note(start, end, Instant::now());
                let _registry = self.pager.lock_registry();
                self.forget_as(start, end, PageState::DROPPED);
            }
            Change::Unmapped { start, end }
                if self.owed.takes(start, end, self.core.layout.moves()) => {}
            Change::Unmapped { start, end } if self.has_stayed(start, end) => {}
            Change::Unmapped { start, end } => {
                let mut registry = self.pager.lock_registry();
                registry.remove(start, end);
                self.forget(start, end);
            }
            Change::Moved { from, to, bytes } => {
                self.has_moved = true;
                // A mapping that is partly registered cannot be moved as one.
                self.rests.end_all();
                self.owed.note(from, bytes, self.core.layout.moves());
                return self.follow_move(from, to, bytes);
            }
            Change::Forked { descriptor } => {
                // SAFETY: the kernel made the descriptor for this process when the event was read,
                // and the change is applied once.
                let uffd = unsafe { OwnedFd::from_raw_fd(descriptor) };
                self.share_with_child(attached, uffd);
            }
        }
        self.core.layout.has_applied();
    }

    /// Whether a range is unchanged, though its end was reported. Since Linux 6.12 the end is also
    /// reported for an mmap over the range that fails in the end, for lack of memory or because of
    /// a limit.
    ///
    /// That its memory is registered does not prove it: nothing reports a mapping that grows, in
    /// place or while it is moved, over a range that has just gone. The proof is a page that is
    /// present before and after the question: new memory has none, because no fault is served until
    /// the change is applied. Without such a page the range counts as gone: far memory without a
    /// present page is lost in an mmap over it that fails.
    fn has_stayed(&self, start: usize, end: usize) -> bool {
        let (core, registered) = (self.core, self.pager.lock_registry().overlapping(start, end));
        let is_away = |part: &Region| {
            let mut pages = known_pages(core.space, part.start, part.end);
            pages.any(|page| page.cell().load().phase().is_away())
        };
        // Pages that are not away are not lost when they are forgotten.
        if !registered.iter().any(is_away) {
            return false;
        }
        let there = |part: &Region| moves::first_occupied(&core.pagemap, part.start, part.end);
        let Some(page) = registered.iter().find_map(there) else { return false };
        self.is_registered_still(page)
            && moves::first_occupied(&core.pagemap, page, page + PAGE_BYTES).is_some()
            && is_of_this_pager(core, page)
    }

    /// Whether the mapping at this address is the known one. Another mapping may be registered
    /// there if it was moved there, which is still to be applied, or if it was uncertain at its
    /// registration what had happened before.
    fn is_registered_still(&self, address: usize) -> bool {
        let stamp = self.core.layout.moves();
        let is_unsure =
            self.unsure.iter().any(|(part, added)| *added == stamp && part.contains(&address));
        if is_unsure || !sys::is_mapped(address) {
            return false;
        }
        self.kernel_has(address).unwrap_or_else(|| self.list_has(address))
    }

    /// The kernel's answer, which it gives only at a moment at which every change is read. None:
    /// there was no such moment.
    fn kernel_has(&self, address: usize) -> Option<bool> {
        let (core, until) = (self.core, Instant::now() + ASKING_TIME);
        while !core.layout.is_moved_to(address) {
            // No page there is protected.
            match core.uffd.write_protect(address, PAGE_BYTES, false) {
                Ok(()) => return Some(!core.layout.is_moved_to(address)),
                Err(error) if error.raw_os_error() != Some(libc::EAGAIN) => return Some(false),
                Err(_) if Instant::now() > until => return None,
                Err(_) => {
                    core.take_in();
                    sys::pause();
                }
            }
        }
        Some(false)
    }

    /// The same from the list of mappings. Memory may have been moved there without being reported
    /// yet: its thread reports before [`ORDER_TIME`] is over.
    fn list_has(&self, address: usize) -> bool {
        let details = sys::read_file("/proc/self/smaps");
        let details =
            details.unwrap_or_else(|error| fail_closed(&format!("/proc/self/smaps: {error}")));
        if !maps::is_registered(&details, address) {
            return false;
        }
        let (core, until) = (self.core, Instant::now() + ORDER_TIME);
        while !core.layout.is_moved_to(address) {
            if Instant::now() > until {
                return true;
            }
            core.take_in();
            std::thread::sleep(LISTENING_STEP);
        }
        false
    }

    /// Looks for memory that was mapped since the last check, if the address space has changed its
    /// size.
    fn look(&mut self, attached: &'static Attached, looks: &mut Looks) {
        let sizes = attached.sizes();
        let before = std::mem::replace(&mut looks.sizes, sizes);
        let is_larger = (sizes.mapped, sizes.data) != (before.mapped, before.data);
        if sizes != before {
            looks.changed = Instant::now();
        }
        let is_time = looks.scanned.elapsed() >= RESCAN_STEP && looks.changed >= looks.scanned;
        let mistrusted = self.core.take_mistrusted();
        if let Some((start, end)) = mistrusted {
            // Registering what is registered after all changes nothing.
            self.pager.lock_registry().remove(start, end);
        }
        looks.is_overdue |= is_larger || is_time || mistrusted.is_some();
        // At a standstill the rights are not the program's own.
        if looks.is_overdue && !self.core.layout.is_behind() && !self.core.standstill.is_on() {
            let since = *looks.unsure_since.get_or_insert_with(Instant::now);
            let is_certain = match since.elapsed() {
                time if time > KEEPING_TIME => learn_mappings(self, attached, true),
                time if time > UNSURE_TIME => self.learn_at_standstill(attached),
                _ => learn_mappings(self, attached, false),
            };
            (looks.is_overdue, looks.scanned) = (!is_certain, Instant::now());
            if is_certain {
                looks.unsure_since = None;
            }
            self.look_at_unmovable();
        }
    }
}

impl Steward {
    /// Learns of new memory while the program stands still: there is a moment at rest then, and
    /// what is found is certain. False: not now.
    fn learn_at_standstill(&mut self, attached: &'static Attached) -> bool {
        let core = self.core;
        if Instant::now() < self.no_standstill_before {
            return learn_mappings(self, attached, false);
        }
        let Some(standing) = core.standstill.ask(STANDSTILL_TIME) else { return false };
        while core.uffd.is_changing() && standing.since.elapsed() < STANDSTILL_TIME {
            core.take_in();
            rustix::thread::sched_yield();
        }
        self.apply_all(attached);
        let is_certain = learn_mappings(self, attached, false);
        self.no_standstill_before = Instant::now() + standing.since.elapsed() * PAUSE_PARTS;
        drop(standing);
        core.count(Counter::Standstills, 1);
        is_certain
    }
}

/// Whether registered memory is registered with this pager's userfaultfd: if it is with one of the
/// program's own, the kernel refuses (EBUSY). Memory registered with this one stays as it is.
fn is_of_this_pager(core: &Core, page: usize) -> bool {
    core.uffd.register(page, PAGE_BYTES, register_mode::MISSING | register_mode::WP).is_ok()
}

/// Memory that cannot be moved matters from this part of the limit on.
const UNMOVABLE_PART: u64 = 4;

impl Steward {
    /// Notes whether much of the memory is locked, or has rights that the victim buffer does not
    /// have.
    fn look_at_unmovable(&self) {
        let registry = self.pager.lock_registry();
        let pinned = registry.iter().filter(|region| region.pinned);
        let pinned_bytes: u64 = pinned.map(|region| region.bytes() as u64).sum();
        let limit_bytes = self.core.board.header().limit_bytes.load(Relaxed);
        // The last answer stays valid until there is another one.
        let Some(locked_bytes) = sys::locked_bytes() else { return };
        let is_unmovable = pinned_bytes + locked_bytes > limit_bytes / UNMOVABLE_PART;
        self.core.is_unmovable.store(is_unmovable, Relaxed);
    }
}

impl Steward {
    /// Publishes the number of mappings that the kernel keeps apart from their neighbours
    /// (`splits`), and reports it once, because the kernel does not report an mremap that fails.
    fn look_at_splits(&mut self, splits: usize) {
        self.core.slot.set(Counter::SplitMappings, splits as u64);
        if splits > 0 && self.has_moved && !std::mem::replace(&mut self.splits_said, true) {
            sys::say(&format!(
                "the program moves memory (mremap), and {splits} of its mappings lie beside others \
                 that they would be one with, were they not watched: to move or resize several of \
                 them at once fails with EFAULT, and may leave some of them moved"
            ));
        }
    }
}

/// Registers new memory, and notes which may be moved out. False: there was no moment at rest, and
/// it has to be done again. With `keeps` it counts all the same, because in a program that changes
/// its memory all the time nothing would be held to the limit otherwise.
fn learn_mappings(steward: &mut Steward, attached: &'static Attached, keeps: bool) -> bool {
    let found = match attached.eligible() {
        Ok(found) => found,
        Err(error) => {
            sys::say(&format!("the list of mappings cannot be read: {error}"));
            return true;
        }
    };
    steward.look_at_splits(maps::splits(&found));
    let core = steward.core;
    let mut registry = steward.pager.lock_registry();
    // A new mapping is registered as a whole, also where something rested before.
    let movable = found.iter().filter(|range| core.is_movable(range.protection));
    for (start, end) in movable.flat_map(|range| unknown_parts(&registry, range)) {
        if steward.rests.is_partly_new(start, end) {
            steward.rests.wake(start, end);
        }
    }
    // Resting memory is not registered yet.
    let rests = &steward.rests;
    let unknown_parts = |registry: &Registry, range: &Eligible| -> Vec<(usize, usize)> {
        let unknown = unknown_parts(registry, range).into_iter();
        let awake = unknown.flat_map(|(start, end)| rests.awake_parts(start, end));
        awake.filter(|_| core.is_movable(range.protection)).collect()
    };
    let is_new = |range: &Eligible| !unknown_parts(&registry, range).is_empty();
    // A mapping that is half known, from what was there before, would be registered only by half:
    // the kernel could not move it as one (mremap).
    if !keeps && found.iter().any(is_new) && !core.layout.is_at_rest(&core.uffd) {
        return false;
    }
    let mut added = Vec::new();
    for range in found {
        for part in unknown_parts(&registry, &range) {
            let region = Eligible { start: part.0, end: part.1, ..range }.region(false);
            registry.insert(region);
            if register(core, &mut registry, region) {
                added.push(region);
            }
        }
        let (protection, pinned) = (range.protection, core.way(range.protection) == Way::Nowhere);
        let parts = registry.overlapping(range.start, range.end);
        if parts.iter().any(|part| (part.protection, part.pinned) != (protection, pinned)) {
            registry.set_protection(range.start, range.end, protection, pinned);
        }
    }
    // Memory that was moved to a new place since the list was made must not pass for what was there
    // before, see [`crate::space::order`]. It stays registered, and is found again.
    let is_certain = added.is_empty() || core.layout.is_at_rest(&core.uffd);
    if !added.is_empty() && is_certain {
        // A range that is unmapped from here on may be one that was found.
        steward.owed.forget();
    }
    let stamp = core.layout.moves();
    steward.unsure.retain(|(_, added)| *added == stamp);
    for region in added {
        if is_certain || keeps {
            learn(core, region);
        } else {
            registry.remove(region.start, region.end);
        }
        if !is_certain && keeps {
            steward.unsure.push((region.start..region.end, stamp));
        }
    }
    if is_certain || keeps {
        steward.rests.have_woken();
    }
    is_certain || keeps
}

/// The parts of a range that the registry does not have.
pub fn unknown_parts(registry: &Registry, range: &Eligible) -> Vec<(usize, usize)> {
    let mut unknown = Vec::new();
    let mut from = range.start;
    for known in registry.overlapping(range.start, range.end) {
        if known.start > from {
            unknown.push((from, known.start));
        }
        from = known.end;
    }
    if from < range.end {
        unknown.push((from, range.end));
    }
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Protection;

    #[test]
    fn what_is_known_is_not_registered_again() {
        let mut registry = Registry::default();
        registry.add(0x3000, 0x5000);
        registry.add(0x8000, 0x9000);
        let range = Eligible { start: 0x2000, end: 0xa000, protection: Protection::READ_WRITE };
        let unknown = unknown_parts(&registry, &range);
        assert_eq!(unknown, [(0x2000, 0x3000), (0x5000, 0x8000), (0x9000, 0xa000)]);
    }
}
