//! Makes a superpage from the rest of its group ([`crate::parity`]): what a lost blade had, or the
//! parity itself; and takes what the program gave back out of the parity.
//!
//! Rows are locked while they are worked on, so that no lane changes what is summed. Who holds a
//! row waits for no other one.

use std::collections::BTreeSet;
use std::sync::Arc;

use farpool_fabric::LinkPage;
use farpool_units::{PAGE_BYTES, exactly};
use farpool_wire::PageNumber;

use super::{BATCH_PAGES, BUSY_PAGES, CopyError, Job, Mover, PageMemory, SETTLE_STEP};
use crate::damage::Suspect;
use crate::map::Place;
use crate::parity::{Group, Row, RowLock, Strip, add};
use crate::seals::Seals;
use crate::shared::{Found, LaneClock};
use crate::types::Access;
use crate::{BladeIndex, PageError, SUPERPAGE_PAGES, SegmentPage};

/// How often a page is read that is not what was stored, before it is taken for damaged: a blade
/// may answer with something else each time.
const READ_TRIES: usize = 4;

/// Pages of some rows of one group, and what they add up to.
#[derive(Debug, Default)]
struct Rows {
    rows: Vec<Row>,
    locks: Vec<RowLock>,
    /// By row.
    sums: Vec<PageMemory>,
    /// Rows whose sum is not what it should be.
    wrong: BTreeSet<usize>,
    /// What arrives.
    arrivals: Vec<PageMemory>,
}

impl Mover<'_> {
    /// Makes the pages of a superpage that are not written meanwhile from the rest of its group.
    pub(super) fn rebuild(&mut self, job: &Job<'_>, group: Group) -> Result<(), CopyError> {
        let seals = self.pool.segment(job.handle.first()).seals();
        let seals = seals.expect("groups are of pages that are sealed");
        let (others, mut next) = (self.other_clocks(), 0);
        while next < SUPERPAGE_PAGES {
            let limit = self.pace(&others);
            let rows = self.claim_rows(job, group, &seals, &mut next, limit);
            self.make_rows(job, &seals, rows)?;
        }
        Ok(())
    }

    /// How many pages to take on now; after a rest, if the program is busy.
    fn pace(&mut self, others: &[Arc<LaneClock>]) -> usize {
        if !self.is_busy(others) {
            return BATCH_PAGES;
        }
        self.rest();
        BUSY_PAGES
    }

    fn claim_rows(
        &self,
        job: &Job<'_>,
        group: Group,
        seals: &Seals,
        next: &mut u32,
        limit: usize,
    ) -> Rows {
        let mut rows = Rows::default();
        while *next < SUPERPAGE_PAGES && rows.rows.len() < limit {
            let row = group.row(*next);
            let Some(lock) = self.lock_row(row, rows.locks.is_empty()) else { break };
            if job.record.claim_one(*next, |_| row.is_written(job.strip(), seals)) {
                rows.rows.push(row);
                rows.locks.push(lock);
            }
            *next += 1;
        }
        rows
    }

    /// Takes the lock of a row. `None`: it is held, and whoever holds other rows must not wait.
    pub(super) fn lock_row(&self, row: Row, may_wait: bool) -> Option<RowLock> {
        if !may_wait {
            return self.pool.shared.try_lock(row);
        }
        loop {
            let lock = self.pool.shared.try_lock_first(row);
            if lock.is_some() {
                return lock;
            }
            self.pool.shared.config.time.pause(SETTLE_STEP);
        }
    }

    fn make_rows(&mut self, job: &Job<'_>, seals: &Seals, mut rows: Rows) -> Result<(), CopyError> {
        let target = job.strip();
        let made = self.sum(&mut rows, target, seals).map_err(|error| (false, error));
        let made = made.and_then(|()| {
            self.check_sums(&mut rows, target, seals);
            if !rows.wrong.is_empty() {
                let Strip { strand: copy, superpage } = target;
                self.pool.shared.suspects.note(Suspect { copy, superpage });
            }
            // The new memory is zero.
            let is_other = |sum: &PageMemory| sum.0 != [0; PAGE_BYTES];
            note_parity(&rows, target, seals);
            self.write_sums(&mut rows, target, job.new, is_other).map_err(|error| (true, error))
        });
        for row in &rows.rows {
            let page = row.page_of(target).page % SUPERPAGE_PAGES;
            match made {
                Ok(()) => job.record.arrived(page),
                Err(_) => job.record.let_go(page),
            }
        }
        made.map_err(|(of_new, error)| CopyError { of_new, error })
    }

    /// Adds up what all others of the rows have.
    fn sum(&mut self, rows: &mut Rows, target: Strip, seals: &Seals) -> Result<(), PageError> {
        let mut reads = Vec::new();
        for (at, row) in rows.rows.iter().enumerate() {
            let own = row.page_of(target);
            let written = row.written_without(seals, Some(own));
            let parity = (!target.is_parity()).then(|| row.page_of(row.group.parity()));
            reads.extend(written.chain(parity).map(|page| (at, page)));
        }
        rows.sums = vec![PageMemory([0; PAGE_BYTES]); rows.rows.len()];
        self.add_pages(rows, &reads, seals)
    }

    /// Finds the pages of a member that were not made right, since a blade returned something else
    /// than it should: they are left out, to be read by their rows another time.
    fn check_sums(&self, rows: &mut Rows, target: Strip, seals: &Seals) {
        // Of a member each page's own seal says whether it was made right. Of parity nothing does:
        // what a damaged page has now is lost, unless it is read like this again. With it the
        // parity protects the other pages of its row.
        rows.wrong.clear();
        if target.is_parity() {
            return;
        }
        let pages = rows.rows.iter().map(|row| row.page_of(target)).zip(&rows.sums);
        let wrong = (0..).zip(pages).filter(|(_, (at, sum))| !is_as_stored(*at, &sum.0, seals));
        rows.wrong.extend(wrong.map(|(at, _)| at));
    }

    /// True if the rest of its row has any one of a member's pages: it is worth making anew.
    pub(super) fn is_any_in_its_row(&mut self, member: Strip, pages: &[u32]) -> bool {
        let Some(seals) = self.pool.segment(member.strand).seals() else { return false };
        pages.iter().any(|page| {
            let row = Group::of(member).row(page % SUPERPAGE_PAGES);
            let locks = self.lock_row(row, true).into_iter().collect();
            let mut rows = Rows { rows: vec![row], locks, ..Rows::default() };
            let has_read = self.sum(&mut rows, member, &seals).is_ok();
            self.check_sums(&mut rows, member, &seals);
            has_read && rows.wrong.is_empty()
        })
    }

    /// Reads pages and adds them to the sums of their rows. A page that is not what was stored is
    /// read again, some times; a row of which one is not is wrong.
    fn add_pages(
        &mut self,
        rows: &mut Rows,
        reads: &[(usize, SegmentPage)],
        seals: &Seals,
    ) -> Result<(), PageError> {
        rows.arrivals = vec![PageMemory([0; PAGE_BYTES]); reads.len()];
        let mut left: Vec<usize> = (0..reads.len()).collect();
        for _ in 0..READ_TRIES {
            self.read_pages(&mut rows.arrivals, reads, &left)?;
            left.retain(|at| !is_as_stored(reads[*at].1, &rows.arrivals[*at].0, seals));
        }
        rows.wrong.extend(left.into_iter().map(|at| reads[at].0));
        for ((row, _), memory) in reads.iter().zip(&rows.arrivals) {
            add(&mut rows.sums[*row].0, &memory.0);
        }
        Ok(())
    }

    /// Reads those of the pages that are `wanted`, by their positions.
    fn read_pages(
        &mut self,
        arrivals: &mut [PageMemory],
        reads: &[(usize, SegmentPage)],
        wanted: &[usize],
    ) -> Result<(), PageError> {
        let mut of_blades: Vec<(BladeIndex, Vec<LinkPage>)> = Vec::new();
        for (token, at) in (0..).zip(wanted) {
            let into = arrivals[*at].0.as_mut_ptr();
            let (blade, link) = match self.pool.shared.find(reads[*at].1, Access::Read, into, token)
            {
                Found::At(blade, link) => (blade, link),
                Found::Not(error) => return Err(error),
                Found::Soon => return Err(PageError::Deadline),
            };
            match of_blades.iter_mut().find(|(of, _)| *of == blade) {
                Some((_, links)) => links.push(link),
                None => of_blades.push((blade, vec![link])),
            }
        }
        for (blade, links) in of_blades {
            // SAFETY: the memory is the caller's and stays where it is until its pages are done,
            // below; what the places name is not closed while the `moving` lock is held.
            unsafe { self.lane.submit_to(blade, links, Access::Read) };
        }
        self.await_pages(wanted.len())
    }

    /// Writes the sums that are to be written, as the pages of a superpage at this place.
    fn write_sums(
        &mut self,
        rows: &mut Rows,
        target: Strip,
        place: Place,
        is_written: impl Fn(&PageMemory) -> bool,
    ) -> Result<(), PageError> {
        let segment = self.pool.segment(target.strand);
        let mut links = Vec::with_capacity(rows.rows.len());
        for ((token, row), sum) in (0..).zip(&rows.rows).zip(&mut rows.sums) {
            let page = row.page_of(target).page;
            let is_right = !rows.wrong.contains(&exactly(token));
            if is_right && is_written(sum) {
                let into = sum.0.as_mut_ptr();
                links.push(segment.page_at(place, PageNumber(page), into, token));
            }
        }
        let count = links.len();
        // SAFETY: likewise.
        unsafe { self.lane.submit_to(place.blade, links, Access::Write) };
        self.await_pages(count)
    }

    /// Waits for so many pages. Returns the first error, once all have ended.
    fn await_pages(&mut self, count: usize) -> Result<(), PageError> {
        let (mut left, mut failed) = (count, None);
        let mut done = std::mem::take(&mut self.done);
        while left > 0 {
            self.lane.wait(&mut done);
            for completion in done.drain(..) {
                failed = failed.or(completion.result.err());
                left -= 1;
            }
        }
        self.done = done;
        failed.map_or(Ok(()), Err)
    }

    /// Takes a superpage that was given back out of its group's parity, and frees its memory,
    /// unless the program takes it again meanwhile. False if it has to stay for now: it cannot be
    /// taken out, and without it another member would be lost whose blade is.
    pub(super) fn take_out(&mut self, member: Strip) -> bool {
        let (pool, group) = (self.pool, Group::of(member));
        let seals = pool.segment(member.strand).seals();
        let seals = seals.expect("groups are of pages that are sealed");
        let parity = group.parity();
        let is_readable = pool.shared.is_whole(member) && pool.shared.is_whole(parity);
        let taken = is_readable && self.take_rows_out(member, &seals).is_ok();
        if !taken && !pool.shared.are_members_whole(group, member) {
            return false;
        }
        if !taken {
            self.doubt_rows_of(member, &seals);
        }
        let mut ledger = pool.ledger();
        let freed = pool.shared.place_of(member).filter(|place| place.is_freed);
        let Some(place) = freed else { return true };
        seals.begin(member.superpage);
        pool.segment(member.strand).map().set(member.superpage, None);
        ledger.wait_for_lanes();
        pool.free_strip(&mut ledger, member, place);
        true
    }

    /// The parity of what a member has is to be made anew without it.
    fn doubt_rows_of(&self, member: Strip, seals: &Seals) {
        let group = Group::of(member);
        for row in (0..SUPERPAGE_PAGES).map(|index| group.row(index)) {
            let _lock = self.lock_row(row, true);
            let is_freed = self.pool.shared.place_of(member).is_some_and(|place| place.is_freed);
            let page = row.page_of(member).page;
            if is_freed && seals.is_written(page) {
                self.pool.shared.doubt(row);
                seals.forget(page);
            }
        }
    }

    /// Makes the parity of a group's rows that are in doubt from the members, where it lies. False
    /// if it could make none.
    pub(super) fn mend_parity(&mut self, group: Group) -> bool {
        let (pool, parity) = (self.pool, group.parity());
        let Some(seals) = pool.segment(parity.strand.first()).seals() else { return false };
        let others = self.other_clocks();
        let doubtful: Vec<u32> = seals.doubtful_parity(parity.superpage).collect();
        let mut is_any_made = false;
        for page in doubtful {
            self.pace(&others);
            let row = group.row(page % SUPERPAGE_PAGES);
            let locks = self.lock_row(row, true).into_iter().collect();
            let place = pool.shared.place_of(parity).filter(|place| place.record.is_none());
            let Some(place) = place.filter(|place| !pool.is_lost(place.blade)) else { break };
            if !seals.is_parity_doubtful(page) {
                continue; // it was written meanwhile
            }
            let mut rows = Rows { rows: vec![row], locks, ..Rows::default() };
            if self.sum(&mut rows, parity, &seals).is_err() {
                continue; // one of the members cannot be read
            }
            self.check_sums(&mut rows, parity, &seals);
            if self.write_sums(&mut rows, parity, place, |_| true).is_ok() {
                note_parity(&rows, parity, &seals);
                is_any_made = true;
            }
        }
        is_any_made
    }

    fn take_rows_out(&mut self, member: Strip, seals: &Seals) -> Result<(), PageError> {
        let pool = self.pool;
        let (group, others, mut next) = (Group::of(member), self.other_clocks(), 0);
        let parity = group.parity();
        while next < SUPERPAGE_PAGES {
            let limit = self.pace(&others);
            let mut rows = Rows::default();
            while next < SUPERPAGE_PAGES && rows.rows.len() < limit {
                let row = group.row(next);
                let Some(lock) = self.lock_row(row, rows.locks.is_empty()) else { break };
                if pool.shared.place_of(member).is_none_or(|place| !place.is_freed) {
                    return Ok(()); // the program has taken it again
                }
                if seals.is_written(row.page_of(member).page) {
                    rows.rows.push(row);
                    rows.locks.push(lock);
                }
                next += 1;
            }
            let reads = rows
                .rows
                .iter()
                .enumerate()
                .flat_map(|(at, row)| [member, parity].map(|strip| (at, row.page_of(strip))));
            let reads: Vec<_> = reads.collect();
            rows.sums = vec![PageMemory([0; PAGE_BYTES]); rows.rows.len()];
            self.add_pages(&mut rows, &reads, seals)?;
            let Some(place) = pool.shared.place_of(parity) else {
                return Err(PageError::NotAllocated);
            };
            if !rows.wrong.is_empty() {
                return Err(PageError::Forged);
            }
            note_parity(&rows, parity, seals);
            self.write_sums(&mut rows, parity, place, |_| true)?;
            rows.rows.iter().for_each(|row| seals.forget(row.page_of(member).page));
        }
        Ok(())
    }
}

/// True if this is what was stored as a page of a group.
fn is_as_stored(at: SegmentPage, bytes: &[u8; PAGE_BYTES], seals: &Seals) -> bool {
    if at.segment != at.segment.first() {
        return seals.check_parity(at.page, bytes).is_ok();
    }
    let seal = seals.of_stored(at.page);
    seal.is_some_and(|seal| seals.open(at.page, seal, &mut bytes.clone()).is_ok())
}

/// Notes what is about to be written, if it is parity.
fn note_parity(rows: &Rows, target: Strip, seals: &Seals) {
    if target.is_parity() {
        let pages = rows.rows.iter().map(|row| row.page_of(target).page).zip(&rows.sums);
        pages.for_each(|(page, sum)| seals.note_parity(page, &sum.0));
    }
}
