//! Pages of a chunk that the evictor owns for a moment.

use crate::space::page::{PageState, Phase};
use crate::space::units::{CHUNK_PAGES, bits};
use crate::space::{Page, Superpage};

/// Pages of a chunk that the evictor owns for a moment, with the states they had.
pub(crate) struct Claim {
    /// Pages to move out.
    taken: u64,
    /// Pages between them that are not present.
    gaps: u64,
    before: [PageState; CHUNK_PAGES],
}

impl Claim {
    pub(super) fn mask(&self) -> u64 {
        self.taken | self.gaps
    }

    /// Pages to move out.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// The state a page had.
    pub(crate) fn before(&self, index: usize) -> PageState {
        self.before[index]
    }

    /// Gives up the copies of these pages, because something may be written to the copies' places.
    pub(crate) fn give_up_copies(&mut self, superpage: &Superpage, pages: u64) {
        for index in bits(pages) {
            superpage.give_up_copy(self.before[index]);
            self.before[index] = self.before[index].with_copy(false);
        }
    }

    /// Drops these pages from the claim: their states have been set elsewhere.
    pub(crate) fn release(&mut self, pages: u64) {
        self.taken &= !pages;
        self.gaps &= !pages;
    }

    pub(super) fn is_resident(&self, index: usize) -> bool {
        self.taken & (1 << index) != 0
    }
}

pub(super) fn claim(
    superpage: &'static Superpage,
    chunk: usize,
    take: u64,
    resident: u64,
) -> Claim {
    let mut claim = Claim { taken: 0, gaps: 0, before: [PageState::UNTOUCHED; CHUNK_PAGES] };
    let (first, last) = (take.trailing_zeros() as usize, 63 - take.leading_zeros() as usize);
    for index in first..=last {
        let wanted = take & (1 << index) != 0;
        let absent = resident & (1 << index) == 0;
        let page = Page { superpage, index: chunk * CHUNK_PAGES + index };
        let state = page.cell().load();
        let claimable = match state.phase() {
            Phase::Untouched => wanted || absent,
            Phase::Resident => wanted,
            Phase::Far => absent,
            _ => false,
        };
        if claimable && page.cell().change(state, state.with_phase(Phase::Evicting)) {
            claim.before[index] = state;
            let set = if wanted { &mut claim.taken } else { &mut claim.gaps };
            *set |= 1 << index;
        }
    }
    claim
}
