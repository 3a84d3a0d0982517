//! Digests of the parity that was last written, row by row: parity is the sum of what other blades
//! have, so no seal says whether it is right. A page of parity that is not what was written would
//! spoil the next sum without a trace, and be missed when a blade is lost.
//!
//! 32 bits of XXH3 under a secret of each segment's own. They find damage, and a blade that returns
//! something else but for one time in 4 billion; what is read by way of parity is opened under its
//! own seal all the same.
//!
//! A row is in doubt while nobody knows what its parity should be: since a write was not completed,
//! or what was written is not there any more.
//!
//! Memory: 4 bytes a row, 0.02 % of what is far.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use farpool_kernel::fill_random;
use farpool_units::{PAGE_BYTES, exactly};
use twox_hash::XxHash3_64;

use crate::map::SEGMENT_LIMIT_SUPERPAGES;
use crate::parity::GROUP_SUPERPAGES;
use crate::seals::empty;
use crate::{PageError, PoolError, SUPERPAGE_PAGES};

/// Groups whose digests' places are made together.
const CHUNK_GROUPS: u32 = 1024;
const GROUPS: u32 = SEGMENT_LIMIT_SUPERPAGES / GROUP_SUPERPAGES;
/// Bytes of the secret, the most that XXH3 uses.
const SECRET_BYTES: usize = 192;
/// The digest of what nobody knows: it fits everything.
const UNKNOWN: u32 = 0;
/// That of a row in doubt: its parity may not be what its members give, and nothing fits.
const DOUBTFUL: u32 = 1;

type Chunk = [OnceLock<Box<Rows>>; CHUNK_GROUPS as usize];

/// The digests of one group.
struct Rows {
    digests: [AtomicU32; SUPERPAGE_PAGES as usize],
    /// How many of them are in doubt.
    doubtful: AtomicU32,
}

/// The digests of one segment's parity.
pub(crate) struct Digests {
    secret: [u8; SECRET_BYTES],
    chunks: Box<[OnceLock<Box<Chunk>>]>,
}

impl std::fmt::Debug for Digests {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("Digests")
    }
}

impl Digests {
    /// Of nothing.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub(crate) fn new() -> Result<Self, PoolError> {
        let mut secret = [0; SECRET_BYTES];
        fill_random(&mut secret).map_err(|_| PoolError::NoRandom)?;
        Ok(Digests::with_secret(secret))
    }

    fn with_secret(secret: [u8; SECRET_BYTES]) -> Self {
        let chunks = GROUPS.div_ceil(CHUNK_GROUPS);
        Digests { secret, chunks: (0..chunks).map(|_| OnceLock::new()).collect() }
    }

    /// Notes what is written as a page of the parity.
    pub(crate) fn note(&self, page: u32, bytes: &[u8; PAGE_BYTES]) {
        self.rows(page / SUPERPAGE_PAGES).set(page, self.digest(bytes));
    }

    /// Notes that nobody knows any more what a page of the parity should be.
    pub(crate) fn doubt(&self, page: u32) {
        self.rows(page / SUPERPAGE_PAGES).set(page, DOUBTFUL);
    }

    /// True if nobody knows what a page of the parity should be.
    pub(crate) fn is_doubtful(&self, page: u32) -> bool {
        let rows = self.known_rows(page / SUPERPAGE_PAGES);
        rows.is_some_and(|rows| rows.of(page).load(Relaxed) == DOUBTFUL)
    }

    /// Nothing is known of a group's parity any more: its memory is fresh, or gone.
    pub(crate) fn begin(&self, group: u32) {
        if let Some(rows) = self.known_rows(group) {
            (0..SUPERPAGE_PAGES).for_each(|page| rows.set(page, UNKNOWN));
        }
    }

    /// Pages of a group's parity that are in doubt.
    pub(crate) fn doubtful(&self, group: u32) -> impl Iterator<Item = u32> {
        let rows = self.known_rows(group).filter(|rows| rows.doubtful.load(Relaxed) > 0);
        let first = group * SUPERPAGE_PAGES;
        rows.into_iter().flat_map(move |rows| {
            let pages = (first..).zip(&rows.digests);
            pages.filter_map(|(page, digest)| (digest.load(Relaxed) == DOUBTFUL).then_some(page))
        })
    }

    /// The digests of a group, made when the first one is noted.
    fn rows(&self, group: u32) -> &Rows {
        let chunk = self.chunks[(group / CHUNK_GROUPS) as usize].get_or_init(empty);
        chunk[(group % CHUNK_GROUPS) as usize].get_or_init(|| {
            let digests = [const { AtomicU32::new(UNKNOWN) }; SUPERPAGE_PAGES as usize];
            Box::new(Rows { digests, doubtful: AtomicU32::new(0) })
        })
    }

    fn known_rows(&self, group: u32) -> Option<&Rows> {
        let chunk = self.chunks.get((group / CHUNK_GROUPS) as usize)?.get()?;
        Some(chunk[(group % CHUNK_GROUPS) as usize].get()?)
    }

    /// Appends the secret, the number of groups, and of each its number and the digests of all its
    /// rows, for a process on this host.
    pub(crate) fn export(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.secret);
        let made = (0_u32..).step_by(CHUNK_GROUPS as usize).zip(&self.chunks);
        let made = made.filter(|(_, chunk)| chunk.get().is_some());
        let groups = made.flat_map(|(first, _)| first..first + CHUNK_GROUPS);
        let known: Vec<_> =
            groups.filter_map(|group| Some((group, self.known_rows(group)?))).collect();
        bytes.extend_from_slice(&exactly::<u32, _>(known.len()).to_le_bytes());
        for (group, rows) in known {
            bytes.extend_from_slice(&group.to_le_bytes());
            let digests = rows.digests.iter().map(|it| it.load(Relaxed).to_le_bytes());
            digests.for_each(|digest| bytes.extend_from_slice(&digest));
        }
    }

    /// The inverse of [`Digests::export`], and the bytes that follow. None: these bytes are
    /// something else.
    pub(crate) fn import(bytes: &[u8]) -> Option<(Digests, &[u8])> {
        let (secret, bytes) = bytes.split_first_chunk()?;
        let digests = Digests::with_secret(*secret);
        let (count, mut bytes) = bytes.split_first_chunk()?;
        for _ in 0..u32::from_le_bytes(*count) {
            let (group, rest) = bytes.split_first_chunk()?;
            let group = u32::from_le_bytes(*group);
            let (of_group, rest) = rest.split_at_checked(SUPERPAGE_PAGES as usize * 4)?;
            if group >= GROUPS {
                return None;
            }
            let (values, _) = of_group.as_chunks();
            for (page, value) in (0..).zip(values) {
                digests.rows(group).set(page, u32::from_le_bytes(*value));
            }
            bytes = rest;
        }
        Some((digests, bytes))
    }

    /// Checks that a page of the parity is what was written.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check(&self, page: u32, bytes: &[u8; PAGE_BYTES]) -> Result<(), PageError> {
        let rows = self.known_rows(page / SUPERPAGE_PAGES);
        let known = rows.map_or(UNKNOWN, |rows| rows.of(page).load(Relaxed));
        match known == UNKNOWN || known == self.digest(bytes) {
            true => Ok(()),
            false => Err(PageError::Forged),
        }
    }

    fn digest(&self, bytes: &[u8; PAGE_BYTES]) -> u32 {
        let digest = XxHash3_64::oneshot_with_secret(&self.secret, bytes);
        let digest: u32 = exactly(digest.expect("a secret of full length") >> 32);
        digest.max(DOUBTFUL + 1)
    }
}

impl Rows {
    fn of(&self, page: u32) -> &AtomicU32 {
        &self.digests[(page % SUPERPAGE_PAGES) as usize]
    }

    fn set(&self, page: u32, digest: u32) {
        let before = self.of(page).swap(digest, Relaxed);
        match (before == DOUBTFUL, digest == DOUBTFUL) {
            (false, true) => _ = self.doubtful.fetch_add(1, Relaxed),
            (true, false) => _ = self.doubtful.fetch_sub(1, Relaxed),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(byte: u8) -> [u8; PAGE_BYTES] {
        [byte; PAGE_BYTES]
    }

    #[test]
    fn only_what_was_written_last_fits() {
        let (digests, others) = (Digests::new().expect("random"), Digests::new().expect("random"));
        let page = 5 * SUPERPAGE_PAGES + 4095;
        assert!(digests.check(page, &bytes(1)).is_ok(), "nothing is known");
        digests.note(page, &bytes(1));
        digests.note(page, &bytes(2));
        assert!(digests.check(page, &bytes(2)).is_ok());
        let mut flipped = bytes(2);
        flipped[4095] ^= 1;
        for other in [bytes(1), bytes(0), flipped] {
            assert_eq!(digests.check(page, &other), Err(PageError::Forged));
        }
        assert!(digests.check(page - 1, &bytes(1)).is_ok(), "another page");
        assert_ne!(digests.digest(&bytes(2)), others.digest(&bytes(2)));
        let last = GROUPS * SUPERPAGE_PAGES - 1;
        digests.note(last, &bytes(3));
        assert!(digests.check(last, &bytes(4)).is_err());
    }

    #[test]
    fn a_row_in_doubt_fits_nothing_until_it_is_noted() {
        let digests = Digests::new().expect("digests");
        let doubtful = |digests: &Digests| digests.doubtful(3).collect::<Vec<_>>();
        let page = 3 * SUPERPAGE_PAGES + 7;
        assert_eq!(doubtful(&digests), []);
        digests.note(page, &bytes(1));
        digests.doubt(page);
        digests.doubt(page);
        digests.doubt(page + 1);
        assert_eq!(digests.check(page, &bytes(1)), Err(PageError::Forged));
        assert_eq!(doubtful(&digests), [page, page + 1]);
        let mut exported = Vec::new();
        digests.export(&mut exported);
        let (imported, rest) = Digests::import(&exported).expect("digests");
        assert_eq!((doubtful(&imported), rest.len()), (vec![page, page + 1], 0));
        digests.note(page, &bytes(2));
        assert_eq!(doubtful(&digests), [page + 1]);
        assert!(digests.check(page, &bytes(2)).is_ok());
        digests.begin(3);
        assert_eq!(doubtful(&digests), []);
        assert!(digests.check(page, &bytes(1)).is_ok(), "nothing is known");
    }
}
