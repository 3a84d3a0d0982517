//! Pages that are written from where they are, because another process also maps them.

use farpool_pool::BladeIndex;

/// Marks the tokens of pages that are written from where they are.
pub(super) const IN_PLACE: u64 = 1 << 32;

/// The state of the pages under way.
#[derive(Debug, Default)]
pub struct InPlace {
    /// The blade they were sent to.
    pub(super) blade: BladeIndex,
    pub(super) waiting: u64,
    pub(super) stored: u64,
    /// The memory for copies is in use.
    pub(super) used: bool,
}

impl InPlace {
    /// Takes the completion of such a page. Returns the blade that it was sent to; None: the token
    /// is of another write.
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
