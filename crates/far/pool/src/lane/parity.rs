//! Pages of groups with parity: what is written is written to its place and into the parity of its
//! row, and what its place cannot give is had from the rest of the row.
//!
//! A page on its way has a [`Flight`], which holds its row; here is decided which blades are asked
//! for it. Steps that wait for the mover, or for a row, are tried again whenever the lane is
//! driven.

use std::sync::Arc;

use farpool_fabric::LinkPage;
use farpool_units::PAGE_BYTES;

use super::flights::{Check, Flight, Part, STRIPS, Step, Sum, Task, of_token, token};
use super::{Lane, graver, seals_of};
use crate::parity::{Group, Row, RowLock, Strip};
use crate::sealing::CopySet;
use crate::seals::Seals;
use crate::shared::Found;
use crate::types::Access;
use crate::{BladeIndex, Completion, PageError, PageRead, PageWrite, SUPERPAGE_PAGES, SegmentPage};

impl Lane {
    /// Begins to write a page and its parity. False if its row is in use.
    ///
    /// # Safety
    /// As for [`Lane::write`].
    pub(super) unsafe fn begin_parity_write(&mut self, write: &PageWrite) -> bool {
        let row = Row::of(write.at);
        let Some(lock) = self.shared.try_lock(row) else { return false };
        let seals = match seals_of(&self.shared, write.at) {
            Ok(seals) => seals,
            Err(error) => {
                self.fail(write.token, error);
                return true;
            }
        };
        if let Some(error) = self.bars_writing(write.at) {
            self.fail(write.token, error);
            return true;
        }
        let before = seals.of_stored(write.at.page);
        let mut sealed = self.parity.buffer();
        // SAFETY: as promised by the caller; the buffer is the lane's own.
        unsafe { write.from.copy_to_nonoverlapping(sealed.0.as_mut_ptr(), PAGE_BYTES) };
        if let Err(error) = seals.seal(write.at.page, &mut sealed.0) {
            self.parity.give_back(sealed);
            self.fail(write.token, error);
            return true;
        }
        let task = Task::Write {
            token: write.token,
            sealed,
            before,
            is_stored: false,
            is_in_parity: false,
            refused: None,
        };
        self.begin_flight(task, write.at, seals, lock);
        true
    }

    /// Begins to read a page by the rest of its row.
    pub(super) fn begin_parity_read(&mut self, read: &PageRead, tried: CopySet) {
        let row = Row::of(read.at);
        let Some(lock) = self.shared.try_lock(row) else {
            return self.parity.waiting.push((*read, tried));
        };
        let sealed = seals_of(&self.shared, read.at).and_then(|seals| {
            let seal = seals.of_page(read.at.page).ok_or(PageError::Forged)?;
            Ok((seals, seal))
        });
        match sealed {
            Ok((seals, seal)) => {
                let task = Task::Read { read: *read, tried, seal };
                self.begin_flight(task, read.at, seals, lock);
            }
            Err(error) => self.fail(read.token, error),
        }
    }

    fn begin_flight(&mut self, task: Task, at: SegmentPage, seals: Arc<Seals>, lock: RowLock) {
        let sum = self.parity.buffer();
        self.parity.begin(Flight {
            task,
            at,
            row: Row::of(at),
            seals,
            sum,
            parts: Default::default(),
            step: Step::Plan,
            outstanding: 0,
            failed: None,
            useless: [false; STRIPS],
            _lock: lock,
        });
    }

    /// Why a page cannot be written at all.
    fn bars_writing(&self, at: SegmentPage) -> Option<PageError> {
        let member = Strip { strand: at.segment, superpage: at.page / SUPERPAGE_PAGES };
        let segment = self.shared.segments.get(at.segment.index())?;
        match (segment.state(), self.shared.place_of(member)) {
            (crate::shared::SegmentState::Frozen, _) => Some(PageError::Frozen),
            (crate::shared::SegmentState::Free, _) | (_, None) => Some(PageError::NotAllocated),
            (_, Some(place)) if place.is_freed => Some(PageError::NotAllocated),
            _ => None,
        }
    }

    /// True if a step may be begun.
    pub(super) fn may_advance_parity(&self) -> bool {
        self.parity.between() > 0
    }

    /// Begins the steps that are due.
    pub(super) fn advance_parity(&mut self) {
        if !self.may_advance_parity() {
            return;
        }
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        // Where it lies it may be had by now.
        for (read, tried) in std::mem::take(&mut self.parity.waiting) {
            self.begin_read(&read, tried, None, None);
        }
        let ready = std::mem::take(&mut self.parity.ready);
        for number in &ready {
            self.plan(*number);
        }
        // SAFETY: the memory is the lane's own until the pages are done, and what was found stays
        // open during the visit.
        unsafe { self.submit(Access::Read) };
        for number in ready {
            self.write_parity(number);
        }
        // SAFETY: likewise.
        unsafe { self.submit(Access::Write) };
        drop(visit);
    }

    /// Finds out what the sum can be made of, and asks for it.
    fn plan(&mut self, number: usize) {
        let Some(mut flight) = self.parity.flights.get_mut(number).and_then(Option::take) else {
            return; // it has ended meanwhile
        };
        if flight.step == Step::Plan {
            self.plan_flight(number, &mut flight);
        }
        self.parity.flights[number] = Some(flight);
    }

    fn plan_flight(&mut self, number: usize, flight: &mut Flight) {
        let row = flight.row;
        let (sum, reads) = match &flight.task {
            Task::Read { .. } => (Sum::Others, self.others(flight, true)),
            Task::Write { before, .. } if self.has_parity(row.group) => {
                let (sum, reads) = self.parity_of_write(flight, before.is_some());
                (sum, Ok(reads))
            }
            Task::Write { .. } => (Sum::NoParity, Ok(Vec::new())),
        };
        let reads = match reads {
            Ok(reads) => reads,
            Err(error) => {
                flight.failed = graver(flight.failed, error);
                Vec::new()
            }
        };
        flight.sum.0 = match &flight.task {
            Task::Write { sealed, .. } => sealed.0,
            Task::Read { .. } => [0; PAGE_BYTES],
        };
        flight.step = Step::Read(sum);
        for (strip, of) in reads {
            let mut buffer = self.parity.buffer();
            let memory = buffer.0.as_mut_ptr();
            match self.shared.find(of, Access::Read, memory, token(number, strip)) {
                Found::At(blade, page) => {
                    flight.parts[strip] = Part::Read(buffer, flight.check_of(of));
                    flight.outstanding += 1;
                    self.sort_in(blade, page);
                }
                // Its blade was lost a moment ago.
                Found::Not(error) => flight.failed = graver(flight.failed, error),
                Found::Soon => flight.failed = graver(flight.failed, PageError::Deadline),
            }
        }
        if flight.outstanding == 0 {
            flight.read_is_over();
            if flight.step == Step::Plan {
                self.parity.ready.push(number);
            }
        }
    }

    /// How the parity of what is written is made, and what is read for that: as few pages as can
    /// be. Of a row with no other page it is the page itself.
    fn parity_of_write(
        &self,
        flight: &Flight,
        is_overwritten: bool,
    ) -> (Sum, Vec<(usize, SegmentPage)>) {
        let others = || self.others(flight, false).ok().map(|reads| (Sum::Others, reads));
        let change = || self.change(flight, is_overwritten).ok().map(|reads| (Sum::Change, reads));
        let count = flight.row.written_without(&flight.seals, Some(flight.at)).count();
        let made = match count < if is_overwritten { 2 } else { 1 } {
            true => others().or_else(change),
            false => change().or_else(others),
        };
        made.unwrap_or((Sum::Unknown, Vec::new()))
    }

    /// What is read so that the parity can be changed.
    fn change(
        &self,
        flight: &Flight,
        is_overwritten: bool,
    ) -> Result<Vec<(usize, SegmentPage)>, PageError> {
        let (row, mut reads) = (flight.row, Vec::with_capacity(2));
        if flight.seals.is_parity_doubtful(row.page_of(row.group.parity()).page) {
            return Err(PageError::Forged);
        }
        if is_overwritten {
            reads.push(self.readable(flight, flight.at)?);
        }
        let others = row.written_without(&flight.seals, Some(flight.at)).next().is_some();
        if is_overwritten || others {
            reads.push(self.readable(flight, row.page_of(row.group.parity()))?);
        }
        Ok(reads)
    }

    /// The others of the row, with its parity or without.
    fn others(
        &self,
        flight: &Flight,
        with_parity: bool,
    ) -> Result<Vec<(usize, SegmentPage)>, PageError> {
        let row = flight.row;
        let others = row.written_without(&flight.seals, Some(flight.at));
        let parity = with_parity.then(|| row.page_of(row.group.parity()));
        others.chain(parity).map(|at| self.readable(flight, at)).collect()
    }

    /// The strip's number, and its page, if it can be read.
    fn readable(
        &self,
        flight: &Flight,
        at: SegmentPage,
    ) -> Result<(usize, SegmentPage), PageError> {
        let strip = strip_of(flight.row.group, at);
        let of = Strip { strand: at.segment, superpage: at.page / SUPERPAGE_PAGES };
        if flight.useless[strip] || self.shared.place_of(of).is_none() {
            return Err(PageError::NotAllocated);
        }
        match self.shared.find(at, Access::Read, std::ptr::null_mut(), 0) {
            Found::At(..) => Ok((strip, at)),
            Found::Not(error) => Err(error),
            Found::Soon => Err(PageError::Deadline),
        }
    }

    /// True if the group has parity that is worth being written.
    fn has_parity(&self, group: Group) -> bool {
        let place = self.shared.place_of(group.parity());
        place.is_some_and(|place| self.is_reached(place))
    }

    fn is_reached(&self, place: crate::map::Place) -> bool {
        let record = place.record.map(|it| &self.shared.records()[usize::from(it)]);
        let target = record.and_then(|record| record.target());
        !self.shared.is_lost(target.unwrap_or(place).blade)
    }

    /// A link has ended with a page of a flight.
    pub(super) fn parity_completed(
        &mut self,
        bits: u64,
        blade: usize,
        result: Result<(), PageError>,
    ) {
        let (number, strip) = of_token(bits);
        let mut flight = self.parity.flights[number].take().expect("a page that was asked for");
        flight.outstanding -= 1;
        match std::mem::take(&mut flight.parts[strip]) {
            Part::Read(buffer, check) => {
                match result.and_then(|()| flight.take(&buffer, check)) {
                    Ok(()) => {}
                    Err(error) => {
                        if let (PageError::Forged, Check::Seal(at, _)) = (error, check) {
                            self.note_damage(at, at.segment.nth());
                        }
                        flight.useless[strip] = true;
                        flight.failed = flight.failed.or(Some(error));
                    }
                }
                self.parity.give_back(buffer);
            }
            Part::Written => {
                let is_lost = self.shared.blades[blade].is_lost();
                flight.written(strip, result, is_lost);
            }
            Part::Nothing => unreachable!("a strip answers that was asked"),
        }
        if flight.outstanding > 0 {
            self.parity.flights[number] = Some(flight);
            return;
        }
        match flight.step {
            Step::Read(_) => flight.read_is_over(),
            Step::Writing(sum) => return self.end_write(number, flight, sum),
            Step::Plan | Step::Write(_) => unreachable!("nothing was asked for"),
        }
        match flight.task {
            Task::Read { .. } => self.end_read(number, flight),
            Task::Write { .. } => {
                self.parity.flights[number] = Some(flight);
                self.parity.ready.push(number);
            }
        }
    }

    /// Hands out a page that was read, if all of it has arrived.
    fn end_read(&mut self, number: usize, mut flight: Flight) {
        self.parity.release(number);
        let Task::Read { read, tried, seal } = flight.task else { unreachable!("it is read") };
        let opened = match flight.failed {
            Some(error) => Err(error),
            None => flight.seals.open(read.at.page, seal, &mut flight.sum.0),
        };
        if opened.is_ok() {
            // SAFETY: the page is lent to the lane until its completion is handed out.
            unsafe { read.into.copy_from_nonoverlapping(flight.sum.0.as_ptr(), PAGE_BYTES) };
        }
        self.parity.give_back(flight.sum);
        // It may have been made again meanwhile, before one of the others was lost.
        let found = || self.shared.find(read.at, Access::Read, std::ptr::null_mut(), 0);
        let is_untried = !tried.has(read.at.segment.nth());
        match opened {
            Err(error) if is_untried && matches!(found(), Found::At(..)) => {
                self.again.push((read, tried, error));
            }
            result => self.ready.push(Completion { token: read.token, result }),
        }
    }

    /// Writes a page and its parity, once both can be.
    fn write_parity(&mut self, number: usize) {
        let Some(mut flight) = self.parity.flights.get_mut(number).and_then(Option::take) else {
            return;
        };
        let Step::Write(sum) = flight.step else {
            self.parity.flights[number] = Some(flight);
            return;
        };
        if matches!(flight.task, Task::Read { .. }) {
            return self.end_read(number, flight); // nothing could be asked for
        }
        if self.write_both(number, &mut flight, sum) {
            if flight.outstanding == 0 {
                return self.end_write(number, flight, sum);
            }
        } else {
            self.parity.ready.push(number); // the mover copies one of them
        }
        self.parity.flights[number] = Some(flight);
    }

    /// False if one of both cannot be written yet.
    fn write_both(&mut self, number: usize, flight: &mut Flight, sum: Sum) -> bool {
        let Task::Write { sealed, refused, .. } = &mut flight.task else { return true };
        let parity = flight.row.page_of(flight.row.group.parity());
        let member = strip_of(flight.row.group, flight.at);
        let mut writes: [Option<(BladeIndex, LinkPage)>; 2] = [None, None];
        let pages = [
            (flight.at, sealed.0.as_mut_ptr(), member),
            (parity, flight.sum.0.as_mut_ptr(), STRIPS - 1),
        ];
        let count = if matches!(sum, Sum::Change | Sum::Others) { 2 } else { 1 };
        for (write, (at, memory, strip)) in writes.iter_mut().zip(pages).take(count) {
            match self.shared.find(at, Access::Write, memory, token(number, strip)) {
                Found::At(blade, page) => *write = Some((blade, page)),
                Found::Soon => return false,
                Found::Not(error) if strip == member => *refused = graver(*refused, error),
                Found::Not(_) => {}
            }
        }
        if writes[1].is_some() {
            flight.seals.note_parity(parity.page, &flight.sum.0);
        }
        for ((blade, page), (_, _, strip)) in
            writes.into_iter().zip(pages).filter_map(|(write, page)| Some((write?, page)))
        {
            flight.parts[strip] = Part::Written;
            flight.outstanding += 1;
            self.sort_in(blade, page);
        }
        flight.step = Step::Writing(sum);
        true
    }

    /// Both were written, or were not.
    fn end_write(&mut self, number: usize, flight: Flight, sum: Sum) {
        self.parity.release(number);
        let Task::Write { token, sealed, is_stored, is_in_parity, refused, .. } = flight.task
        else {
            unreachable!("it was written");
        };
        let result = match (is_stored, refused) {
            (true, _) => Ok(()),
            // Its place is lost, and the rest of the row says what it is.
            (false, None | Some(PageError::BladeLost(_))) if is_in_parity => Ok(()),
            (false, error) => Err(error.or(flight.failed).unwrap_or(PageError::NotAllocated)),
        };
        if result.is_err() {
            flight.seals.forget(flight.at.page);
        }
        let is_right = result.is_ok() && is_in_parity;
        if sum != Sum::NoParity && !is_right && self.has_parity(flight.row.group) {
            self.shared.doubt(flight.row);
        }
        self.parity.give_back(sealed);
        self.parity.give_back(flight.sum);
        self.ready.push(Completion { token, result });
    }

    /// The lane ends with pages on their way: nobody knows what of them was written.
    pub(super) fn doubt_unfinished(&mut self) {
        for flight in self.parity.flights.iter().flatten() {
            if matches!(flight.task, Task::Write { .. }) {
                self.shared.doubt(flight.row);
            }
        }
    }
}

/// The number of a page's strip in its group; that of the parity is the last.
fn strip_of(group: Group, at: SegmentPage) -> usize {
    let of = Strip { strand: at.segment, superpage: at.page / SUPERPAGE_PAGES };
    group.strips().position(|strip| strip == of).expect("a page of the group")
}
