//! Whether it pays to remember what pages looked like when they were fetched.
//!
//! A page that leaves unchanged need not be written again, for the blade still has it. To know
//! that, the pager remembers a digest of each fetched page and compares it when the page leaves.
//! That costs two digests a page; a write saved is worth several. So all fetched pages are
//! remembered while enough of them leave unchanged, and otherwise only a few, to notice when that
//! changes.

/// Of pages that left, one in so many must be unchanged for remembering to pay: two digests cost
/// about a third of a write (measured, docs/contributors/decisions.md).
const LEAST_UNCHANGED_SHARE: u32 = 3;
/// The share is judged over so many pages that left.
const JUDGED_PAGES: u32 = 512;
/// While it does not pay, one fetch in so many is remembered: the digests then cost less than 1 %
/// of the fetches.
pub const SAMPLED_FETCHES: u32 = 16;
/// The judgement over a sample is made over fewer pages, so that it comes within some thousand
/// fetches.
const SAMPLED_PAGES: u32 = 64;

/// See the module's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanEstimator {
    pays: bool,
    compared: u32,
    unchanged: u32,
}

impl Default for CleanEstimator {
    /// It is assumed to pay until it is known better.
    fn default() -> Self {
        Self { pays: true, compared: 0, unchanged: 0 }
    }
}

impl CleanEstimator {
    /// A remembered page has left, unchanged or not. Returns whether to remember all fetched pages
    /// from now on.
    pub fn compared(&mut self, is_unchanged: bool) -> bool {
        self.compared += 1;
        self.unchanged += u32::from(is_unchanged);
        let enough = if self.pays { JUDGED_PAGES } else { SAMPLED_PAGES };
        if self.compared >= enough {
            let pays = self.unchanged * LEAST_UNCHANGED_SHARE >= self.compared;
            *self = Self { pays, compared: 0, unchanged: 0 };
        }
        self.pays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(estimator: &mut CleanEstimator, pages: u32, unchanged_in: u32, of: u32) -> bool {
        (0..pages).map(|page| estimator.compared(page % of < unchanged_in)).last().unwrap_or(true)
    }

    #[test]
    fn pages_that_change_are_soon_not_remembered_and_pages_that_do_not_are_again() {
        let mut estimator = CleanEstimator::default();
        assert!(after(&mut estimator, JUDGED_PAGES - 1, 0, 1), "it begins with remembering");
        assert!(!after(&mut estimator, 1, 0, 1));
        assert!(!after(&mut estimator, 4 * SAMPLED_PAGES, 1, 4), "a quarter does not pay");
        assert!(after(&mut estimator, SAMPLED_PAGES, 1, 2));
        assert!(after(&mut estimator, 4 * JUDGED_PAGES, 2, 5), "two fifths do");
    }
}
