//! What each page may hold: the last version that was acknowledged. A write that ended with an
//! error may have arrived, or a part of it: the product does not read such a page again before it
//! has written it, so anything may be there until then.

use std::collections::BTreeMap;

use farpool_units::PAGE_BYTES;

/// A page that was never written.
pub const UNWRITTEN: u64 = 0;
/// Versions that a wrong page is compared with: as many as a trial writes.
const VERSIONS_TRIED: u64 = 10_000;

/// The pages of one segment.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The acknowledged version; None after a write that ended with an error.
    pages: BTreeMap<u32, Option<u64>>,
}

impl Model {
    /// A write was acknowledged: nothing else is there any more.
    pub fn stored(&mut self, page: u32, version: u64) {
        self.pages.insert(page, Some(version));
    }

    /// A write ended with an error.
    pub fn perhaps_stored(&mut self, page: u32) {
        self.pages.insert(page, None);
    }

    /// The memory of these pages is new: zeros.
    pub fn emptied(&mut self, pages: std::ops::Range<u32>) {
        self.pages.retain(|page, _| !pages.contains(page));
    }

    /// The pages that were written, or may have been.
    pub fn pages(&self) -> impl Iterator<Item = u32> {
        self.pages.keys().copied()
    }

    /// False if nothing was ever sent to the page's memory.
    #[must_use]
    pub fn may_be_written(&self, page: u32) -> bool {
        self.pages.contains_key(&page)
    }

    /// None if the page may hold these bytes; else why not.
    #[must_use]
    pub fn objection(&self, page: u32, bytes: &[u8; PAGE_BYTES]) -> Option<String> {
        let version = self.pages.get(&page).map_or(Some(UNWRITTEN), |known| *known)?;
        if *bytes == content(page, version) {
            return None;
        }
        let found = (0..VERSIONS_TRIED)
            .find(|version| *bytes == content(page, *version))
            .map_or("something else".to_owned(), |version| format!("version {version}"));
        Some(format!("page {page} should be version {version}, and is {found}"))
    }
}

/// The bytes of a version of a page: different for each, and each word tells its place.
#[must_use]
pub fn content(page: u32, version: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if version != UNWRITTEN {
        let mut word = (u64::from(page) << 40) ^ version.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for place in bytes.chunks_exact_mut(8) {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_version_is_allowed_until_a_write_fails() {
        let mut model = Model::default();
        assert_eq!(model.objection(7, &content(7, UNWRITTEN)), None);
        model.stored(7, 1);
        model.stored(7, 2);
        assert_eq!(model.objection(7, &content(7, 2)), None);
        let old = model.objection(7, &content(7, 1)).expect("an old version");
        assert!(old.contains("and is version 1"), "{old}");
        assert!(model.objection(7, &content(8, 2)).is_some(), "another page's bytes");
        assert!(model.objection(7, &content(7, UNWRITTEN)).is_some(), "zeros");
        model.perhaps_stored(7);
        assert_eq!(model.objection(7, &content(8, 1)), None);
        model.stored(7, 3);
        assert!(model.objection(7, &content(7, 2)).is_some());
        model.emptied(0..100);
        assert_eq!(model.objection(7, &content(7, UNWRITTEN)), None);
    }
}
