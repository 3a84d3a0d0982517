//! Reads far memory before the program needs it, and compares it with its seals.
//!
//! Memory that nobody reads for days may be damaged in every copy before anybody knows. So pages
//! are read now and then ([`Mover::verify`]), some at a time, from each place that they have; and
//! at once where a lane found a page that was never stored ([`crate::damage`]). A damaged copy of a
//! superpage of which another one is whole is given up, and made anew like one whose blade was
//! lost.
//!
//! A page that is written meanwhile never counts as damaged: one that does not fit its seal is read
//! again once everything that was on its way has ended, and counts only if its seal then stays what
//! it was.
//!
//! Parity has no seals: it is compared with what was last written of it ([`crate::digests`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use farpool_units::{PAGE_BYTES, exactly};
use farpool_wire::{ErrorCode, PageNumber};

use super::{BATCH_PAGES, Mover};
use crate::damage::{Suspect, is_damage};
use crate::map::Place;
use crate::parity::{Group, Row, Strip};
use crate::seals::Seals;
use crate::shared::SegmentState;
use crate::types::Access;
use crate::{BladeIndex, PageError, Pool, Redundancy, SUPERPAGE_PAGES, SegmentHandle, SegmentPage};

/// Most pages that one step verifies, 1 MiB; a step that is to verify more verifies these.
pub const VERIFY_LIMIT_PAGES: usize = BATCH_PAGES;

/// How far a pass over all far memory has come. A pass begins at the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyPoint {
    /// The copy's number among those of all segments.
    copy: usize,
    page: u32,
}

/// The result of one step.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Where the pass goes on. None: it is over.
    pub next: Option<VerifyPoint>,
    /// Pages that are what was stored, of each copy that was read.
    pub pages: u64,
    /// What is not.
    pub damages: Vec<Damage>,
}

/// Pages of a superpage that one blade has not as they were stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The blade.
    pub blade: BladeIndex,
    /// The number of the segment.
    pub segment: usize,
    /// The first damaged page of the segment.
    pub page: u32,
    /// Damaged pages.
    pub pages: u32,
    /// What becomes of them.
    pub outcome: DamageOutcome,
}

/// What becomes of a damaged superpage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamageOutcome {
    /// It was given up, and is copied anew from another blade; or it is parity, made anew where it
    /// lies.
    Replaced,
    /// Its pages are read from other copies, though it cannot be given up: it is frozen, or the
    /// others are not whole either.
    Kept,
    /// There is no other copy: what was damaged is lost, unless the program writes it again.
    Lost,
}

/// Pages of one superpage at one place.
#[derive(Debug)]
struct Piece {
    copy: SegmentHandle,
    superpage: u32,
    place: Place,
    seals: Arc<Seals>,
    /// Numbers in the segment.
    pages: Vec<u32>,
}

/// What was found in one superpage.
#[derive(Debug, Default)]
struct Found {
    verified: u64,
    damaged: Vec<u32>,
    /// Some could not be read.
    is_partial: bool,
}

impl Piece {
    /// Where the pass goes on after it.
    fn end(&self) -> VerifyPoint {
        let last = *self.pages.last().expect("a piece has pages");
        let copy = self.copy.index();
        match last.checked_add(1) {
            Some(page) => VerifyPoint { copy, page },
            None => VerifyPoint { copy: copy + 1, page: 0 },
        }
    }
}

impl Pool {
    /// True if a lane found damage that nobody has looked at. Lock-free.
    pub fn has_suspects(&self) -> bool {
        self.shared.suspects.is_any()
    }
}

impl Mover<'_> {
    /// Verifies up to `limit` pages, at most [`VERIFY_LIMIT_PAGES`], from a point on; before that a
    /// superpage that a lane suspects. Pages that are not sealed cannot be verified, nor those on
    /// lost blades.
    pub fn verify(&mut self, from: VerifyPoint, limit: usize) -> Verified {
        self.while_nothing_else_moves(|mover| {
            mover.pool.ledger().free_rest();
            let mut verified = Verified::default();
            // Of what was told already lanes may remind again and again.
            let suspects = std::iter::from_fn(|| mover.pool.shared.suspects.take());
            let kept = &mover.kept;
            let suspect = suspects.into_iter().find(|suspect| !kept.contains(suspect));
            if let Some(suspect) = suspect {
                mover.verify_superpage(suspect, &mut verified);
            }
            if from == VerifyPoint::default() {
                mover.kept.clear(); // each pass tells of them
            }
            let Some(piece) = next_piece(mover.pool, from, limit.clamp(1, BATCH_PAGES)) else {
                return verified;
            };
            verified.next = Some(piece.end());
            if mover.pool.shared.is_parity(piece.copy) {
                mover.verify_parity(&piece, &mut verified);
                return verified;
            }
            let suspect = Suspect { copy: piece.copy, superpage: piece.superpage };
            let found = mover.check(&piece);
            match found.damaged.is_empty() || mover.kept.contains(&suspect) {
                true => verified.pages += found.verified,
                false => mover.verify_superpage(suspect, &mut verified),
            }
            verified
        })
    }

    /// Verifies pages of a group's parity. The row of one that is not what was written is in doubt.
    fn verify_parity(&mut self, piece: &Piece, verified: &mut Verified) {
        let pool = self.pool;
        let group = Group::of(Strip { strand: piece.copy, superpage: piece.superpage });
        let (mut damaged, is_writable) = (Vec::new(), self.is_writable(piece.copy));
        self.batches[0].reserve(piece.pages.len());
        let results = self.read_piece(piece);
        for (at, page) in piece.pages.iter().enumerate() {
            if results[at].is_err() || self.fits(piece, *page, at) {
                verified.pages += u64::from(results[at].is_ok());
                continue;
            }
            // It may just have been written: that ends before its row is free.
            let row = group.row(page % SUPERPAGE_PAGES);
            let Some(_lock) = self.lock_row(row, true) else { continue };
            if piece.seals.is_parity_doubtful(*page) {
                continue; // nobody knows what it should be
            }
            let again = Piece { pages: vec![*page], seals: Arc::clone(&piece.seals), ..*piece };
            let read = self.read_piece(&again);
            if read[0].is_ok() && !self.fits(&again, *page, 0) {
                damaged.push(row);
                if is_writable {
                    pool.shared.doubt(row);
                }
            }
        }
        let Some(row) = damaged.first() else { return };
        let outcome = if is_writable { DamageOutcome::Replaced } else { DamageOutcome::Kept };
        let first = group.members().next().expect("a group has members");
        verified.damages.push(Damage {
            blade: piece.place.blade,
            segment: piece.copy.first().index(),
            page: row.page_of(first).page,
            pages: exactly(damaged.len()),
            outcome,
        });
    }

    /// True if what was read as this page of the parity is what was written.
    fn fits(&self, piece: &Piece, page: u32, at: usize) -> bool {
        piece.seals.check_parity(page, &self.batches[0].memory[at].0).is_ok()
    }

    /// Verifies all copies of a superpage, and gives up those that are damaged if one is whole.
    fn verify_superpage(&mut self, suspect: Suspect, verified: &mut Verified) {
        let Suspect { copy, superpage } = suspect;
        let (mut damaged, mut whole) = (Vec::new(), 0);
        for copy in self.pool.copies(copy.first()) {
            let Some(place) = readable_place(self.pool, copy, superpage) else { continue };
            let Some(found) = self.check_superpage(copy, superpage, place) else {
                // A fork is in a hurry.
                return self.pool.shared.suspects.note(suspect);
            };
            verified.pages += found.verified;
            match found.damaged.is_empty() {
                true => whole += usize::from(!found.is_partial),
                false => damaged.push((copy, place, found.damaged)),
            }
        }
        if let [(copy, _, pages)] = &damaged[..]
            && self.pool.shared.config.redundancy == Redundancy::Parity
        {
            let member = Strip { strand: *copy, superpage };
            whole += usize::from(self.is_any_in_its_row(member, pages));
        }
        let readable = damaged.len() + whole;
        let may_give_up = !damaged.is_empty() && whole > 0 && self.is_writable(copy);
        // Where copies are missing already, a blade may just be given up that has one of these.
        if may_give_up && !self.pool.shared.spare.take() {
            return self.pool.shared.suspects.note(suspect);
        }
        for (copy, place, pages) in damaged {
            let given_up = may_give_up && self.forget_copy(copy, superpage, place);
            let outcome = match (given_up, readable) {
                (true, _) => DamageOutcome::Replaced,
                (false, 2..) => DamageOutcome::Kept,
                (false, _) => DamageOutcome::Lost,
            };
            if !given_up {
                self.kept.insert(Suspect { copy, superpage });
            }
            verified.damages.push(Damage {
                blade: place.blade,
                segment: copy.first().index(),
                page: pages[0],
                pages: exactly(pages.len()),
                outcome,
            });
        }
        if may_give_up {
            self.pool.note_copies(); // if none was given up after all
        }
    }

    /// False if others than this process may use the segment.
    fn is_writable(&self, copy: SegmentHandle) -> bool {
        self.pool.segment(copy).state() == SegmentState::Writable
    }

    /// Verifies all pages of a superpage at one place, as fast as it can: it is one of few. `None`
    /// if somebody cannot wait for the end of it.
    fn check_superpage(
        &mut self,
        copy: SegmentHandle,
        superpage: u32,
        place: Place,
    ) -> Option<Found> {
        let (mut all, mut from) = (Found::default(), superpage * SUPERPAGE_PAGES);
        let at = (copy, superpage, place);
        while let Some(piece) = piece_of(self.pool, at, from, BATCH_PAGES) {
            if self.pool.waiting_for_mover.load(Ordering::Relaxed) > 0 {
                return None;
            }
            let found = self.check(&piece);
            all.verified += found.verified;
            all.damaged.extend(found.damaged);
            all.is_partial |= found.is_partial;
            match piece.end().page {
                0 => break, // the last page of all
                end => from = end,
            }
        }
        Some(all)
    }

    /// Reads the pages of a piece and compares them with their seals. What is damaged is so
    /// whenever it is read, and was not written meanwhile.
    fn check(&mut self, piece: &Piece) -> Found {
        let (mut found, doubtful) = self.read_and_open(piece);
        if doubtful.is_empty() {
            return found;
        }
        if self.pool.shared.config.redundancy == Redundancy::Parity {
            return self.check_in_rows(piece, found, &doubtful);
        }
        // What was on its way when its seal was made arrives before it is read again.
        let again = Piece { pages: doubtful, seals: Arc::clone(&piece.seals), ..*piece };
        self.settle();
        let seals: Vec<_> = again.pages.iter().map(|page| again.seals.of_page(*page)).collect();
        self.settle();
        let (second, damaged) = self.read_and_open(&again);
        self.settle();
        found.verified += second.verified;
        found.is_partial |= second.is_partial;
        let is_as_before = |page: &u32| {
            let at = again.pages.iter().position(|it| it == page);
            at.is_some_and(|at| seals[at].is_some() && seals[at] == again.seals.of_page(*page))
        };
        // What was written meanwhile is verified another time.
        found.damaged = damaged.into_iter().filter(is_as_before).collect();
        found
    }

    /// The same where a page is sealed long before it is sent, as its row is read first: who writes
    /// it holds its row.
    fn check_in_rows(&mut self, piece: &Piece, mut found: Found, doubtful: &[u32]) -> Found {
        let segment = piece.copy.first();
        for page in doubtful {
            let row = Row::of(SegmentPage { segment, page: *page });
            let Some(_lock) = self.lock_row(row, true) else { continue };
            let again = Piece { pages: vec![*page], seals: Arc::clone(&piece.seals), ..*piece };
            let (second, damaged) = self.read_and_open(&again);
            found.verified += second.verified;
            found.is_partial |= second.is_partial;
            found.damaged.extend(damaged);
        }
        found
    }

    /// Returns what fits its seal, and the pages that do not, or not yet.
    fn read_and_open(&mut self, piece: &Piece) -> (Found, Vec<u32>) {
        let (mut found, mut doubtful) = (Found::default(), Vec::new());
        self.batches[0].reserve(piece.pages.len());
        let seals: Vec<_> = piece.pages.iter().map(|page| piece.seals.of_page(*page)).collect();
        let results = self.read_piece(piece);
        let memory = &mut self.batches[0].memory;
        for (((page, seal), result), bytes) in
            piece.pages.iter().zip(seals).zip(results).zip(memory)
        {
            let Some(seal) = seal else { continue }; // its memory was freed
            match result.and_then(|()| piece.seals.open(*page, seal, &mut bytes.0)) {
                Ok(()) => found.verified += 1,
                Err(error) if is_damage(error) || is_unreadable(error) => doubtful.push(*page),
                Err(_) => found.is_partial = true,
            }
        }
        (found, doubtful)
    }

    /// Reads a piece into the first batch's memory.
    fn read_piece(&mut self, piece: &Piece) -> Vec<Result<(), PageError>> {
        let segment = self.pool.segment(piece.copy);
        let memory = &mut self.batches[0].memory;
        let links: Vec<_> = (0_u64..)
            .zip(&piece.pages)
            .zip(memory)
            .map(|((token, page), memory)| {
                segment.page_at(piece.place, PageNumber(*page), memory.0.as_mut_ptr(), token)
            })
            .collect();
        // SAFETY: the batch's memory is its own and stays where it is until its pages are done;
        // what the place names is not closed while the pool's `moving` lock is held.
        unsafe { self.lane.submit_to(piece.place.blade, links, Access::Read) };
        let mut results = vec![Err(PageError::Deadline); piece.pages.len()];
        let mut left = results.len();
        while left > 0 {
            self.lane.wait(&mut self.done);
            for completion in self.done.drain(..) {
                let at = usize::try_from(completion.token).ok();
                let result = at.and_then(|at| results.get_mut(at));
                *result.expect("a page arrives that was asked for") = completion.result;
                left -= 1;
            }
        }
        if self.pool.is_lost(piece.place.blade) {
            // It may answer still, and has not what was written since it was given up.
            results.fill(Err(PageError::BladeLost(piece.place.blade)));
        }
        results
    }

    /// Gives one copy of a superpage up. False if there is no other one any more.
    fn forget_copy(&self, copy: SegmentHandle, superpage: u32, place: Place) -> bool {
        let pool = self.pool;
        // Blades are given up with the permission that the caller has taken, or under this lock.
        let ledger = pool.ledger();
        let is_parity = pool.shared.config.redundancy == Redundancy::Parity;
        let (is_elsewhere, left) = match is_parity {
            true => {
                let strip = Strip { strand: copy, superpage };
                (pool.shared.is_spare(strip), Some(Place::nowhere()))
            }
            false => (pool.other_copy(copy, superpage).is_some(), None),
        };
        if !is_elsewhere {
            return false;
        }
        let is_within = pool.segment(copy).map().set(superpage, left);
        assert!(is_within, "superpage {superpage} lies in its segment");
        drop(ledger);
        self.settle();
        let mut ledger = pool.ledger();
        ledger.uncharge(copy);
        ledger.free_soon(copy, superpage, place);
        true
    }
}

/// True if the blade cannot read its own memory, or knows nothing of it.
fn is_unreadable(error: PageError) -> bool {
    let backing = PageError::Refused(ErrorCode::Backing.number());
    error == backing || error == PageError::NotAllocated
}

/// Where this copy of a superpage can be read, if it lies still.
fn readable_place(pool: &Pool, copy: SegmentHandle, superpage: u32) -> Option<Place> {
    if pool.segment(copy).state() == SegmentState::Free {
        return None;
    }
    let place = pool.segment(copy).map().get(superpage).filter(|place| !place.is_freed)?;
    (place.record.is_none() && !pool.is_lost(place.blade)).then_some(place)
}

/// The next pages to be verified, from a point on.
fn next_piece(pool: &Pool, from: VerifyPoint, limit: usize) -> Option<Piece> {
    let copies = SegmentHandle::every().skip(from.copy);
    let live = copies.filter(|copy| pool.segment(*copy).state() != SegmentState::Free);
    let mut pieces = live.flat_map(|copy| {
        let first = if copy.index() == from.copy { from.page } else { 0 };
        let map = pool.segment(copy).map().iter();
        let left = map.filter(move |(superpage, _)| *superpage >= first / SUPERPAGE_PAGES);
        left.filter_map(move |(superpage, _)| {
            let place = readable_place(pool, copy, superpage)?;
            piece_of(pool, (copy, superpage, place), first, limit)
        })
    });
    pieces.next()
}

/// The first pages of a superpage, from one on, that were ever written.
fn piece_of(
    pool: &Pool,
    (copy, superpage, place): (SegmentHandle, u32, Place),
    from: u32,
    limit: usize,
) -> Option<Piece> {
    let seals = pool.segment(copy.first()).seals()?;
    let first = superpage * SUPERPAGE_PAGES;
    let all = (first..=first + (SUPERPAGE_PAGES - 1)).filter(|page| *page >= from);
    let group = Group::of(Strip { strand: copy, superpage });
    let is_parity = pool.shared.is_parity(copy);
    let is_written = |page: &u32| match is_parity {
        true => group.row(page % SUPERPAGE_PAGES).is_written(group.parity(), &seals),
        false => seals.is_written(*page),
    };
    let pages: Vec<u32> = all.filter(is_written).take(limit).collect();
    (!pages.is_empty()).then_some(Piece { copy, superpage, place, seals, pages })
}

const _: () = assert!(size_of::<super::PageMemory>() == PAGE_BYTES);
