//! The state of one page, in one byte.
//!
//! Invariant: a page's state is changed before the kernel's page table is, never after, so that a
//! fault can never be answered from a state that is already untrue. The thread that moves a page
//! into a transient phase ([`Phase::Evicting`], [`Phase::Fetching`]) owns the page until it moves
//! it on.

use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use farpool_units::exactly;

/// The most layers, frozen ones and the current one, that a process can have at a time: three bits
/// of the state. At fork the smallest layers are merged when layers run out.
pub const MAX_LAYERS: usize = 8;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// It was never moved out. It may be resident (memory is registered late), or never have been
    /// touched; a missing one reads as zeros.
    Untouched = 0,
    /// Mapped in the program.
    Resident = 1,
    /// The evictor is moving it out. Short; faults wait.
    Evicting = 2,
    /// In the victim buffer.
    Victim = 3,
    /// Only on the blade, in the layer that the state names.
    Far = 4,
    /// A pager thread is bringing it in. Other threads leave it alone; the kernel wakes all that
    /// wait.
    Fetching = 5,
    /// Its only copy is gone. Touching it is a SIGBUS.
    Lost = 6,
    /// The program has announced that it drops the page (madvise), and the kernel may be about to:
    /// a page that is present may still have the old contents for a while, and must not be moved
    /// out. A missing page reads as zeros.
    Dropped = 7,
}

impl Phase {
    /// Whether the page was moved out or is about to be, so that touching it is a fault.
    pub fn is_away(self) -> bool {
        matches!(self, Phase::Evicting | Phase::Victim | Phase::Far | Phase::Fetching)
    }
}

/// A page's byte: the phase in bits 0-2, the layer in bits 3-5; in phase `Fetching` bit 6 says that
/// the page was far. Bit 7: the layer holds a copy of the page, though the page is local; the copy
/// may be out of date ([`crate::space::copies`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageState(u8);

const PHASE_BITS: u8 = 0b111;
const LAYER_SHIFT: u8 = 3;
const WAS_FAR: u8 = 1 << 6;
const HAS_COPY: u8 = 1 << 7;

impl PageState {
    pub const UNTOUCHED: PageState = PageState(0);
    pub const DROPPED: PageState = PageState(Phase::Dropped as u8);

    pub fn phase(self) -> Phase {
        match self.0 & PHASE_BITS {
            0 => Phase::Untouched,
            1 => Phase::Resident,
            2 => Phase::Evicting,
            3 => Phase::Victim,
            4 => Phase::Far,
            5 => Phase::Fetching,
            6 => Phase::Lost,
            _ => Phase::Dropped,
        }
    }

    /// The state as a number for another process.
    pub fn to_byte(self) -> u8 {
        self.0
    }

    /// The state, from another process, of a page that a child lacks, or Untouched. None: no such
    /// state.
    pub fn of_child(byte: u8) -> Option<PageState> {
        let state = PageState(byte);
        let is_right = state == PageState::UNTOUCHED
            || (matches!(state.phase(), Phase::Far | Phase::Lost)
                && byte & (WAS_FAR | HAS_COPY) == 0);
        is_right.then_some(state)
    }

    /// The layer that holds the page; meaningful in the phases `Far`, `Fetching` and `Victim`, and
    /// where there is a copy.
    pub fn layer(self) -> usize {
        usize::from(self.0 >> LAYER_SHIFT) & (MAX_LAYERS - 1)
    }

    #[must_use]
    pub fn with_phase(self, phase: Phase) -> PageState {
        let was_far = self.phase() == Phase::Far || self.was_far();
        let mark = if phase == Phase::Fetching && was_far { WAS_FAR } else { 0 };
        PageState((self.0 & !(PHASE_BITS | WAS_FAR)) | mark | phase as u8)
    }

    /// Whether a page in phase `Fetching` comes from a blade.
    pub fn was_far(self) -> bool {
        self.0 & WAS_FAR != 0
    }

    /// Whether the layer holds a copy of a page that is not far.
    pub fn has_copy(self) -> bool {
        self.0 & HAS_COPY != 0
    }

    #[must_use]
    pub fn with_copy(self, has_copy: bool) -> PageState {
        PageState((self.0 & !HAS_COPY) | if has_copy { HAS_COPY } else { 0 })
    }

    /// The state in another layer, without a copy.
    #[must_use]
    pub fn with_layer(self, layer: usize) -> PageState {
        // Truncated it would be another layer's number, from which other bytes would be read.
        assert!(layer < MAX_LAYERS, "layer {layer} is none");
        let layer: u8 = exactly(layer);
        PageState((self.0 & PHASE_BITS) | (layer << LAYER_SHIFT))
    }
}

/// A page's byte in the table.
#[derive(Debug)]
#[repr(transparent)]
pub struct PageCell(AtomicU8);

impl PageCell {
    pub fn load(&self) -> PageState {
        PageState(self.0.load(SeqCst))
    }

    /// Sets the state. Only for the owner of a transient phase, and for a process without other
    /// threads.
    pub fn store(&self, state: PageState) {
        self.0.store(state.0, SeqCst);
    }

    /// Changes the state unless another thread was faster. True if it did.
    pub fn change(&self, from: PageState, to: PageState) -> bool {
        self.0.compare_exchange(from.0, to.0, SeqCst, SeqCst).is_ok()
    }

    /// Moves the page from one phase to another, keeping its layer. Returns the state it had.
    pub fn claim(&self, from: Phase, to: Phase) -> Option<PageState> {
        let state = self.load();
        (state.phase() == from && self.change(state, state.with_phase(to))).then_some(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_and_layer_do_not_disturb_each_other() {
        let phases = [
            Phase::Untouched,
            Phase::Resident,
            Phase::Evicting,
            Phase::Victim,
            Phase::Far,
            Phase::Fetching,
            Phase::Lost,
            Phase::Dropped,
        ];
        for layer in 0..MAX_LAYERS {
            for phase in phases {
                let state = PageState::UNTOUCHED.with_layer(layer).with_phase(phase);
                assert_eq!((state.phase(), state.layer()), (phase, layer));
                assert_eq!(state.with_layer(7).phase(), phase);
            }
        }
    }

    #[test]
    fn only_a_page_that_is_fetched_remembers_that_it_was_far() {
        let far = PageState::UNTOUCHED.with_layer(5).with_phase(Phase::Far);
        let fetching = far.with_phase(Phase::Fetching);
        assert!(fetching.was_far() && fetching.layer() == 5);
        assert_eq!(fetching.with_phase(Phase::Far), far);
        for phase in [Phase::Resident, Phase::Lost] {
            assert!(!fetching.with_phase(phase).was_far());
            assert!(!fetching.with_phase(phase).with_phase(Phase::Fetching).was_far());
        }
        assert!(!PageState::UNTOUCHED.with_phase(Phase::Fetching).was_far());
    }

    #[test]
    fn a_copy_stays_known_until_it_is_given_up() {
        let state = PageState::UNTOUCHED.with_layer(3).with_phase(Phase::Resident).with_copy(true);
        let victim = state.with_phase(Phase::Evicting).with_phase(Phase::Victim);
        assert!(victim.has_copy() && victim.layer() == 3);
        assert_eq!(victim.with_phase(Phase::Resident), state);
        let without = victim.with_copy(false);
        assert_eq!(
            (without.phase(), without.layer(), without.has_copy()),
            (Phase::Victim, 3, false)
        );
        assert!(!victim.with_layer(4).has_copy());
    }

    #[test]
    fn a_claim_succeeds_once() {
        let cell = PageCell(AtomicU8::new(0));
        cell.store(PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(3));
        assert_eq!(cell.claim(Phase::Far, Phase::Fetching).map(PageState::layer), Some(3));
        assert_eq!(cell.claim(Phase::Far, Phase::Fetching), None);
        assert_eq!(cell.load().phase(), Phase::Fetching);
    }
}
