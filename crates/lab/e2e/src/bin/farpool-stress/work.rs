//! One thread's operations.

use std::path::Path;

use crate::io::Files;
use crate::region::{Expected, Region, fresh_stamp};
use crate::rng::Rng;
use crate::sys::{self, PAGE};

/// Kinds of operation that can be selected one by one. Reads and writes are always included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Discard,
    Free,
    Advise,
    Protect,
    Unmap,
    Remap,
    Fork,
    Spawn,
    Heap,
    Pipe,
    File,
    Direct,
    Uring,
    Merge,
}

/// The most pages that one operation uses.
const SPAN: usize = 200;
/// The number of regions that a thread starts with.
const REGIONS: usize = 4;
/// The least pages that a region keeps when its tail is unmapped. Regions of less than four times
/// as many are replaced.
const LEAST_PAGES: usize = 32;
/// The most regions of a thread. With this many, none is split any more.
const MOST_REGIONS: usize = 24;
/// The number of levels of children that fork themselves.
const FORK_DEPTH: usize = 2;

impl Kind {
    /// All kinds and their names.
    pub const ALL: [(&'static str, Kind); 14] = [
        ("discard", Kind::Discard),
        ("free", Kind::Free),
        ("advise", Kind::Advise),
        ("protect", Kind::Protect),
        ("unmap", Kind::Unmap),
        ("mremap", Kind::Remap),
        ("fork", Kind::Fork),
        ("spawn", Kind::Spawn),
        ("heap", Kind::Heap),
        ("pipe", Kind::Pipe),
        ("file", Kind::File),
        ("direct", Kind::Direct),
        ("uring", Kind::Uring),
        ("merge", Kind::Merge),
    ];

    /// Parses names separated by commas. "touch" alone selects none.
    pub fn parse_list(text: &str) -> Result<Vec<Kind>, String> {
        let names = text.split(',').filter(|name| *name != "touch" && !name.is_empty());
        let find =
            |name: &str| Kind::ALL.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
        names.map(|name| find(name).ok_or(format!("no operation is called {name}"))).collect()
    }
}

/// A thread's regions and its settings.
#[derive(Debug)]
pub struct Worker {
    rng: Rng,
    seed: u64,
    stamps: u64,
    regions: Vec<Region>,
    pages: usize,
    kinds: Vec<Kind>,
    files: Files,
    heap: Vec<(Vec<u64>, u64)>,
    steps: u64,
    depth: usize,
}

impl Worker {
    /// Maps the thread's regions, `pages` pages in total, and fills two thirds of each.
    pub fn new(seed: u64, pages: usize, kinds: Vec<Kind>, directory: &Path) -> Worker {
        let regions = (0..REGIONS).map(|_| Region::map(pages / REGIONS)).collect();
        let mut worker = Worker {
            rng: Rng::new(seed),
            seed,
            stamps: 0,
            regions,
            pages,
            kinds,
            files: Files::open(directory, seed),
            heap: Vec::new(),
            steps: 0,
            depth: 0,
        };
        for region in 0..worker.regions.len() {
            let count = worker.regions[region].pages();
            worker.write_range(region, 0, count * 2 / 3);
        }
        worker
    }

    /// Performs one operation.
    pub fn step(&mut self) {
        self.steps += 1;
        if self.kinds.is_empty() || !self.rng.one_in(4) {
            return self.touch();
        }
        let kind = self.kinds[self.rng.below(self.kinds.len())];
        match kind {
            Kind::Discard => self.discard(libc::MADV_DONTNEED),
            Kind::Free => self.discard(libc::MADV_FREE),
            Kind::Advise => self.advise(),
            Kind::Protect => self.protect(),
            Kind::Unmap => self.unmap(),
            Kind::Remap => self.remap(),
            Kind::Fork if self.rng.one_in(20) => self.fork(),
            Kind::Spawn if self.rng.one_in(20) => sys::spawn_true(),
            Kind::Fork | Kind::Spawn => self.touch(),
            Kind::Heap => self.use_heap(),
            Kind::Pipe => self.copy("a pipe", 8, Files::through_pipe),
            Kind::File => self.copy("a file", SPAN, Files::through_file),
            Kind::Direct => self.copy("O_DIRECT", SPAN, Files::through_direct),
            Kind::Uring => self.copy("io_uring", 32, Files::through_uring),
            Kind::Merge => self.merge(),
        }
    }

    /// Checks everything once more. Returns the number of operations.
    pub fn finish(self) -> u64 {
        self.check_all("checking at the end");
        for (values, stamp) in &self.heap {
            check_block(values, *stamp);
        }
        self.steps
    }

    fn check_all(&self, what: &str) {
        self.regions.iter().for_each(|region| region.check_all(what));
    }

    fn stamp(&mut self) -> u64 {
        fresh_stamp(self.seed, &mut self.stamps)
    }

    /// Picks a region and a range of at most `most` pages in it: region, first page, number of
    /// pages.
    fn pick(&mut self, most: usize) -> (usize, usize, usize) {
        let region = self.rng.below(self.regions.len());
        let pages = self.regions[region].pages();
        let count = self.rng.between(1, most.min(pages));
        (region, self.rng.below(pages - count + 1), count)
    }

    fn write_range(&mut self, region: usize, first: usize, count: usize) {
        for page in first..first + count {
            let stamp = self.stamp();
            self.regions[region].write(page, stamp);
        }
    }

    fn check_range(&self, region: usize, first: usize, count: usize, what: &str) {
        (first..first + count).for_each(|page| self.regions[region].check(page, what));
    }

    /// Reads and writes single pages and runs, forward and backward.
    fn touch(&mut self) {
        let (region, first, count) = self.pick(SPAN);
        match self.rng.below(5) {
            0 => self.check_range(region, first, count, "reading a run"),
            1 => (first..first + count)
                .rev()
                .for_each(|page| self.regions[region].check(page, "reading backward")),
            2 => {
                self.check_range(region, first, count, "reading before a write");
                self.write_range(region, first, count);
            }
            3 => self.write_range(region, first, count.min(8)),
            _ => {
                for _ in 0..16 {
                    let (region, page, _) = self.pick(1);
                    self.regions[region].check(page, "reading at random");
                }
            }
        }
    }

    fn discard(&mut self, advice: i32) {
        let (region, first, count) = self.pick(SPAN);
        let target = &mut self.regions[region];
        sys::advise(target.address(first), count * PAGE, advice);
        if advice == libc::MADV_FREE {
            target.expect_zeros_too(first, count);
        } else {
            target.expect_zeros(first, count);
        }
        if self.rng.one_in(2) {
            self.check_range(region, first, count, "reading after a discard");
        }
    }

    fn advise(&mut self) {
        let advices = [
            libc::MADV_PAGEOUT,
            libc::MADV_COLD,
            libc::MADV_WILLNEED,
            libc::MADV_HUGEPAGE,
            libc::MADV_POPULATE_READ,
            libc::MADV_POPULATE_WRITE,
        ];
        let advice = advices[self.rng.below(advices.len())];
        let (region, first, count) = self.pick(SPAN);
        let target = &self.regions[region];
        // An advice that the mapping keeps would split it, and mremap refuses split ranges.
        let whole = advice == libc::MADV_HUGEPAGE;
        let (at, pages) = if whole { (0, target.pages()) } else { (first, count) };
        sys::advise(target.address(at), pages * PAGE, advice);
        self.check_range(region, first, count, "reading after an advice");
    }

    /// Makes pages alike in a region whose pages KSM may merge, and seldom has it split them all.
    fn merge(&mut self) {
        let (region, first, count) = self.pick(SPAN);
        let stamp = self.stamp();
        let splits = self.rng.one_in(16);
        let target = &mut self.regions[region];
        let advice = if splits { libc::MADV_UNMERGEABLE } else { libc::MADV_MERGEABLE };
        sys::advise(target.address(0), target.pages() * PAGE, advice);
        (first..first + count).for_each(|page| target.write(page, stamp));
    }

    /// Removes access rights of a range, reads elsewhere, and restores them.
    fn protect(&mut self) {
        let (region, first, count) = self.pick(SPAN);
        let (start, bytes) = (self.regions[region].address(first), count * PAGE);
        let readable = self.rng.one_in(2);
        sys::protect(start, bytes, if readable { libc::PROT_READ } else { libc::PROT_NONE });
        for _ in 0..self.rng.below(20) {
            let (other, page, _) = self.pick(1);
            let inside = other == region && (first..first + count).contains(&page);
            if readable || !inside {
                self.regions[other].check(page, "reading beside protected memory");
            }
        }
        if readable {
            self.check_range(region, first, count, "reading read-only memory");
        }
        sys::protect(start, bytes, sys::READ_WRITE);
        self.check_range(region, first, count, "reading unprotected memory");
    }

    /// Unmaps the tail of a region, maps new memory over a range of it, splits it in two, or
    /// replaces a small region.
    fn unmap(&mut self) {
        let (region, first, count) = self.pick(SPAN);
        let pages = self.regions[region].pages();
        match self.rng.below(4) {
            0 if pages > count + LEAST_PAGES => self.regions[region].unmap_tail(count),
            1 => {
                let start = self.regions[region].address(first);
                sys::map(start, count * PAGE, sys::READ_WRITE, libc::MAP_FIXED);
                self.regions[region].expect_zeros(first, count);
                self.check_range(region, first, count, "reading a new mapping");
            }
            2 if self.regions.len() < MOST_REGIONS && first > 0 && pages > first + count => {
                let mut middle = self.regions[region].split_off(first);
                let tail = middle.split_off(count);
                middle.unmap();
                self.regions.push(tail);
            }
            _ => self.replace_small(),
        }
    }

    /// Replaces a region that has become small, so that the thread's size stays about the same.
    fn replace_small(&mut self) {
        let Some(small) = self.regions.iter().position(|region| region.pages() < LEAST_PAGES * 4)
        else {
            return;
        };
        let region = self.regions.swap_remove(small);
        region.check_all("reading before an unmap");
        region.unmap();
        let mapped: usize = self.regions.iter().map(Region::pages).sum();
        if mapped < self.pages || self.regions.len() < REGIONS {
            let pages = (self.pages / REGIONS).max(LEAST_PAGES);
            self.regions.push(Region::map(pages));
        }
    }

    fn remap(&mut self) {
        let region = self.rng.below(self.regions.len());
        let pages = self.regions[region].pages();
        let total: usize = self.regions.iter().map(Region::pages).sum();
        let may_grow = total < self.pages * 5 / 4;
        let larger = pages + if may_grow { self.rng.below(pages / 2 + 1) } else { 0 };
        let smaller = self.rng.between(pages / 2 + 1, pages);
        let moved = match self.rng.below(4) {
            0 => self.regions[region].remap(smaller, 0, 0),
            1 => self.regions[region].remap(larger, 0, 0),
            2 => self.regions[region].remap(larger, libc::MREMAP_MAYMOVE, 0),
            _ => {
                let pages = if self.rng.one_in(2) { larger } else { smaller };
                self.remap_fixed(region, pages)
            }
        };
        if moved && self.rng.one_in(3) {
            self.regions[region].check_all("reading after mremap");
        }
    }

    fn remap_fixed(&mut self, region: usize, pages: usize) -> bool {
        let to = sys::map(0, pages * PAGE, libc::PROT_NONE, 0);
        if self.rng.one_in(2) {
            // The move must discard what was at the target.
            sys::protect(to, pages * PAGE, sys::READ_WRITE);
            sys::words(to, 8).fill(7);
            sys::protect(to, pages * PAGE, libc::PROT_READ);
        }
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let is_moved = self.regions[region].remap(pages, flags, to);
        if !is_moved {
            self.keep_moved_part(region, to, pages);
        }
        is_moved
    }

    /// Makes what a refused move has moved all the same a region of its own. From 6.17 on, Linux
    /// moves mapping by mapping and stops at the first that it does not move with others. No page
    /// at the target could be written to before.
    fn keep_moved_part(&mut self, region: usize, to: usize, pages: usize) {
        let moved = sys::writable_pages(to, pages);
        if moved > 0 {
            assert!(moved < self.regions[region].pages(), "a refused move has moved everything");
            let rest = self.regions[region].split_off(moved);
            self.regions[region].has_moved(to);
            self.regions[region].check_all("reading after mremap moved a part");
            rest.check_all("reading what mremap left");
            self.regions.push(rest);
        }
        sys::unmap(to + moved * PAGE, (pages - moved) * PAGE);
    }

    /// Forks a child that checks and changes everything this thread has, while the parent
    /// continues.
    fn fork(&mut self) {
        if self.depth > FORK_DEPTH {
            return;
        }
        let this: *mut Worker = self;
        let pid = sys::fork(|| {
            // SAFETY: the child's copy of this worker belongs to its only thread.
            unsafe { &mut *this }.be_child();
        });
        for _ in 0..self.rng.below(30) {
            self.touch();
        }
        sys::wait_for(pid, "fork");
    }

    fn be_child(&mut self) {
        self.depth += 1;
        self.seed = crate::rng::mix(self.seed ^ self.stamps);
        self.kinds.retain(|kind| {
            !matches!(
                kind,
                Kind::Spawn | Kind::Heap | Kind::Uring | Kind::Direct | Kind::File | Kind::Pipe
            )
        });
        self.check_all("checking in a child");
        for _ in 0..self.rng.below(40) {
            self.step();
        }
        if self.depth <= FORK_DEPTH && self.rng.one_in(3) {
            self.fork();
        }
        self.check_all("checking at a child's end");
    }

    fn use_heap(&mut self) {
        if self.heap.len() > 200 || (!self.heap.is_empty() && self.rng.one_in(2)) {
            let index = self.rng.below(self.heap.len());
            let (mut values, stamp) = self.heap.swap_remove(index);
            check_block(&values, stamp);
            if self.rng.one_in(2) {
                let length = self.rng.between(1, 60_000);
                values.resize(length.max(values.len()), stamp);
                check_block(&values, stamp);
                self.heap.push((values, stamp));
            }
            return;
        }
        let (stamp, length) = (self.stamp(), self.rng.between(1, 40_000));
        self.heap.push((vec![stamp; length], stamp));
    }

    /// Copies pages from one place to another through the kernel.
    fn copy(&mut self, what: &str, most: usize, through: fn(&mut Files, usize, usize, usize)) {
        let (from, first, count) = self.pick(most);
        let (to, target, room) = self.pick(most);
        let count = count.min(room);
        let overlap = from == to && first < target + count && target < first + count;
        if overlap {
            return;
        }
        for page in first..first + count {
            // A page that may become zeros must not change between its copy and the check.
            if self.regions[from].expected(page).or_zero {
                let stamp = self.stamp();
                self.regions[from].write(page, stamp);
            }
        }
        let (source, goal) = (self.regions[from].address(first), self.regions[to].address(target));
        through(&mut self.files, source, goal, count);
        for offset in 0..count {
            let expected = self.regions[from].expected(first + offset);
            self.regions[to].expect(target + offset, Expected { or_zero: false, ..expected });
        }
        self.check_range(to, target, count, what);
        self.check_range(from, first, count, what);
    }
}

fn check_block(values: &[u64], stamp: u64) {
    if values.iter().any(|value| *value != stamp) {
        sys::say(&format!("WRONG DATA in the heap at {:p}, stamp {stamp:#x}\n", values.as_ptr()));
        sys::exit(crate::region::WRONG_DATA);
    }
}
