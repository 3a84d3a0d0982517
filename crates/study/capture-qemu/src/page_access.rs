// SPDX-License-Identifier: GPL-2.0-or-later
//! Accesses by pages.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pages::PAGE_BYTES;
use crate::{Filter, MAX_PROCESSORS, READ, WRITE, access, processor, with_shared};

/// Pages in the front's table; the others are looked up in the filter.
const RECENT_PAGES: usize = 512;

/// Checked for each access of the program: whether its page was recorded within the window.
#[repr(align(16384))]
struct Front {
    /// Accesses of the thread.
    count: AtomicU64,
    /// `count` at the thread's last record.
    recorded: AtomicU64,
    /// Indexed by the lowest bits of the page's number.
    recent: [Recent; RECENT_PAGES],
}

/// The accesses that a page's last record makes redundant.
struct Recent {
    /// Twice the page's number, plus one if it was recorded as written.
    tag: AtomicU64,
    /// Redundant up to this count; 0 before the first record.
    until: AtomicU64,
}

static FRONTS: [Front; MAX_PROCESSORS] = [const {
    Front {
        count: AtomicU64::new(0),
        recorded: AtomicU64::new(0),
        recent: [const { Recent { tag: AtomicU64::new(0), until: AtomicU64::new(0) } };
            RECENT_PAGES],
    }
}; MAX_PROCESSORS];

#[inline]
fn front(index: c_uint) -> &'static Front {
    &FRONTS[index as usize % MAX_PROCESSORS]
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "a remainder by the number of places")]
fn recent(front: &Front, page: u64) -> &Recent {
    &front.recent[page as usize % RECENT_PAGES]
}

/// Begins a thread; records of an earlier thread of its number do not count for it.
pub fn begin(index: c_uint) {
    let front = front(index);
    front.count.store(0, Ordering::Relaxed);
    front.recorded.store(0, Ordering::Relaxed);
    front.recent.iter().for_each(|recent| recent.until.store(0, Ordering::Relaxed));
}

pub extern "C" fn on_access(index: c_uint, description: u32, address: u64, _: *mut c_void) {
    let front = front(index);
    // Only this thread writes it: no atomic addition is needed.
    let count = front.count.load(Ordering::Relaxed) + 1;
    front.count.store(count, Ordering::Relaxed);
    let page = address / PAGE_BYTES;
    let recent = recent(front, page);
    let is_load = u64::from(!access::is_store(description));
    let is_same = recent.tag.load(Ordering::Relaxed) | is_load == page << 1 | 1;
    let is_known = is_same && count <= recent.until.load(Ordering::Relaxed);
    if !is_known || address % PAGE_BYTES + access::bytes(description) > PAGE_BYTES {
        on_further_access(index, description, address);
    }
}

#[inline(never)]
fn on_further_access(index: c_uint, description: u32, address: u64) {
    // SAFETY: QEMU's call for this thread.
    let Some(processor) = (unsafe { processor(index) }) else { return };
    access::insist_on(description);
    let Filter::Pages(filter) = &mut processor.filter else { return };
    let (front, is_store) = (front(index), access::is_store(description));
    let count = front.count.load(Ordering::Relaxed);
    let last = address + access::bytes(description) - 1;
    for page in address / PAGE_BYTES..=last / PAGE_BYTES {
        let (record, is_news) = filter.reference(page, is_store, count);
        let recent = recent(front, page);
        recent.tag.store(page << 1 | u64::from(record.is_written), Ordering::Relaxed);
        recent.until.store(record.until, Ordering::Relaxed);
        if is_news {
            let access = if is_store { WRITE } else { READ };
            with_shared(|shared| {
                let ticks = count - front.recorded.load(Ordering::Relaxed);
                front.recorded.store(count, Ordering::Relaxed);
                shared.stream.push(page, access, processor.thread, ticks)
            });
        }
    }
}
