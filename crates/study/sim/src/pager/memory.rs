//! Pages, chunks and the victim buffer of a modelled pager.
//!
//! A page is untouched, resident, a victim in the buffer, or far. A chunk's victims lie in one
//! tray; a chunk with a tray is not evicted from. Taking a victim's frame leaves its page far.

use std::collections::{HashMap, VecDeque};

use farpool_policy::{CHUNK_PAGES, CleanEstimator, SAMPLED_FETCHES, SweepPolicy};
use farpool_units::exactly;

use super::Events;

/// Pages of a superpage; chunks are numbered superpage by superpage.
const SUPERPAGE_PAGES: usize = SUPERPAGE_CHUNKS * CHUNK_PAGES as usize;
const SUPERPAGE_CHUNKS: usize = 64;
/// A chunk that the trace does not use.
const NONE: u32 = u32::MAX;

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Untouched,
    Resident,
    Victim,
    Far,
}

#[derive(Debug, Clone, Copy, Default)]
struct Page {
    phase: Phase,
    /// The page was written since it was fetched, or was never far.
    is_changed: bool,
    /// The pager remembers its content as it was fetched.
    is_remembered: bool,
}

#[derive(Debug, Clone)]
struct Chunk {
    pages: [u32; CHUNK_PAGES as usize],
    resident: u64,
    hot: u64,
    /// The chunk's victims in the buffer.
    victims: u64,
    in_buffer: bool,
}

/// Returns the bytes that a pager's model takes for pages with these numbers, which must ascend;
/// more if they are scattered.
#[must_use]
pub fn memory_bytes(rising_page_numbers: impl Iterator<Item = u64>) -> u64 {
    const PAGE: u64 = (size_of::<Page>() + size_of::<u32>() + size_of::<u8>()) as u64;
    const CHUNK: u64 = (size_of::<Chunk>() + size_of::<u32>()) as u64;
    // Held twice, by address and in order of first touch; and by number in a map.
    const SUPERPAGE: u64 = (2 * size_of::<[u32; SUPERPAGE_CHUNKS]>() + 64) as u64;
    let (mut bytes, mut last) = (0, None);
    for number in rising_page_numbers {
        let chunk = number / u64::from(CHUNK_PAGES);
        let superpage = number / SUPERPAGE_PAGES as u64;
        bytes += PAGE;
        bytes += if last.is_none_or(|(last, _)| last != chunk) { CHUNK } else { 0 };
        bytes += if last.is_none_or(|(_, last)| last != superpage) { SUPERPAGE } else { 0 };
        last = Some((chunk, superpage));
    }
    bytes
}

/// The memory of a modelled pager; see the module's description.
#[derive(Debug)]
pub(super) struct Memory {
    pages: Vec<Page>,
    /// The chunk of each page, and its bit there.
    chunk_of: Vec<u32>,
    bit_of: Vec<u8>,
    chunks: Vec<Chunk>,
    /// The superpage of each chunk, as an index.
    superpage_of: Vec<u32>,
    /// Chunks by the sweep's numbers: superpages in the order of their first touch.
    by_number: Vec<[u32; SUPERPAGE_CHUNKS]>,
    /// Chunks of each superpage, and its place in `by_number` once it has one.
    superpages: Vec<([u32; SUPERPAGE_CHUNKS], Option<u32>)>,
    /// Chunks with a tray in the buffer, the oldest first.
    buffer: VecDeque<u32>,
    free_frames: u64,
    resident_pages: u64,
    /// Pages that have been touched, wherever they are now.
    touched_pages: u64,
    clean: CleanEstimator,
    remembers_all: bool,
    remembers_runs: bool,
    fetched: u32,
}

impl Memory {
    /// Creates the memory of pages with these numbers, all untouched.
    pub(super) fn new(page_numbers: &[u64], remembers_runs: bool) -> Self {
        let mut superpage_index: HashMap<u64, u32> = HashMap::new();
        let mut memory = Self {
            pages: vec![Page::default(); page_numbers.len()],
            chunk_of: Vec::with_capacity(page_numbers.len()),
            bit_of: Vec::with_capacity(page_numbers.len()),
            chunks: Vec::new(),
            superpage_of: Vec::new(),
            by_number: Vec::new(),
            superpages: Vec::new(),
            buffer: VecDeque::new(),
            free_frames: 0,
            resident_pages: 0,
            touched_pages: 0,
            clean: CleanEstimator::default(),
            remembers_all: true,
            remembers_runs,
            fetched: 0,
        };
        let pages = SUPERPAGE_PAGES as u64;
        for (dense, number) in (0..).zip(page_numbers) {
            let superpage = *superpage_index.entry(number / pages).or_insert_with(|| {
                memory.superpages.push(([NONE; SUPERPAGE_CHUNKS], None));
                exactly(memory.superpages.len() - 1)
            });
            memory.place(dense, exactly(number % pages), superpage);
        }
        memory
    }

    fn place(&mut self, dense: u32, within: usize, superpage: u32) {
        let (place, bit) = (within / CHUNK_PAGES as usize, within % CHUNK_PAGES as usize);
        let slot = &mut self.superpages[superpage as usize].0[place];
        if *slot == NONE {
            *slot = exactly(self.chunks.len());
            assert!(*slot != NONE, "no chunk has the number that means none");
            let pages = [NONE; CHUNK_PAGES as usize];
            self.chunks.push(Chunk { pages, resident: 0, hot: 0, victims: 0, in_buffer: false });
            self.superpage_of.push(superpage);
        }
        let chunk = *slot;
        self.chunks[chunk as usize].pages[bit] = dense;
        self.chunk_of.push(chunk);
        self.bit_of.push(exactly(bit));
    }

    pub(super) fn phase(&self, page: u32) -> Phase {
        self.pages[page as usize].phase
    }

    pub(super) fn resident_pages(&self) -> u64 {
        self.resident_pages
    }

    /// Returns the pages that have been touched, wherever they are now.
    pub(super) fn touched_pages(&self) -> u64 {
        self.touched_pages
    }

    /// Returns the frames in the victim buffer that can be taken.
    pub(super) fn free_frames(&self) -> u64 {
        self.free_frames
    }

    /// Returns the number of chunks that the sweep has to cover.
    pub(super) fn chunk_count(&self) -> usize {
        self.by_number.len() * SUPERPAGE_CHUNKS
    }

    /// Returns the sweep's number of a page's chunk.
    pub(super) fn chunk_number(&self, page: u32) -> Option<usize> {
        let chunk = self.chunk_of[page as usize];
        let (chunks, number) = &self.superpages[self.superpage_of[chunk as usize] as usize];
        let place = chunks.iter().position(|it| *it == chunk)?;
        number.map(|number| number as usize * SUPERPAGE_CHUNKS + place)
    }

    /// Uses the page. True if it was resident.
    pub(super) fn refer(&mut self, page: u32, is_write: bool) -> bool {
        let page = &mut self.pages[page as usize];
        page.is_changed |= is_write;
        page.phase == Phase::Resident
    }

    /// Makes the page resident; it may be in any phase but a victim's. `in_run` says that it
    /// arrived in a run.
    pub(super) fn settle(&mut self, page: u32, in_run: bool) {
        let (chunk, bit) = (self.chunk_of[page as usize], self.bit_of[page as usize]);
        self.number_superpage(chunk);
        let entry = &mut self.chunks[chunk as usize];
        assert!(
            (entry.resident | entry.victims) & 1 << bit == 0,
            "a page that becomes resident has no frame yet"
        );
        entry.resident |= 1 << bit;
        self.resident_pages += 1;
        let state = &mut self.pages[page as usize];
        if state.phase == Phase::Far {
            state.is_changed = false;
            state.is_remembered = (self.remembers_runs || !in_run) && {
                self.fetched = (self.fetched + 1) % SAMPLED_FETCHES;
                self.remembers_all || self.fetched == 0
            };
        } else {
            state.is_changed = true;
            self.touched_pages += 1;
        }
        state.phase = Phase::Resident;
    }

    fn number_superpage(&mut self, chunk: u32) {
        let (chunks, number) = &mut self.superpages[self.superpage_of[chunk as usize] as usize];
        if number.is_none() {
            *number = Some(exactly(self.by_number.len()));
            self.by_number.push(*chunks);
        }
    }

    /// Takes the page back from the buffer for the program; the next eviction spares it.
    pub(super) fn take_back(&mut self, page: u32) {
        let (chunk, bit) = (self.chunk_of[page as usize], self.bit_of[page as usize]);
        let entry = &mut self.chunks[chunk as usize];
        assert!(entry.victims & 1 << bit != 0, "a page that is taken back is in the buffer");
        assert!(self.free_frames > 0, "the frames of victims are counted");
        entry.victims &= !(1 << bit);
        entry.resident |= 1 << bit;
        entry.hot |= 1 << bit;
        self.pages[page as usize].phase = Phase::Resident;
        self.free_frames -= 1;
        self.resident_pages += 1;
    }

    /// Evicts the victims that the sweep chooses from a chunk. Returns their number.
    pub(super) fn evict_chunk(
        &mut self,
        number: usize,
        sweep: &mut impl SweepPolicy,
        events: &mut Events,
    ) -> u64 {
        let chunk = self.by_number[number / SUPERPAGE_CHUNKS][number % SUPERPAGE_CHUNKS];
        let Some(entry) = self.chunks.get_mut(chunk as usize) else { return 0 };
        if entry.in_buffer || entry.resident == 0 {
            return 0;
        }
        let choice = sweep.choose(number, entry.resident, entry.hot);
        entry.hot &= !choice.clear_hot;
        let taken = choice.take & entry.resident;
        if taken == 0 {
            return 0;
        }
        assert!(entry.victims == 0, "a chunk without a tray has no victims");
        entry.resident &= !taken;
        (entry.victims, entry.in_buffer) = (taken, true);
        let pages = entry.pages;
        for bit in bits(taken) {
            self.move_out(pages[bit], events);
        }
        self.buffer.push_back(chunk);
        let moved = u64::from(taken.count_ones());
        assert!(self.resident_pages >= moved, "pages that are moved out were resident");
        self.free_frames += moved;
        self.resident_pages -= moved;
        events.evictions += moved;
        events.evicted_chunks += 1;
        moved
    }

    fn move_out(&mut self, page: u32, events: &mut Events) {
        let state = &mut self.pages[page as usize];
        assert!(state.phase == Phase::Resident, "only resident pages are moved out");
        let is_unchanged = state.is_remembered && !state.is_changed;
        if state.is_remembered {
            self.remembers_all = self.clean.compared(is_unchanged);
        }
        if is_unchanged {
            events.clean_drops += 1;
        } else {
            events.pages_written += 1;
        }
        // A written page is identical on the blade; a page taken back is not compared again.
        (state.phase, state.is_remembered) = (Phase::Victim, is_unchanged);
    }

    /// Takes up to `most` frames out of the oldest tray that has any. Returns their number.
    pub(super) fn take_frames(&mut self, most: u64) -> u64 {
        while let Some(&chunk) = self.buffer.front() {
            let entry = &mut self.chunks[chunk as usize];
            assert!(entry.in_buffer, "a chunk in the queue of trays has one");
            let (pages, mut taken) = (entry.pages, 0);
            for bit in bits(entry.victims) {
                if taken == most {
                    break;
                }
                entry.victims &= !(1 << bit);
                let page = &mut self.pages[pages[bit] as usize];
                assert!(page.phase == Phase::Victim, "only a victim's frame is handed out");
                page.phase = Phase::Far;
                taken += 1;
            }
            if entry.victims == 0 {
                entry.in_buffer = false;
                self.buffer.pop_front();
            }
            if taken > 0 {
                assert!(self.free_frames >= taken, "the frames of victims are counted");
                self.free_frames -= taken;
                return taken;
            }
        }
        0
    }

    /// Frees whole trays, the oldest first, until at least `least` frames are released. Returns the
    /// frames released.
    pub(super) fn release(&mut self, least: u64) -> u64 {
        let mut released = 0;
        while released < least {
            match self.take_frames(u64::from(CHUNK_PAGES)) {
                0 => break,
                frames => released += frames,
            }
        }
        released
    }
}

/// Returns the set bits, the lowest first.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        bit
    })
}
