//! Pages that are moved out unchanged, changed, and changed back to earlier contents.

use farpool_units::exactly;

use crate::forks::fork_once;
use crate::memory::*;

const PAGES: usize = (48 << 20) / PAGE;
const WORDS: usize = PAGE / 8;
/// The number of contents of a page: so few that a page often returns to contents that the blade
/// has, or once had.
const VERSIONS: u64 = 3;
const STEPS: usize = 120_000;
const STEPS_TO_FORK: usize = 30_000;

/// Memory in which every page has one of a few versions, and the version of each page.
struct Versioned {
    memory: &'static mut [u64],
    versions: Vec<u8>,
}

fn word(page: usize, version: u8, at: usize) -> u64 {
    (page as u64 * 8 + u64::from(version)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64
}

impl Versioned {
    fn new() -> Versioned {
        let start = map(0, PAGES * PAGE, READ_WRITE, 0);
        // SAFETY: the whole of a fresh mapping, which is never unmapped.
        let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u64, PAGES * WORDS) };
        let mut new = Versioned { memory, versions: vec![0; PAGES] };
        (0..PAGES).for_each(|page| new.write(page, 0));
        new
    }

    fn write(&mut self, page: usize, version: u8) {
        self.versions[page] = version;
        for (at, value) in self.memory[page * WORDS..][..WORDS].iter_mut().enumerate() {
            *value = word(page, version, at);
        }
    }

    fn check(&self, page: usize) {
        let version = self.versions[page];
        for (at, value) in self.memory[page * WORDS..][..WORDS].iter().enumerate() {
            if *value != word(page, version, at) {
                wrong_data(&format!("page {page}, word {at}: {value:#x}, version {version}"));
            }
        }
    }

    /// Reads pages at random, and writes some of them, some with the contents they have already.
    fn work(&mut self, steps: usize, random: &mut u64) {
        for _ in 0..steps {
            *random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let page = (*random >> 33) as usize % PAGES;
            self.check(page);
            match (*random >> 24) % 8 {
                0 | 1 => self.write(page, exactly((*random >> 16) % VERSIONS)),
                2 => self.write(page, self.versions[page]),
                _ => {}
            }
        }
    }
}

/// Uses more memory than the limit, at random, also in forked children.
pub fn unchanged_pages() {
    let (mut memory, mut random) = (Versioned::new(), 17);
    for _ in 0..STEPS / STEPS_TO_FORK {
        memory.work(STEPS_TO_FORK, &mut random);
        fork_once(|| {
            memory.work(STEPS_TO_FORK / 10, &mut random);
            (0..PAGES).for_each(|page| memory.check(page));
        });
    }
    (0..PAGES).for_each(|page| memory.check(page));
}
