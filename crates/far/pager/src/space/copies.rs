//! Which pages have the same bytes on the blade, so that they can leave without being written
//! again.
//!
//! The kernel cannot tell in time: checking whether a page was written (write protection,
//! soft-dirty bits) and taking it out of the program are two steps, and a write can fall between.
//! Protecting each fetched page costs a fault at its first write, ten times what is saved
//! (docs/contributors/decisions.md). So a digest of the page is stored when it is fetched, and
//! compared when it has been taken out and can no longer change. A page that was written and holds
//! the same bytes again is recognised too.
//!
//! A page's state says that a layer has a copy of it ([`crate::space::page::PageState::has_copy`]);
//! the digest here identifies the copy's bytes. Invariant: nothing is written to the place of a
//! copy before the state has given it up.
//!
//! Two pages pass for the same with a probability of 2^-128 each time: the digests are XXH3 of 128
//! bits under a secret of 192 random bytes that each process makes for itself, so colliding pages
//! cannot be prepared. The place of the page is part of the digest: digests share a table of fixed
//! size, and one that was overwritten by another page's matches nothing.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use farpool_kernel::fill_random;
use farpool_policy::SAMPLED_FETCHES;
use farpool_units::PAGE_BYTES;
use twox_hash::XxHash3_128;

use crate::abort::fail_closed;
use crate::space::page::{PageState, Phase};
use crate::space::superpage::Page;
use crate::sys;

/// Digests of a process: 2 MiB of addresses, of which only the used part takes memory. With more
/// local memory than 512 MiB some are overwritten before they are compared; those pages are
/// written.
const DIGESTS: usize = 1 << 17;
/// Bytes of the secret, the most that XXH3 uses.
const SECRET_BYTES: usize = 192;
/// Spreads a page's number over 128 bits, injectively: odd. The digits are those of the golden
/// ratio.
const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// A digest combined with its page's number, or zeros. Its halves are written one after the other;
/// a mix of two digests matches nothing.
#[derive(Debug)]
#[repr(C)]
struct Digest([AtomicU64; 2]);

/// What to do with a page that was moved out, when its tray is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// There is no copy.
    Write,
    /// It need not be written if it equals its copy.
    Compare,
    /// It is on its way back into the program and keeps its copy: a write would change the copy's
    /// bytes.
    Return,
}

/// Decides by the page's state.
pub fn leaving(state: PageState) -> Leaving {
    match (state.has_copy(), state.phase()) {
        (false, _) => Leaving::Write,
        (true, Phase::Victim) => Leaving::Compare,
        (true, _) => Leaving::Return,
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct Copies {
    digests: &'static [Digest],
    secret: [u8; SECRET_BYTES],
    /// Pages that arrive in runs are remembered, too.
    runs: bool,
    /// All fetched pages are remembered; else one in [`SAMPLED_FETCHES`].
    all: AtomicBool,
    fetched: AtomicU32,
}

impl Copies {
    /// `runs`: whether pages that arrive in runs are worth remembering. Over `shm` they are not:
    /// written in a row, a page costs hardly more than a digest, and a scan waits for the fault
    /// thread.
    pub fn new(runs: bool) -> Result<Copies, std::io::Error> {
        let base = sys::map_local(DIGESTS * size_of::<Digest>())?;
        // Huge pages would take the whole table at once.
        sys::advise(base, DIGESTS * size_of::<Digest>(), libc::MADV_NOHUGEPAGE).ok();
        // SAFETY: the mapping is fresh, zeroed, page-aligned, never unmapped, and digests are
        // atomics.
        let digests = unsafe { std::slice::from_raw_parts(base as *const Digest, DIGESTS) };
        Ok(Copies {
            digests,
            secret: secret()?,
            runs,
            all: AtomicBool::new(true),
            fetched: AtomicU32::new(0),
        })
    }

    /// Whether the next fetched page is worth remembering.
    pub fn wants(&self) -> bool {
        self.all.load(Relaxed) || self.fetched.fetch_add(1, Relaxed).is_multiple_of(SAMPLED_FETCHES)
    }

    /// As [`Copies::wants`], for a run of pages.
    pub fn wants_run(&self) -> bool {
        self.runs && self.wants()
    }

    /// Sets whether all fetched pages are worth it from now on.
    pub fn set_wanted(&self, all: bool) {
        self.all.store(all, Relaxed);
    }

    /// Remembers the page by its bytes.
    pub fn remember(&self, page: Page, bytes: &[u8; PAGE_BYTES]) {
        let digest = self.digest(page, bytes);
        self.entry(page).0.iter().zip(digest).for_each(|(half, new)| half.store(new, Relaxed));
    }

    /// Whether these are the bytes that the page was remembered by.
    pub fn matches(&self, page: Page, bytes: &[u8; PAGE_BYTES]) -> bool {
        let entry = self.entry(page);
        self.digest(page, bytes).iter().zip(&entry.0).all(|(half, old)| *half == old.load(Relaxed))
    }

    fn entry(&self, page: Page) -> &Digest {
        &self.digests[page.segment_page() as usize % DIGESTS]
    }

    fn digest(&self, page: Page, bytes: &[u8; PAGE_BYTES]) -> [u64; 2] {
        let number = (u128::from(page.segment_page()) + 1).wrapping_mul(SPREAD);
        let digest = XxHash3_128::oneshot_with_secret(&self.secret, bytes);
        // Any substitute value could match another page's.
        let digest = digest.unwrap_or_else(|_| fail_closed("the secret for digests is too short"));
        let digest = digest ^ number;
        #[allow(clippy::cast_possible_truncation)] // The two halves.
        [digest as u64, (digest >> 64) as u64]
    }
}

fn secret() -> Result<[u8; SECRET_BYTES], std::io::Error> {
    let mut secret = [0; SECRET_BYTES];
    fill_random(&mut secret)?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::table::Space;
    use crate::space::units::SUPERPAGE_BYTES;

    #[test]
    fn a_page_matches_what_it_was_remembered_by_and_nothing_else() {
        let (space, copies) = (Space::new().expect("space"), Copies::new(true).expect("copies"));
        let page = space.page_or_new(SUPERPAGE_BYTES).expect("page");
        let neighbour = Page { index: 1, ..page };
        let mut bytes = [7; PAGE_BYTES];
        assert!(!copies.matches(page, &bytes));
        copies.remember(page, &bytes);
        assert!(copies.matches(page, &bytes));
        assert!(!copies.matches(neighbour, &bytes));
        for at in [0, 1, 2048, PAGE_BYTES - 1] {
            bytes[at] ^= 0x40;
            assert!(!copies.matches(page, &bytes), "byte {at} changed");
            bytes[at] ^= 0x40;
        }
        assert!(copies.matches(page, &bytes));
        let other = Copies::new(true).expect("copies");
        other.remember(page, &[0; PAGE_BYTES]);
        assert_ne!(other.secret, copies.secret);
        assert!(!other.matches(page, &bytes));
    }

    /// If it were written while it is taken back, the blade would have other bytes than those
    /// remembered; and the program may restore the page to what it was.
    #[test]
    fn a_page_that_returns_with_its_copy_is_not_written() {
        let victim = PageState::UNTOUCHED.with_layer(2).with_phase(Phase::Victim);
        let with_copy = victim.with_copy(true);
        assert_eq!(leaving(victim), Leaving::Write);
        assert_eq!(leaving(victim.with_phase(Phase::Fetching)), Leaving::Write);
        assert_eq!(leaving(with_copy), Leaving::Compare);
        for phase in [Phase::Fetching, Phase::Resident] {
            assert_eq!(leaving(with_copy.with_phase(phase)), Leaving::Return);
        }
    }

    /// Pages that share an entry, with the same bytes: the digest of one says nothing of the other.
    #[test]
    fn an_overwritten_digest_matches_nothing() {
        let (space, copies) = (Space::new().expect("space"), Copies::new(true).expect("copies"));
        let superpages = DIGESTS * PAGE_BYTES / SUPERPAGE_BYTES + 1;
        let pages: Vec<Page> = (1..=superpages)
            .map(|number| space.page_or_new(number * SUPERPAGE_BYTES).expect("page"))
            .collect();
        let (first, last) = (pages[0], pages[superpages - 1]);
        assert!(std::ptr::eq(copies.entry(first), copies.entry(last)));
        copies.remember(first, &[1; PAGE_BYTES]);
        copies.remember(last, &[2; PAGE_BYTES]);
        assert!(
            !copies.matches(first, &[1; PAGE_BYTES]) && !copies.matches(first, &[2; PAGE_BYTES])
        );
        assert!(copies.matches(last, &[2; PAGE_BYTES]));
    }
}
