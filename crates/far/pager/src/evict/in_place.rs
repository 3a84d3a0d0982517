//! Pages that are written from where they are, for another process maps them too.

use farpool_pool::BladeIndex;

/// Marks the tokens of pages that are written from where they are.
pub(super) const IN_PLACE: u64 = 1 << 32;

/// What became of the pages under way.
#[derive(Debug, Default)]
pub struct InPlace {
    /// The blade they were sent to.
    pub(super) blade: BladeIndex,
    pub(super) waiting: u64,
    pub(super) stored: u64,
    /// There are copies of pages.
    pub(super) used: bool,
}

impl InPlace {
    /// Takes the completion of such a page, and says which blade it is of; None: it is another's.
    pub fn take(&mut self, token: u64, stored: bool) -> Option<BladeIndex> {
        if token & IN_PLACE == 0 {
            return None;
        }
        let bit = 1 << (token & 63);
        self.waiting &= !bit;
        self.stored |= if stored { bit } else { 0 };
        Some(self.blade)
    }
}
