//! Content-based page sharing as section 3 of HPL-2011-31 describes it, on pages with contents.
//!
//! A hypervisor scans the memory of all its virtual machines. Pages with equal bytes, found by
//! their hash and compared as a whole, are mapped to one frame, and the other frames are freed. A
//! write to a frame that several pages share gives the page a frame of its own again.
//!
//! The contents are those that section 4 gives mstress: half of the hot pages can be shared, two
//! copies of each. Whether two machines hold the same is not printed; both answers are simulated.
//! Writes do not change contents: else what can be shared would be used up by them.

use std::collections::HashMap;
use std::hash::Hasher;

use farpool_policy::Rng;
use farpool_units::{PAGE_BYTES, exactly};
use twox_hash::XxHash3_64;

/// Passes over all memory in a run, one after the other without a pause: assumed.
pub(super) const SCANS: usize = 10;
/// Where the references that write begin their random numbers.
const WRITES_SEED: u64 = 7;

/// Which machines hold equal pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alike {
    /// Both copies of a page are in one machine, and no other machine has it.
    InOneMachine,
    /// Every machine has both copies of the same pages.
    InAllMachines,
}

/// Returns what each page of each machine holds, machine by machine: a number for each content.
///
/// The number is that of the first page with this content.
pub(super) fn mstress_contents(pages: u32, machines: u32, alike: Alike) -> Vec<u32> {
    let hot = pages / 10;
    let shareable = hot / 4 * 2;
    let content = |machine: u32, page: u32| match alike {
        _ if page >= shareable => machine * pages + page,
        Alike::InOneMachine => machine * pages + page / 2 * 2,
        Alike::InAllMachines => page / 2 * 2,
    };
    (0..machines).flat_map(|machine| (0..pages).map(move |page| content(machine, page))).collect()
}

/// Returns the bytes of a page with this content.
fn bytes_of(content: u32) -> Vec<u8> {
    let mut rng = Rng::new(content.into());
    (0..PAGE_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
}

fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(0);
    hasher.write(bytes);
    hasher.finish()
}

/// The memory of a server with virtual machines.
pub(super) struct Host {
    /// What each page holds, and the hash of its bytes.
    contents: Vec<u32>,
    hashes: Vec<u64>,
    /// The frame of each page.
    frames: Vec<u32>,
    /// What each frame holds, and how many pages share it; 0 for a free frame.
    held: Vec<u32>,
    sharers: Vec<u32>,
    free: Vec<u32>,
    /// Shared pages that were given a frame of their own by a write.
    broken: u64,
}

impl Host {
    /// Makes a server where each page has a frame of its own; `hash` of a page's bytes finds
    /// candidates for sharing.
    pub(super) fn new(contents: Vec<u32>, hash: fn(&[u8]) -> u64) -> Self {
        let frames: Vec<u32> = (0..).take(contents.len()).collect();
        Self {
            hashes: contents.iter().map(|&content| hash(&bytes_of(content))).collect(),
            held: contents.clone(),
            sharers: vec![1; contents.len()],
            contents,
            frames,
            free: Vec::new(),
            broken: 0,
        }
    }

    /// Pages that need no frame, since they share another one's.
    pub(super) fn saved(&self) -> usize {
        self.free.len()
    }

    /// Scans all pages once and shares those that are equal.
    pub(super) fn scan(&mut self) {
        let mut seen: HashMap<u64, Vec<u32>> = HashMap::new();
        for page in 0..self.frames.len() {
            let frame = self.frames[page];
            let candidates = seen.entry(self.hashes[page]).or_default();
            if candidates.contains(&frame) {
                continue;
            }
            let own = self.contents[page];
            let is_equal = |&&it: &&u32| bytes_of(self.held[it as usize]) == bytes_of(own);
            match candidates.iter().find(is_equal) {
                Some(&other) => self.share(page, other),
                None => candidates.push(frame),
            }
        }
    }

    fn share(&mut self, page: usize, frame: u32) {
        let old = std::mem::replace(&mut self.frames[page], frame);
        self.sharers[frame as usize] += 1;
        self.sharers[old as usize] -= 1;
        if self.sharers[old as usize] == 0 {
            self.free.push(old);
        }
    }

    /// Writes to a page: one that shares its frame is copied first.
    pub(super) fn write(&mut self, page: usize) {
        let frame = self.frames[page] as usize;
        if self.sharers[frame] < 2 {
            return;
        }
        let own = self.free.pop().expect("each sharer beyond the first left a frame free");
        self.sharers[frame] -= 1;
        self.sharers[own as usize] = 1;
        self.held[own as usize] = self.contents[page];
        self.frames[page] = own;
        self.broken += 1;
    }
}

/// What content sharing did in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Saved {
    /// Pages that the first pass over all memory saved.
    pub found: usize,
    /// Pages saved on average over the run, in which passes and writes alternate.
    pub kept: usize,
    /// Pages that writes gave a frame of their own.
    pub broken: u64,
}

/// Shares the pages of machines while they make these references, of which `write_permille` in a
/// thousand write.
pub(super) fn run(contents: Vec<u32>, references: &[u32], write_permille: u32) -> Saved {
    let mut host = Host::new(contents, hash_of);
    let mut rng = Rng::new(WRITES_SEED);
    let (mut found, mut sum) = (None, 0u128);
    for some in references.chunks(references.len().div_ceil(SCANS).max(1)) {
        host.scan();
        found = found.or(Some(host.saved()));
        for &page in some {
            if rng.below(1000) < write_permille {
                host.write(page as usize);
            }
            sum += host.saved() as u128;
        }
    }
    let kept = exactly(sum / references.len().max(1) as u128);
    Saved { found: found.unwrap_or(0), kept, broken: host.broken }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distinct contents, counted another way.
    fn distinct(contents: &[u32]) -> usize {
        contents.iter().collect::<std::collections::HashSet<_>>().len()
    }

    #[test]
    fn half_of_the_hot_pages_have_a_twin_in_their_machine_or_in_all() {
        for alike in [Alike::InOneMachine, Alike::InAllMachines] {
            let contents = mstress_contents(400, 3, alike);
            let twins = |page: usize| contents.iter().filter(|it| **it == contents[page]).count();
            let expected = if alike == Alike::InOneMachine { 2 } else { 6 };
            for page in 0..1200 {
                let is_shareable = page % 400 < 20;
                assert_eq!(twins(page), if is_shareable { expected } else { 1 }, "{page}");
            }
        }
    }

    #[test]
    fn equal_pages_share_a_frame_until_one_is_written() {
        for alike in [Alike::InOneMachine, Alike::InAllMachines] {
            let contents = mstress_contents(400, 3, alike);
            let mut host = Host::new(contents.clone(), hash_of);
            assert_eq!(host.saved(), 0);
            host.scan();
            let all = contents.len() - distinct(&contents);
            assert_eq!(host.saved(), all);
            host.scan();
            assert_eq!(host.saved(), all, "a second pass finds nothing more");
            host.write(0);
            host.write(0);
            host.write(399);
            assert_eq!((host.saved(), host.broken), (all - 1, 1), "page 399 shares nothing");
            host.scan();
            assert_eq!(host.saved(), all);
        }
    }

    #[test]
    fn pages_of_one_hash_are_shared_only_if_all_their_bytes_are_equal() {
        let contents = mstress_contents(80, 2, Alike::InAllMachines);
        let expected = contents.len() - distinct(&contents);
        let mut host = Host::new(contents, |_| 1);
        host.scan();
        assert_eq!(host.saved(), expected);
        assert!(host.frames.iter().zip(&host.contents).all(|(&frame, content)| {
            bytes_of(host.held[frame as usize]) == bytes_of(*content)
        }));
    }

    #[test]
    fn writes_take_back_what_was_saved_until_the_next_pass() {
        let contents = mstress_contents(400, 1, Alike::InOneMachine);
        let references: Vec<u32> = (0..4000).map(|at| at % 20).collect();
        let read = run(contents.clone(), &references, 0);
        assert_eq!(read, Saved { found: 10, kept: 10, broken: 0 });
        let some = run(contents.clone(), &references, 10);
        assert!(some.found == 10 && some.kept < 10 && some.kept > 3, "{some:?}");
        let all = run(contents, &references, 1000);
        // Each pass shares ten pages again, and the first write to one of each two breaks them.
        assert_eq!((all.found, all.kept, all.broken), (10, 0, 10 * SCANS as u64));
    }
}
