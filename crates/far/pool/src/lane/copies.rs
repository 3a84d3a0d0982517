//! How a lane reads pages that have several copies: from the nearest one, and from another one too
//! if that is late ([`crate::hedging`]), or if what it returned was never stored there.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_fabric::LinkPage;

use super::{Lane, graver, seals_of};
use crate::damage::Suspect;
use crate::parity::Strip;
use crate::sealing::{Asked, CopyPage, CopySet, FlightCopy};
use crate::shared::Found;
use crate::types::Access;
use crate::types::Strands;
use crate::{
    BladeIndex, COPIES_LIMIT, PageError, PageRead, Redundancy, SUPERPAGE_PAGES, SegmentPage,
};

/// A copy of a page that can be read.
#[derive(Clone, Copy, Debug)]
struct Readable {
    nth: usize,
    blade: BladeIndex,
    page: LinkPage,
}

/// Where a page is read.
#[derive(Clone, Copy, Debug)]
enum ReadWay {
    /// Where it lies.
    Place,
    /// In the rest of its row.
    Row,
    /// Nowhere: the program gave it back.
    GivenBack,
}

impl Lane {
    /// Begins to read a page from the nearest copy that was not tried and can be read. If there is
    /// none, the page fails, with what was `failed` before. `now` is of a lane that may hedge.
    pub(super) fn begin_read(
        &mut self,
        read: &PageRead,
        tried: CopySet,
        failed: Option<PageError>,
        now: Option<Instant>,
    ) {
        self.choice.count();
        match self.way_of(read.at, tried) {
            ReadWay::Place => {}
            ReadWay::Row => return self.begin_parity_read(read, tried),
            ReadWay::GivenBack => return self.fail(read.token, PageError::NotAllocated),
        }
        let Readable { nth, blade, page } = match self.choose(read, tried, now) {
            Ok(readable) => readable,
            Err(error) => {
                let error = error.map_or(failed, |error| graver(failed, error));
                return self.fail(read.token, error.unwrap_or(PageError::NotAllocated));
            }
        };
        let Some(sealer) = &mut self.sealer else { return self.sort_in(blade, page) };
        let copy = CopyPage { nth, page };
        let expected = seals_of(&self.shared, read.at)
            .and_then(|seals| sealer.expect(read, &seals, tried, copy, now));
        match expected {
            Ok((page, asked)) => {
                self.sort_in(blade, page);
                // Also where nobody chooses among copies, as there is one.
                self.forget_answered(blade);
                let way = &mut self.ways[usize::from(blade.0)];
                way.owed.extend(asked);
                way.may_be_late.extend(asked);
            }
            Err(error) => self.fail(read.token, error),
        }
    }

    /// Where a page is read, of which some copies were tried.
    fn way_of(&self, at: SegmentPage, tried: CopySet) -> ReadWay {
        if self.shared.config.redundancy != Redundancy::Parity || self.sealer.is_none() {
            return ReadWay::Place;
        }
        let member = Strip { strand: at.segment, superpage: at.page / SUPERPAGE_PAGES };
        let found = || self.shared.find(at, Access::Read, std::ptr::null_mut(), 0);
        match self.shared.place_of(member) {
            None => ReadWay::Place,
            Some(place) if place.is_freed => ReadWay::GivenBack,
            Some(_) if tried.has(at.segment.nth()) => ReadWay::Row,
            Some(_) if matches!(found(), Found::At(..)) => ReadWay::Place,
            Some(_) => ReadWay::Row,
        }
    }

    /// The nearest copy of a page among those that were not tried.
    fn choose(
        &mut self,
        read: &PageRead,
        tried: CopySet,
        now: Option<Instant>,
    ) -> Result<Readable, Option<PageError>> {
        let (mut found, mut failed) = ([None; COPIES_LIMIT], None);
        let untried = self.shared.copies(read.at.segment).filter(|copy| !tried.has(copy.nth()));
        for copy in untried {
            let at = SegmentPage { segment: copy, ..read.at };
            match self.shared.find(at, Access::Read, read.into, read.token) {
                Found::At(blade, page) => {
                    found[copy.nth()] = Some(Readable { nth: copy.nth(), blade, page });
                }
                Found::Not(error) => failed = graver(failed, error),
                // Reads never wait for the mover; should one, it ends like any that is too late.
                Found::Soon => failed = graver(failed, PageError::Deadline),
            }
        }
        let mut all = found.iter().flatten();
        let (first, more) = (all.next(), all.next().is_some());
        let Some(now) = now.filter(|_| more) else { return first.copied().ok_or(failed) };
        let all = || found.iter().flatten();
        all().for_each(|it| self.forget_answered(it.blade));
        let expected = all().map(|it| {
            let way = &self.ways[usize::from(it.blade.0)];
            let oldest = way.owed.front().map(|asked| now.saturating_duration_since(asked.at));
            way.times.expected(oldest.unwrap_or_default())
        });
        let nearest = self.choice.nearest(expected);
        nearest.and_then(|at| all().nth(at)).copied().ok_or(failed)
    }

    /// True if late reads are asked of other copies too.
    pub(super) fn hedges(&self) -> bool {
        self.sealer.is_some() && self.shared.config.redundancy.copies() > 1
    }

    /// The time, if this lane has a use for it.
    pub(super) fn now_if_hedging(&self) -> Option<Instant> {
        self.hedges().then(|| self.shared.config.time.now())
    }

    /// Forgets what a blade owes no more.
    fn forget_answered(&mut self, blade: BladeIndex) {
        let way = &mut self.ways[usize::from(blade.0)];
        let sealer = self.sealer.as_ref();
        while let Some(asked) = way.owed.front()
            && sealer.is_none_or(|sealer| !sealer.is_owed(*asked))
        {
            way.owed.pop_front();
        }
    }

    /// How long until a read is late, if none is answered before: another copy is asked then, by
    /// [`Lane::poll`] or [`Lane::wait`]. None: no read will be late.
    pub fn until_late(&self, now: Instant) -> Option<Duration> {
        let sealer = self.sealer.as_ref()?;
        let late = |way: &super::Way| {
            let unanswered = |asked: &&Asked| sealer.unanswered(**asked).is_some();
            let first = way.may_be_late.iter().find(unanswered)?;
            Some((first.at + way.times.patience()).saturating_duration_since(now))
        };
        self.ways.iter().filter_map(late).min()
    }

    /// True if a read may become late.
    pub(super) fn may_be_late(&self) -> bool {
        self.ways.iter().any(|way| !way.may_be_late.is_empty())
    }

    /// Asks other copies for the reads that are late.
    pub(super) fn ask_others(&mut self) {
        if !self.may_be_late() {
            return;
        }
        let now = self.shared.config.time.now();
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        for at in 0..self.ways.len() {
            while let Some(asked) = self.next_late(at, now) {
                self.ask_another(asked, now);
            }
        }
        // SAFETY: the memory is the lane's own, and what was found stays open during the visit.
        unsafe { self.submit(Access::Read) };
        drop(visit);
    }

    /// Takes the next read of a blade that is late.
    fn next_late(&mut self, at: usize, now: Instant) -> Option<Asked> {
        let (way, sealer) = (&mut self.ways[at], self.sealer.as_ref()?);
        let patience = way.times.patience();
        loop {
            let asked = *way.may_be_late.front()?;
            let is_unanswered = sealer.unanswered(asked).is_some();
            if is_unanswered && now < asked.at + patience {
                return None;
            }
            way.may_be_late.pop_front();
            if is_unanswered {
                return Some(asked);
            }
        }
    }

    fn ask_another(&mut self, asked: Asked, now: Instant) {
        let unanswered = self.sealer.as_ref().and_then(|sealer| sealer.unanswered(asked));
        let Some((read, tried)) = unanswered else { return };
        let Ok(Readable { nth, blade, page }) = self.choose(&read, tried, Some(now)) else {
            return;
        };
        if !self.choice.may_hedge() {
            return;
        }
        let Some(sealer) = &mut self.sealer else { return };
        let (page, asked) = sealer.ask_too(asked, CopyPage { nth, page }, now);
        self.sort_in(blade, page);
        self.ways[usize::from(blade.0)].owed.push_back(asked);
        self.shared.hedged_reads.fetch_add(1, Relaxed);
    }

    /// Takes in how long a blade took for an answer.
    pub(super) fn note_answer(&mut self, blade: usize, copy: FlightCopy, now: Option<Instant>) {
        let asked_at = self.sealer.as_ref().and_then(|sealer| sealer.asked_at(copy));
        if let (Some(now), Some(asked_at)) = (now, asked_at) {
            self.ways[blade].times.answered(now.saturating_duration_since(asked_at));
        }
    }

    /// Has a copy looked at that is not what was stored.
    pub(super) fn note_damage(&self, at: SegmentPage, nth: usize) {
        let suspect = Suspect { copy: at.segment.copy(nth), superpage: at.page / SUPERPAGE_PAGES };
        self.shared.suspects.note(suspect);
    }
}
