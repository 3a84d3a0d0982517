//! The thread that packs what is cold, and what it can when memory is short.
//!
//! A page's bytes are copied and packed without a lock. Whoever reads or writes the page meanwhile
//! marks it, and then it stays as it is.

use super::codec::{Codec, filled_with};
use super::frames::FrameId;
use super::packing::{PackedSuperpage, Packing};
use super::pages::{PIECE_PAGES, Packed};
use super::slabs::Thin;
use crate::memory::bits::append;
use crate::memory::given::Paged;
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pieces of a superpage.
const PIECES: u32 = PAGES_PER_SUPERPAGE / PIECE_PAGES;
/// How long it rests after memory was short and nothing could be packed, and at most after several
/// times.
const FIRST_REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_secs(1);
/// For each moment that it packs what is cold it rests three: it takes a quarter of a processor.
const REST_PER_WORK: u32 = 3;
/// The least time that a page is not used before it is packed, whatever is configured: looking for
/// such pages without a pause would take a processor.
const LEAST_COLD: Duration = Duration::from_millis(10);
/// Longest sleep with nothing to do.
const SLEEP: Duration = Duration::from_secs(1);

/// Everything that packing needs.
#[derive(Debug)]
pub(crate) struct Packer {
    packing: Arc<Packing>,
    codec: Codec,
    page: Box<[u8; PAGE_BYTES]>,
    /// The superpage that is next.
    hand: u32,
    /// A page that was not used for so long is packed, at the latest after twice that.
    cold: Duration,
    round_began: Instant,
    /// When it looks for cold pages again.
    next_look: Instant,
    /// When it tries again to make room.
    next_try: Instant,
    rest: Duration,
}

/// What became of pages.
#[derive(Debug, Default)]
struct PackedPages {
    packed: Vec<(u32, Packed)>,
    refused: Vec<u32>,
}

impl Packer {
    pub(super) fn new(packing: Arc<Packing>, cold: Duration) -> Packer {
        let now = Instant::now();
        let cold = cold.max(LEAST_COLD);
        Packer {
            packing,
            codec: Codec::new(),
            page: Box::new([0; PAGE_BYTES]),
            hand: 0,
            cold,
            round_began: now,
            next_look: now + cold,
            next_try: now,
            rest: FIRST_REST,
        }
    }

    /// Packs until the blade ends.
    pub(crate) fn run(mut self) {
        while !self.packing.is_ending.load(Ordering::Acquire) {
            let sleep = if self.packing.room.is_sweeping() {
                self.make_room_when_worth_it()
            } else {
                self.look_for_cold()
            };
            self.packing.room.wait_for_bell(None, sleep);
        }
    }

    /// Returns how long there is nothing to do.
    fn make_room_when_worth_it(&mut self) -> Duration {
        let now = Instant::now();
        if now < self.next_try {
            return self.next_try - now;
        }
        if self.make_room() {
            self.packing.is_full.store(false, Ordering::Release);
            self.rest = FIRST_REST;
            return if self.packing.room.end_sweep() { Duration::ZERO } else { FIRST_REST };
        }
        let is_waited_for = self.packing.room.has_waiting();
        if is_waited_for && !self.packing.is_full.swap(true, Ordering::AcqRel) {
            self.say_full();
        }
        // Who waits is told that there is none.
        self.packing.room.wake_waiting();
        self.next_try = Instant::now() + self.rest;
        self.rest = (self.rest * 2).min(LONGEST_REST);
        self.next_try - now
    }

    fn say_full(&self) {
        if self.packing.log.may_write(self.packing.started.elapsed()) {
            tracing::warn!(
                memory_bytes = self.packing.room.taken_bytes(),
                "memory is full, and nothing more can be packed: pages are refused until some are \
                 freed; lend less, or give the blade more memory"
            );
        }
    }

    /// Packs until enough is free. False if two rounds were not enough: in the first, pages may
    /// only be found to have been used.
    fn make_room(&mut self) -> bool {
        let packing = Arc::clone(&self.packing);
        let is_enough = || packing.room.wanted_pages() == 0;
        for _ in 0..2 * packing.superpages.count() {
            if is_enough() || packing.is_ending.load(Ordering::Acquire) {
                return true;
            }
            self.pack_next(|| !is_enough());
        }
        while !is_enough() && packing.change_frames(|frames| frames.evacuate(Thin::Any)) {}
        is_enough()
    }

    /// Packs what is cold of a superpage, when that is due. Returns how long there is nothing to
    /// do.
    fn look_for_cold(&mut self) -> Duration {
        let begin = Instant::now();
        if begin < self.next_look {
            return (self.next_look - begin).min(SLEEP);
        }
        self.pack_next(|| true);
        self.next_look = begin + begin.elapsed() * (1 + REST_PER_WORK);
        if self.hand == 0 {
            while self.packing.change_frames(|frames| frames.evacuate(Thin::HalfEmpty)) {}
            self.next_look = self.next_look.max(self.round_began + self.cold);
            self.round_began = self.next_look;
        }
        self.next_look.saturating_duration_since(Instant::now()).min(SLEEP)
    }

    /// Packs what is cold of the superpage that the hand points to, as long as that is wanted. The
    /// hand moves on. Between pieces it is let go: its client may have freed it, and another one
    /// wait for it.
    fn pack_next(&mut self, is_wanted: impl Fn() -> bool) {
        let number = self.hand;
        self.hand = (number + 1) % self.packing.superpages.count();
        for piece in 0..PIECES {
            match self.packing.superpages.get(number) {
                Some(superpage) if is_wanted() => self.pack_piece(&superpage, piece),
                _ => return,
            }
        }
    }

    fn pack_piece(&mut self, superpage: &PackedSuperpage, piece: u32) {
        let cold = superpage.pages().cold(piece);
        if cold.is_empty() {
            return;
        }
        let pages = self.pack_pages(superpage, &cold);
        let mut unused = Vec::new();
        let freed = superpage.change_pages(|of| {
            let mut dropped = Vec::new();
            for (page, packed) in pages.packed {
                if of.pack(page, packed) {
                    self.packing.counters.count(packed);
                    append(&mut dropped, page);
                } else if let Packed::Frame(id) = packed {
                    unused.push(id);
                }
            }
            pages.refused.iter().for_each(|page| of.refuse(*page));
            superpage.drop_memory(&dropped)
        });
        self.packing.room.give_back(freed);
        self.packing.release_frames(unused);
    }

    /// What the pages are packed to.
    fn pack_pages(&mut self, superpage: &PackedSuperpage, pages: &[u32]) -> PackedPages {
        let mut result = PackedPages::default();
        for page in pages {
            // What a client writes meanwhile is garbled here: it is used then.
            superpage.slice(&(*page..page + 1)).read(|it| self.page.copy_from_slice(it));
            match filled_with(&self.page) {
                Some(0) => result.packed.push((*page, Packed::Not)),
                Some(word) => result.packed.push((*page, Packed::Filled(word))),
                None => match self.frame_of(superpage) {
                    Some(id) => result.packed.push((*page, Packed::Frame(id))),
                    None => result.refused.push(*page),
                },
            }
        }
        result
    }

    /// The frame for the page that was copied; None if it is not worth one.
    fn frame_of(&mut self, superpage: &PackedSuperpage) -> Option<FrameId> {
        let (packing, domain) = (&self.packing, superpage.domain());
        let digest = packing.digest_of(&self.page);
        let shared = packing.change_frames(|all| all.share(domain, digest, &self.page));
        if shared.is_some() {
            return shared;
        }
        let bytes = match self.codec.compress(&self.page) {
            Some(bytes) => bytes,
            // Others may have the same.
            None if domain.is_group() => self.page.as_slice(),
            None => return None,
        };
        packing.change_frames(|all| all.insert(domain, digest, bytes))
    }
}
