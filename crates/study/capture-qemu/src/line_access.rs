// SPDX-License-Identifier: GPL-2.0-or-later
//! Accesses through the caches.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::{Cache, LINE_BYTES, Outcome};
use crate::{
    Filter, MAX_PROCESSORS, READ, Shared, WRITE, WRITE_BACK, access, processor, with_shared,
};

/// Sets of a first level: 256 KiB in 8 ways. A larger one is refused.
const MAX_L1_SETS: usize = 512;

/// The hot path of a capture, for each access of the program: checks whether it is to the line that
/// its set of the first level was referenced with last, so that nothing changes. Plain arrays at
/// fixed addresses: one more dependent load here took a quarter longer.
///
/// Its size is a power of two, so that a thread's is found by a shift.
#[repr(align(8192))]
struct Front {
    /// Accesses since the thread's last record.
    ticks: AtomicU64,
    /// The first level's most recent line of each set ([`Cache::front`]); 0 before the first.
    recent: [AtomicU64; MAX_L1_SETS],
}

static FRONTS: [Front; MAX_PROCESSORS] = [const {
    Front { ticks: AtomicU64::new(0), recent: [const { AtomicU64::new(0) }; MAX_L1_SETS] }
}; MAX_PROCESSORS];

/// [`Cache::set_mask`] of the first level.
static L1_SET_MASK: AtomicU64 = AtomicU64::new(0);

/// Sets the geometry of the threads' first level.
///
/// # Errors
/// It has too many sets.
pub fn set_first_level(l1: &Cache) -> Result<(), String> {
    if l1.set_mask() >= MAX_L1_SETS as u64 {
        return Err(format!("a first level of more than {MAX_L1_SETS} sets"));
    }
    L1_SET_MASK.store(l1.set_mask(), Ordering::Relaxed);
    Ok(())
}

/// Begins a thread; an earlier one of its number has ended.
pub fn begin(index: c_uint) {
    front(index).ticks.store(0, Ordering::Relaxed);
}

/// As [`begin`], and forgets the lines that the thread referenced last.
pub fn forget(index: c_uint) {
    begin(index);
    front(index).recent.iter().for_each(|recent| recent.store(0, Ordering::Relaxed));
}

#[inline]
fn front(index: c_uint) -> &'static Front {
    &FRONTS[index as usize % MAX_PROCESSORS]
}

#[allow(clippy::cast_possible_truncation, reason = "masked to the number of sets")]
pub extern "C" fn on_access(index: c_uint, description: u32, address: u64, _: *mut c_void) {
    let front = front(index);
    // Only this thread writes it: no atomic addition is needed.
    front.ticks.store(front.ticks.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let line = address / LINE_BYTES;
    let set = (line & L1_SET_MASK.load(Ordering::Relaxed)) as usize;
    // SAFETY: `set_first_level` refuses more sets than there are places.
    let recent = unsafe { front.recent.get_unchecked(set) }.load(Ordering::Relaxed);
    let is_load = u64::from(!access::is_store(description));
    let is_repeat = recent | is_load == line << 1 | 1;
    if !is_repeat || address % LINE_BYTES + access::bytes(description) > LINE_BYTES {
        on_further_access(index, description, address);
    }
}

#[inline(never)]
fn on_further_access(index: c_uint, description: u32, address: u64) {
    // SAFETY: QEMU's call for this thread.
    let Some(processor) = (unsafe { processor(index) }) else { return };
    access::insist_on(description);
    let Filter::Lines(l1) = &mut processor.filter else { return };
    let is_store = access::is_store(description);
    let last = address + access::bytes(description) - 1;
    for line in address / LINE_BYTES..=last / LINE_BYTES {
        Reference { thread: processor.thread, front: front(index), line, is_store }.go(l1);
    }
}

/// A reference, as the first level sees it.
struct Reference<'a> {
    thread: u64,
    front: &'a Front,
    line: u64,
    is_store: bool,
}

impl Reference<'_> {
    fn go(&self, l1: &mut Option<Cache>) {
        let Some(l1) = l1 else {
            // Without a first level the last one sees the stores itself.
            return with_shared(|shared| self.go_below(shared, None, self.is_store));
        };
        let outcome = l1.reference(self.line, self.is_store);
        #[allow(clippy::cast_possible_truncation, reason = "masked to the number of sets")]
        let set = (self.line & l1.set_mask()) as usize % MAX_L1_SETS;
        self.front.recent[set].store(l1.front(self.line), Ordering::Relaxed);
        if let Outcome::Miss(changed) = outcome {
            with_shared(|shared| self.go_below(shared, changed, false));
        }
    }

    /// Sends the reference to the last level; `changed` is the line that the first level evicted
    /// for it. False if the recorder no longer reads.
    fn go_below(&self, shared: &mut Shared, changed: Option<u64>, store_below: bool) -> bool {
        let Shared { llc, stream } = shared;
        let access = if self.is_store { WRITE } else { READ };
        let mut push = |line: u64, access: u64| {
            let ticks = self.front.ticks.load(Ordering::Relaxed);
            self.front.ticks.store(0, Ordering::Relaxed);
            stream.push(line, access, self.thread, ticks)
        };
        let mut goes_on = true;
        let Some(llc) = llc else {
            goes_on &= push(self.line, access);
            return changed.is_none_or(|changed| push(changed, WRITE_BACK)) && goes_on;
        };
        if let Some(changed) = changed.filter(|changed| !llc.take_back(*changed)) {
            goes_on &= push(changed, WRITE_BACK);
        }
        if let Outcome::Miss(changed) = llc.reference(self.line, store_below) {
            goes_on &= push(self.line, access);
            goes_on &= changed.is_none_or(|changed| push(changed, WRITE_BACK));
        }
        goes_on
    }
}
