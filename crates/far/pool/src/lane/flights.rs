//! Pages whose parity matters, on their way: what is known of each, and what its next step is.
//!
//! Its first steps read what the sum is made of: the page that is overwritten and the parity, or,
//! where these are not to be had, all others of the row. Of a page that is written, the last step
//! is to write both. Which blades are asked is the lane's business ([`super::parity`]).

use std::sync::Arc;

use farpool_units::{PAGE_BYTES, exactly};

use crate::parity::{Row, RowLock, add};
use crate::sealing::CopySet;
use crate::seals::{Seal, Seals};
use crate::{PARITY_DOMAINS, PageError, PageRead, SegmentPage};

/// Strips of a group: its members, and its parity as the last one.
pub(super) const STRIPS: usize = PARITY_DOMAINS;
/// Pages of memory that are kept while no page is on its way.
const IDLE_PAGES: usize = 64;

/// Pages whose parity matters, on their way.
#[derive(Debug, Default)]
pub(super) struct ParityFlights {
    pub(super) flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Those whose next step is to be begun, or tried again.
    pub(super) ready: Vec<usize>,
    /// Reads that wait for their row, and what was tried of each.
    pub(super) waiting: Vec<(PageRead, CopySet)>,
    idle: Vec<Box<Buffer>>,
}

#[derive(Debug)]
pub(super) struct Buffer(pub(super) [u8; PAGE_BYTES]);

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) task: Task,
    pub(super) at: SegmentPage,
    pub(super) row: Row,
    pub(super) seals: Arc<Seals>,
    /// What the row's parity is to be, or what is read; as far as it is known.
    pub(super) sum: Box<Buffer>,
    /// By strip.
    pub(super) parts: [Part; STRIPS],
    pub(super) step: Step,
    /// Answers that are waited for.
    pub(super) outstanding: usize,
    /// The first error of this step.
    pub(super) failed: Option<PageError>,
    /// Strips whose answer was of no use, by strip.
    pub(super) useless: [bool; STRIPS],
    pub(super) _lock: RowLock,
}

#[derive(Debug)]
pub(super) enum Task {
    Read {
        read: PageRead,
        tried: CopySet,
        seal: Seal,
    },
    Write {
        token: u64,
        sealed: Box<Buffer>,
        /// What was there before; `None`: nothing was.
        before: Option<Seal>,
        is_stored: bool,
        is_in_parity: bool,
        /// Where the data page could not be written though its blade lives.
        refused: Option<PageError>,
    },
}

/// What one strip of a group does for a flight.
#[derive(Debug, Default)]
pub(super) enum Part {
    #[default]
    Nothing,
    /// It is read into this.
    Read(Box<Buffer>, Check),
    /// It is written.
    Written,
}

/// How a page is checked before it goes into the sum.
#[derive(Clone, Copy, Debug)]
pub(super) enum Check {
    /// By its seal.
    Seal(SegmentPage, Seal),
    /// By what was last written of this page of the parity.
    Digest(u32),
    /// Not at all: the sum is checked, by its own seal.
    Later,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// What is to be read is to be found out.
    Plan,
    Read(Sum),
    /// The sum is known.
    Write(Sum),
    Writing(Sum),
}

/// What the sum is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sum {
    /// The parity, less what was there, plus what is written.
    Change,
    /// All others of the row.
    Others,
    /// There is no parity: only the page itself is written.
    NoParity,
    /// There is, and nobody can say what it should be.
    Unknown,
}

/// Bits of a token below the number of the flight, which a link returns.
const STRIP_BITS: u32 = 3;
const _: () = assert!(STRIPS <= 1 << STRIP_BITS);

impl ParityFlights {
    pub(super) fn buffer(&mut self) -> Box<Buffer> {
        self.idle.pop().unwrap_or_else(|| Box::new(Buffer([0; PAGE_BYTES])))
    }

    /// Pages that no link has, and that are not handed out.
    pub(super) fn between(&self) -> usize {
        self.ready.len() + self.waiting.len()
    }

    pub(super) fn begin(&mut self, flight: Flight) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[number] = Some(flight);
        self.ready.push(number);
    }

    /// Frees the number of a flight that was taken out.
    pub(super) fn release(&mut self, number: usize) {
        assert!(self.flights[number].is_none(), "a page that is on its way ends once");
        self.free.push(number);
    }

    pub(super) fn give_back(&mut self, buffer: Box<Buffer>) {
        if self.idle.len() < IDLE_PAGES {
            self.idle.push(buffer);
        }
    }
}

impl Flight {
    /// Everything that was asked for has arrived, or has not.
    pub(super) fn read_is_over(&mut self) {
        let Step::Read(sum) = self.step else { return };
        self.step = match (&self.task, self.failed) {
            // Planned anew, without what was of no use.
            (Task::Write { .. }, Some(_)) => Step::Plan,
            _ => Step::Write(sum),
        };
        if self.step == Step::Plan {
            self.failed = None;
        }
    }

    pub(super) fn check_of(&self, of: SegmentPage) -> Check {
        let seal = match &self.task {
            Task::Read { .. } => return Check::Later,
            Task::Write { .. } if of.segment.nth() > 0 => return Check::Digest(of.page),
            Task::Write { before, .. } if of == self.at => *before,
            Task::Write { .. } => self.seals.of_stored(of.page),
        };
        seal.map_or(Check::Later, |seal| Check::Seal(of, seal))
    }

    /// Adds a page that arrived to the sum, if it is what was stored.
    pub(super) fn take(&mut self, page: &Buffer, check: Check) -> Result<(), PageError> {
        match check {
            Check::Seal(at, seal) => self.seals.open(at.page, seal, &mut page.0.clone())?,
            Check::Digest(of) => self.seals.check_parity(of, &page.0)?,
            Check::Later => {}
        }
        add(&mut self.sum.0, &page.0);
        Ok(())
    }

    /// One of both was written, or was not.
    pub(super) fn written(&mut self, strip: usize, result: Result<(), PageError>, is_lost: bool) {
        let Task::Write { is_stored, is_in_parity, refused, .. } = &mut self.task else { return };
        match (result, strip == STRIPS - 1) {
            (Ok(()), true) => *is_in_parity = true,
            (Ok(()), false) => *is_stored = true,
            (Err(error), true) => self.failed = self.failed.or(Some(error)),
            (Err(error), false) if is_lost => self.failed = self.failed.or(Some(error)),
            (Err(error), false) => *refused = Some(error),
        }
    }
}

/// What a link is told of a page: never what a [`crate::sealing::FlightCopy`] is.
pub(super) fn token(number: usize, strip: usize) -> u64 {
    let bits = (number << STRIP_BITS | strip) as u64;
    bits << crate::sealing::COPY_BITS | crate::sealing::NO_COPY
}

pub(super) fn of_token(bits: u64) -> (usize, usize) {
    let bits: usize = exactly(bits);
    (bits >> STRIP_BITS, bits & ((1 << STRIP_BITS) - 1))
}
