// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's description of an access: whether it is a store, and its size.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{qemu, say};

/// Bits of the description that hold both. [`insist_on`] checks them against QEMU's own answers,
/// because they are not part of the interface; asking QEMU for each access takes two calls and a
/// quarter of the time.
const STORE_BIT: u32 = 17;
const SIZE_BIT: u32 = 4;
const SIZE_MASK: u32 = 7;

/// Descriptions that were checked, one bit each; those that differ only in bits from 18 on share
/// one.
static CHECKED: [AtomicU64; 1 << 12] = [const { AtomicU64::new(0) }; 1 << 12];

/// Aborts the program with a message if QEMU gives a description another meaning than this plugin.
#[inline]
pub fn insist_on(description: u32) {
    if !is_known(description) {
        say("this QEMU describes accesses in an unknown way; use qemu-user 7.2");
        std::process::abort();
    }
}

/// True if the bits of this description agree with QEMU's answers, which are asked for once each.
#[inline]
fn is_known(description: u32) -> bool {
    let place = &CHECKED[(description >> 6) as usize % CHECKED.len()];
    let bit = 1u64 << (description & 63);
    if place.load(Ordering::Relaxed) & bit != 0 {
        return true;
    }
    // SAFETY: QEMU's own description of an access is passed back to it.
    let (shift, is_qemus_store) = unsafe {
        (qemu::qemu_plugin_mem_size_shift(description), qemu::qemu_plugin_mem_is_store(description))
    };
    place.fetch_or(bit, Ordering::Relaxed);
    is_qemus_store == is_store(description) && shift == shift_of(description)
}

#[inline]
pub fn is_store(description: u32) -> bool {
    description >> STORE_BIT & 1 == 1
}

#[inline]
pub fn bytes(description: u32) -> u64 {
    1 << shift_of(description)
}

#[inline]
fn shift_of(description: u32) -> u32 {
    description >> SIZE_BIT & SIZE_MASK
}
