//! Which process copies what: processes that share frozen memory agree here that one of them copies
//! it to another blade and the others attach the copy.
//!
//! An entry belongs to the process that claimed it until the copy is announced; the keeper frees
//! entries of processes that are gone, and of blades that all have left. Two processes that claim
//! the same at the same moment both copy, which costs only memory; so does a full table.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use farpool_units::exactly;

use crate::words::{BLADE_ENTRIES, load_wide, store_wide};

/// Most frozen parts being copied at once. Beyond it each process copies for itself.
pub const COPY_ENTRIES: usize = 64;

const FREE: u32 = 0;
/// What is copied is being written.
const WRITING: u32 = 1;
const COPYING: u32 = 2;
const DONE: u32 = 3;

/// Parts that a copy may have: a few on each blade.
pub const COPY_PARTS: usize = 4 * BLADE_ENTRIES;

/// The token of a copy: for each part, the blade's id and the segment's token there.
pub type CopyToken = [Option<(u64, u128)>; COPY_PARTS];

/// What a process that needs a copy is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Errand {
    /// It copies, and announces the copy.
    Copy,
    /// Another process is copying.
    Wait,
    /// The copy is complete.
    Attach(Box<CopyToken>),
}

/// One copy in shared memory.
#[repr(C)]
#[derive(Debug)]
struct CopyEntry {
    /// Generation, and in the lower half the phase.
    state: AtomicU64,
    owner: AtomicU32,
    /// The entry of the blade it is copied from.
    from: AtomicU32,
    original: [AtomicU64; 2],
    parts: [CopyPart; COPY_PARTS],
}

#[repr(C)]
#[derive(Debug)]
struct CopyPart {
    blade_id: AtomicU64,
    /// Both 0 if there is no part here.
    token: [AtomicU64; 2],
}

/// The whole table in shared memory.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CopyTable {
    entries: [CopyEntry; COPY_ENTRIES],
}

const _: () = assert!(size_of::<CopyTable>() == COPY_ENTRIES * (32 + 24 * COPY_PARTS));

fn phase(state: u64) -> u32 {
    exactly(state & u64::from(u32::MAX))
}

/// The same generation in another phase.
fn in_phase(state: u64, phase: u32) -> u64 {
    state & !u64::from(u32::MAX) | u64::from(phase)
}

impl CopyEntry {
    /// The errand that the entry gives for an original, if it is about that one.
    fn about(&self, original: u128) -> Option<Errand> {
        let before = self.state.load(Acquire);
        let known = load_wide(&self.original) == original;
        let errand = match phase(before) {
            COPYING => Errand::Wait,
            DONE => Errand::Attach(Box::new(self.load_token())),
            _ => return None,
        };
        fence(Acquire);
        (known && self.state.load(Relaxed) == before).then_some(errand)
    }

    fn load_token(&self) -> CopyToken {
        std::array::from_fn(|at| {
            let part = &self.parts[at];
            let token = load_wide(&part.token);
            (token != 0).then(|| (part.blade_id.load(Relaxed), token))
        })
    }

    fn claim(&self, owner: u32, from: u32, original: u128) -> bool {
        let before = self.state.load(Acquire);
        if phase(before) != FREE {
            return false;
        }
        let next = in_phase(before.wrapping_add(1 << 32), WRITING);
        if self.state.compare_exchange(before, next, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.owner.store(owner, Relaxed);
        self.from.store(from, Relaxed);
        store_wide(&self.original, original);
        self.state.store(in_phase(next, COPYING), Release);
        true
    }

    fn free_if(&self, wanted: impl Fn(u32) -> bool) {
        let before = self.state.load(Acquire);
        if phase(before) != FREE && wanted(phase(before)) {
            // A concurrent change takes precedence.
            let free = in_phase(before, FREE);
            let _ = self.state.compare_exchange(before, free, AcqRel, Relaxed);
        }
    }
}

impl CopyTable {
    /// What the process `owner` is to do about a frozen part, named by the token that opens it, on
    /// the blade of this entry. A process that may not claim it waits for another one.
    pub fn ask(&self, owner: u32, from: usize, original: u128, may_claim: bool) -> Errand {
        let known = self.entries.iter().find_map(|entry| {
            let errand = entry.about(original)?;
            let is_mine = errand == Errand::Wait && entry.owner.load(Relaxed) == owner;
            Some(if is_mine { Errand::Copy } else { errand })
        });
        known.unwrap_or_else(|| {
            if !may_claim {
                return Errand::Wait;
            }
            let from = exactly(from);
            self.entries.iter().any(|entry| entry.claim(owner, from, original));
            Errand::Copy
        })
    }

    /// Records that the owner's copy is complete.
    pub fn announce(&self, owner: u32, original: u128, token: &CopyToken) {
        for entry in &self.entries {
            let is_mine =
                entry.about(original) == Some(Errand::Wait) && entry.owner.load(Relaxed) == owner;
            if !is_mine {
                continue;
            }
            for (part, known) in entry.parts.iter().zip(token) {
                let (blade_id, token) = known.unwrap_or_default();
                part.blade_id.store(blade_id, Relaxed);
                store_wide(&part.token, token);
            }
            entry.state.store(in_phase(entry.state.load(Relaxed), DONE), Release);
            return;
        }
    }

    /// Forgets an announced copy that cannot be attached, as it no longer exists.
    pub fn forget(&self, original: u128) {
        for entry in &self.entries {
            if matches!(entry.about(original), Some(Errand::Attach(_))) {
                entry.free_if(|phase| phase == DONE);
            }
        }
    }

    /// Frees entries of processes that are gone before their copies were complete.
    pub fn sweep(&self, is_alive: impl Fn(u32) -> bool) {
        for entry in &self.entries {
            let owner = entry.owner.load(Relaxed);
            entry.free_if(|phase| phase != DONE && owner != 0 && !is_alive(owner));
        }
    }

    /// Frees entries of copies from a blade that is not used any more.
    pub fn forget_blade(&self, entry_of_blade: usize) {
        for entry in &self.entries {
            if usize::try_from(entry.from.load(Relaxed)) == Ok(entry_of_blade) {
                entry.free_if(|phase| phase != WRITING);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Box<CopyTable> {
        // SAFETY: atomics; all bits zero is an empty table, as in a new file.
        Box::new(unsafe { std::mem::zeroed() })
    }

    #[test]
    fn one_copies_and_the_others_attach() {
        let (table, token) = (table(), {
            let mut token = CopyToken::default();
            token[2] = Some((7, 1 << 100 | 5));
            token
        });
        assert_eq!(table.ask(11, 0, 77, false), Errand::Wait, "it may not claim it");
        assert_eq!(table.ask(10, 0, 77, true), Errand::Copy);
        assert_eq!(table.ask(10, 0, 77, true), Errand::Copy, "still its own");
        assert_eq!(table.ask(11, 0, 77, true), Errand::Wait);
        assert_eq!(table.ask(11, 0, 78, true), Errand::Copy, "another part");
        table.announce(11, 77, &CopyToken::default());
        assert_eq!(table.ask(12, 0, 77, true), Errand::Wait, "not by somebody else");
        table.announce(10, 77, &token);
        assert_eq!(table.ask(11, 0, 77, true), Errand::Attach(Box::new(token)));
        table.forget(77);
        assert_eq!(table.ask(12, 0, 77, true), Errand::Copy);
    }

    #[test]
    fn what_the_dead_left_is_copied_by_others() {
        let table = table();
        table.ask(10, 0, 77, true);
        table.ask(11, 1, 78, true);
        table.announce(11, 78, &CopyToken::default());
        table.sweep(|pid| pid != 10 && pid != 11);
        assert_eq!(table.ask(12, 0, 77, true), Errand::Copy);
        assert_eq!(table.ask(12, 1, 78, true), Errand::Attach(Box::default()), "complete");
        table.forget_blade(1);
        assert_eq!(table.ask(12, 1, 78, true), Errand::Copy);
    }

    #[test]
    fn a_full_table_makes_everybody_copy() {
        let table = table();
        for original in 0..COPY_ENTRIES as u128 + 5 {
            assert_eq!(table.ask(10, 0, original + 1, true), Errand::Copy);
        }
        assert_eq!(table.ask(11, 0, COPY_ENTRIES as u128 + 5, true), Errand::Copy);
    }
}
