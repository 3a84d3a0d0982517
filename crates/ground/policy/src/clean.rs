//! Whether it pays to remember the content of fetched pages.
//!
//! A page that is evicted unchanged need not be written again, since the blade still has it. To
//! detect that, the pager remembers a digest of each fetched page and compares it at eviction. That
//! costs two digests per page; a saved write is worth several. So all fetched pages are remembered
//! while enough of them are evicted unchanged, and otherwise only a sample, to notice when that
//! changes.

/// One in this many evicted pages must be unchanged for remembering to pay: two digests cost about
/// a third of a write (measured, docs/contributors/decisions.md).
const LEAST_UNCHANGED_SHARE: u32 = 3;
/// Evicted pages over which the share is judged.
const JUDGED_PAGES: u32 = 512;
/// While it does not pay, one in this many fetches is remembered: the digests then cost less than 1
/// % of the fetches.
pub const SAMPLED_FETCHES: u32 = 16;
/// Over a sample fewer pages are judged, so that the judgement takes some thousand fetches.
const SAMPLED_PAGES: u32 = 64;

/// Judges whether remembering pays; see the module's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanEstimator {
    pays: bool,
    compared: u32,
    unchanged: u32,
}

impl Default for CleanEstimator {
    /// Remembering is assumed to pay until the first judgement.
    fn default() -> Self {
        Self { pays: true, compared: 0, unchanged: 0 }
    }
}

impl CleanEstimator {
    /// Counts a remembered page that was evicted, unchanged or not. Returns whether to remember all
    /// fetched pages from now on.
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
