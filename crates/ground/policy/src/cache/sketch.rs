//! Estimates how often pages were seen, in little memory: a counting Bloom filter that ages.

/// The filter is as wide as one with a false-positive rate of one in a thousand when it holds as
/// many pages as the cache: this many counters for each, ln(1000) / ln(2)^2 ...
const COUNTERS_PER_PAGE: f64 = 14.377_587_566_051_17;

/// ... and this many of them per page, 14.38 ln(2), rounded up.
const COUNTERS_OF_A_PAGE: usize = 10;

/// The seeds of the two hashes from which the places of a page's counters are computed.
const SEEDS: [u64; 2] = [0x1234_5678, 0x1234_4321];

/// Counters of a [`NameSketch`] per page, a byte each.
const BYTES_PER_PAGE: usize = 8;

/// Counters that one name uses.
const BYTES_OF_A_NAME: usize = 4;

/// The least width of a [`NameSketch`].
const NAME_SKETCH_BYTES_MIN: usize = 1 << 10;

/// A sketch whose width follows the number of pages. It is a power of two, so that it doubles and
/// halves without knowing the names.
#[derive(Debug)]
pub(super) struct NameSketch {
    counters: Vec<u8>,
}

impl Default for NameSketch {
    fn default() -> Self {
        Self { counters: vec![0; NAME_SKETCH_BYTES_MIN] }
    }
}

impl NameSketch {
    /// Widens to the need of `pages`, or narrows if a quarter would do.
    pub(super) fn fit(&mut self, pages: u32) {
        let wanted = pages as usize * BYTES_PER_PAGE;
        while self.counters.len() < wanted {
            // A name's places in the upper half are new: they inherit the counts of the lower.
            self.counters.reserve_exact(self.counters.len());
            self.counters.extend_from_within(..);
        }
        while self.counters.len() > NAME_SKETCH_BYTES_MIN && self.counters.len() / 4 > wanted {
            let half = self.counters.len() / 2;
            let (lower, upper) = self.counters.split_at_mut(half);
            lower.iter_mut().zip(upper).for_each(|(lower, upper)| *lower = (*lower).max(*upper));
            self.counters.truncate(half);
            self.counters.shrink_to_fit();
        }
    }

    fn places(&self, name: u32) -> [usize; BYTES_OF_A_NAME] {
        let mask = self.counters.len() - 1;
        // An odd step visits different places.
        let [first, step] = hashes(name);
        spread(first, step | 1).map(|place| place as usize & mask)
    }

    /// Returns an upper bound of how often the name was seen, up to 255, halvings aside.
    pub(super) fn estimate(&self, name: u32) -> u8 {
        least(&self.counters, &self.places(name))
    }

    /// Counts a name, as [`Sketch::add_least`].
    pub(super) fn add(&mut self, name: u32) {
        let places = self.places(name);
        let least = least(&self.counters, &places);
        for at in places {
            if self.counters[at] == least {
                self.counters[at] = least.saturating_add(1);
            }
        }
    }

    /// Halves all counts.
    pub(super) fn halve(&mut self) {
        for counter in &mut self.counters {
            *counter >>= 1;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.counters.capacity()
    }
}

#[derive(Debug)]
pub(super) struct Sketch {
    counters: Vec<u32>,
    width: u32,
}

impl Sketch {
    pub(super) fn new(pages: u32) -> Self {
        let width = Self::width(pages);
        Self { counters: vec![0; width as usize], width }
    }

    /// Returns the number of counters for `pages`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
    pub(super) fn width(pages: u32) -> u32 {
        let wanted = (COUNTERS_PER_PAGE * f64::from(pages)).ceil().min(f64::from(i32::MAX)) as u32;
        let least = COUNTERS_OF_A_PAGE as u32;
        if wanted < least { 2 * least } else { wanted }
    }

    fn places(&self, page: u32) -> [usize; COUNTERS_OF_A_PAGE] {
        let [first, step] = hashes(page);
        spread(first, step).map(|place| (place % self.width) as usize)
    }

    /// Counts a page in those of its counters alone that are lowest (minimal increment): the others
    /// are too high already. Far fewer additions of other pages show in an estimate.
    pub(super) fn add_least(&mut self, page: u32) {
        let places = self.places(page);
        let least = least(&self.counters, &places);
        for at in places {
            if self.counters[at] == least {
                self.counters[at] = least.saturating_add(1);
            }
        }
    }

    /// Returns an upper bound of how often `page` was seen, halvings aside.
    pub(super) fn estimate(&self, page: u32) -> u32 {
        least(&self.counters, &self.places(page))
    }

    /// Counts a page in all of its counters, as libCacheSim does.
    pub(super) fn add(&mut self, page: u32) {
        for at in self.places(page) {
            self.counters[at] = self.counters[at].saturating_add(1);
        }
    }

    /// Halves all counts.
    pub(super) fn halve(&mut self) {
        for counter in &mut self.counters {
            *counter >>= 1;
        }
    }
}

/// The two hashes from which a page's places follow, computed once for each use of it.
fn hashes(page: u32) -> [u32; 2] {
    SEEDS.map(|seed| low_half(xxh64(u64::from(page), seed)))
}

/// `first`, and every further place a step on.
fn spread<const N: usize>(first: u32, step: u32) -> [u32; N] {
    let mut next = first;
    std::array::from_fn(|_| {
        let place = next;
        next = place.wrapping_add(step);
        place
    })
}

fn least<T: Copy + Ord + Default>(counters: &[T], places: &[usize]) -> T {
    places.iter().map(|at| counters[*at]).min().unwrap_or_default()
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low_half(hash: u64) -> u32 {
    hash as u32
}

/// Returns the XXH64 (Collet) of eight bytes.
fn xxh64(value: u64, seed: u64) -> u64 {
    const PRIMES: [u64; 5] = [
        0x9E37_79B1_85EB_CA87,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x85EB_CA77_C2B2_AE63,
        0x27D4_EB2F_1656_67C5,
    ];
    let round = value.wrapping_mul(PRIMES[1]).rotate_left(31).wrapping_mul(PRIMES[0]);
    let mut hash = seed.wrapping_add(PRIMES[4]).wrapping_add(8) ^ round;
    hash = hash.rotate_left(27).wrapping_mul(PRIMES[0]).wrapping_add(PRIMES[3]);
    hash = (hash ^ (hash >> 33)).wrapping_mul(PRIMES[1]);
    hash = (hash ^ (hash >> 29)).wrapping_mul(PRIMES[2]);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        // From `xxhash.xxh64_intdigest((42).to_bytes(8, "little"), seed)` of the Python package.
        assert_eq!(xxh64(42, 0), 0xB556_806F_B6D1_4353);
        assert_eq!(xxh64(42, 0x1234_5678), 0xF78B_4AD5_3460_7625);
    }

    #[test]
    fn a_sketch_that_grows_and_shrinks_forgets_nothing() {
        let mut sketch = NameSketch::default();
        for (round, pages) in [10, 100, 1000, 70_000, 900, 3].into_iter().enumerate() {
            sketch.fit(pages);
            assert!(
                sketch.bytes() >= 8 * pages as usize
                    && sketch.bytes() <= 32 * pages as usize + 1024
            );
            (0..200).for_each(|name| sketch.add(name));
            assert!((0..200).all(|name| usize::from(sketch.estimate(name)) > round));
        }
        (0..300).for_each(|_| sketch.add(7));
        assert_eq!(sketch.estimate(7), 255);
        sketch.halve();
        assert_eq!(sketch.estimate(7), 127);
    }

    #[test]
    fn an_estimate_is_never_too_low_until_it_is_halved() {
        let mut sketch = Sketch::new(100);
        for page in 0..200 {
            for _ in 0..=page % 7 {
                sketch.add(page);
            }
        }
        assert!((0..200).all(|page| sketch.estimate(page) > page % 7));
        let mut least = Sketch::new(100);
        for page in 0..200 {
            (0..=page % 7).for_each(|_| least.add_least(page));
        }
        assert!((0..200).all(|page| least.estimate(page) > page % 7));
        assert!((0..200).all(|page| least.estimate(page) <= sketch.estimate(page)));
        let before = sketch.estimate(6);
        sketch.halve();
        assert_eq!(sketch.estimate(6), before / 2);
    }
}
