//! A lane's sealing: pages are sealed into memory of the lane's own before they are sent, since
//! their owner may take them back meanwhile, and opened in place when they arrive.
//!
//! Links know each page by its [`Flight`] and its copy; its owner's token comes back with the
//! completion. A page that is written to several copies has one flight, as has one that is asked of
//! several. Then each answer arrives in memory of the lane's own, for the page is its owner's again
//! with the first one, while the other is still on its way.

use std::sync::Arc;
use std::time::Instant;

use farpool_fabric::LinkPage;
use farpool_units::{PAGE_BYTES, exactly};

use crate::damage::is_damage;
use crate::seals::{Seal, Seals};
use crate::{COPIES_LIMIT, Completion, PageError, PageRead, PageWrite, SegmentPage};

/// Pages of memory that are kept while no page is on its way: one request of the pager's.
const IDLE_PAGES: usize = 64;

/// Pages on their way, and the memory that they travel from.
#[derive(Debug, Default)]
pub(crate) struct Sealer {
    flights: Vec<Option<Flight>>,
    /// Numbers of flights that are free.
    free: Vec<usize>,
    idle: Vec<Box<Buffer>>,
    /// Flights of reads so far, to tell those of one number apart.
    serial: u32,
    /// Copies that owe an answer which nobody waits for any more.
    stragglers: usize,
}

/// The number of a flight, which is used again after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightNumber(usize);

impl FlightNumber {
    pub(crate) fn copy(self, nth: usize) -> FlightCopy {
        FlightCopy { number: self.0, nth }
    }
}

/// A flight and the copy that a link was given of it, as the link's token says them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightCopy {
    number: usize,
    /// Which copy.
    pub(crate) nth: usize,
}

/// Bits of a link's token that say which copy it is.
pub(crate) const COPY_BITS: u32 = 2;
/// What they say of a page that is on its way for other reasons.
pub(crate) const NO_COPY: u64 = (1 << COPY_BITS) - 1;
const _: () = assert!(COPIES_LIMIT as u64 <= NO_COPY);

impl FlightCopy {
    pub(crate) fn token(self) -> u64 {
        (self.number << COPY_BITS | self.nth) as u64
    }

    pub(crate) fn of_token(token: u64) -> FlightCopy {
        let bits: usize = exactly(token);
        FlightCopy { number: bits >> COPY_BITS, nth: bits & ((1 << COPY_BITS) - 1) }
    }
}

/// What a copy was asked for, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    copy: FlightCopy,
    serial: u32,
    pub(crate) at: Instant,
}

#[derive(Debug)]
enum Flight {
    Read(ReadFlight),
    Write {
        at: SegmentPage,
        token: u64,
        sealed: Box<Buffer>,
        /// Copies that have not answered.
        outstanding: u8,
        /// Copies that have the page.
        stored: u8,
        /// What the first copy said that failed though its blade lives.
        refused: Option<PageError>,
        /// What the first one said whose blade is lost.
        lost: Option<PageError>,
    },
}

#[derive(Debug)]
struct ReadFlight {
    read: PageRead,
    seals: Arc<Seals>,
    seal: Seal,
    serial: u32,
    /// The copies that were asked.
    tried: CopySet,
    /// Those that have not answered, and where their answers arrive.
    asked: [Option<Destination>; COPIES_LIMIT],
    /// The page is its owner's again.
    is_answered: bool,
}

/// Where a copy's answer arrives.
#[derive(Debug)]
enum Destination {
    /// In the page itself: there is one copy.
    Page,
    /// In memory of the lane's own, and since when it is waited for.
    Lent(Instant, Box<Buffer>),
}

impl ReadFlight {
    fn outstanding(&self) -> usize {
        self.asked.iter().flatten().count()
    }
}

/// A page of one copy, to be asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPage {
    /// Which copy.
    pub(crate) nth: usize,
    pub(crate) page: LinkPage,
}

/// Copies by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopySet(u8);

impl CopySet {
    pub(crate) fn with(self, nth: usize) -> CopySet {
        CopySet(self.0 | 1 << nth)
    }

    pub(crate) fn has(self, nth: usize) -> bool {
        self.0 >> nth & 1 == 1
    }
}

/// The end of a page's way.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    /// This copy of the page is not what was stored.
    pub(crate) damaged: Option<SegmentPage>,
    /// The page was not written to all copies that it should be on.
    pub(crate) unwritten: Option<SegmentPage>,
}

/// What the end of a page's way leads to.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done(Completion),
    /// Other copies of the page have not answered, or the page is its owner's already.
    NotYet,
    /// This copy is of no use; others than those tried may be.
    Again(PageRead, CopySet, PageError),
}

/// Not aligned to a page: allocators give two pages for one that is.
#[derive(Debug)]
struct Buffer([u8; PAGE_BYTES]);

impl Sealer {
    /// Makes a page to be read known. Its link is to read what is returned: into memory of the
    /// lane's own if other copies may be asked too, which is so where the time is given.
    ///
    /// # Errors
    /// Nothing was ever written there.
    pub(crate) fn expect(
        &mut self,
        read: &PageRead,
        seals: &Arc<Seals>,
        tried: CopySet,
        copy: CopyPage,
        now: Option<Instant>,
    ) -> Result<(LinkPage, Option<Asked>), PageError> {
        let seal = seals.of_page(read.at.page).ok_or(PageError::Forged)?;
        self.serial = self.serial.wrapping_add(1);
        let mut flight = ReadFlight {
            read: *read,
            seals: Arc::clone(seals),
            seal,
            serial: self.serial,
            tried,
            asked: [const { None }; COPIES_LIMIT],
            is_answered: false,
        };
        let to = now.map_or(Destination::Page, |now| Destination::Lent(now, self.buffer()));
        let memory = flight.ask(copy.nth, to);
        let of = self.begin(Flight::Read(flight)).copy(copy.nth);
        let asked = now.map(|at| Asked { copy: of, serial: self.serial, at });
        Ok((LinkPage { memory, token: of.token(), ..copy.page }, asked))
    }

    /// The read, and the copies that were asked, if none of them has answered.
    pub(crate) fn unanswered(&self, asked: Asked) -> Option<(PageRead, CopySet)> {
        let flight = self.flight_of(asked).filter(|flight| !flight.is_answered)?;
        Some((flight.read, flight.tried))
    }

    /// True if the copy that was asked has not answered, whether or not anybody waits for it.
    pub(crate) fn is_owed(&self, asked: Asked) -> bool {
        self.flight_of(asked).is_some_and(|flight| flight.asked[asked.copy.nth].is_some())
    }

    fn flight_of(&self, asked: Asked) -> Option<&ReadFlight> {
        match self.flights.get(asked.copy.number)?.as_ref()? {
            Flight::Read(flight) if flight.serial == asked.serial => Some(flight),
            _ => None,
        }
    }

    /// Asks another copy for a read of which [`Sealer::unanswered`] said that it may be. Its link
    /// is to read what is returned.
    pub(crate) fn ask_too(
        &mut self,
        asked: Asked,
        copy: CopyPage,
        now: Instant,
    ) -> (LinkPage, Asked) {
        let (number, nth) = (asked.copy.number, copy.nth);
        let to = Destination::Lent(now, self.buffer());
        let Some(Some(Flight::Read(flight))) = self.flights.get_mut(number) else {
            unreachable!("the flight is under way");
        };
        let memory = flight.ask(nth, to);
        let asked = Asked { copy: FlightCopy { number, nth }, at: now, ..asked };
        (LinkPage { memory, token: asked.copy.token(), ..copy.page }, asked)
    }

    /// Copies that owe an answer which nobody waits for any more.
    pub(crate) fn stragglers(&self) -> usize {
        self.stragglers
    }

    /// Since when the answer of this copy is waited for, if others may be asked too.
    pub(crate) fn asked_at(&self, copy: FlightCopy) -> Option<Instant> {
        match self.flights.get(copy.number)?.as_ref()? {
            Flight::Read(flight) => match flight.asked[copy.nth].as_ref()? {
                Destination::Lent(since, _) => Some(*since),
                Destination::Page => None,
            },
            Flight::Write { .. } => None,
        }
    }

    fn buffer(&mut self) -> Box<Buffer> {
        self.idle.pop().unwrap_or_else(|| Box::new(Buffer([0; PAGE_BYTES])))
    }

    /// Seals a page to be written to so many copies. The links are to write what is returned: its
    /// memory, under its token.
    ///
    /// # Safety
    /// [`PageWrite::from`] points to 4096 readable bytes, which nothing writes during the call.
    ///
    /// # Errors
    /// As for [`Seals::seal`].
    pub(crate) unsafe fn seal(
        &mut self,
        write: &PageWrite,
        seals: &Seals,
        copies: u8,
    ) -> Result<(*mut u8, FlightNumber), PageError> {
        let mut sealed = self.buffer();
        // SAFETY: as promised by the caller; the buffer is the lane's own.
        unsafe { write.from.copy_to_nonoverlapping(sealed.0.as_mut_ptr(), PAGE_BYTES) };
        if let Err(error) = seals.seal(write.at.page, &mut sealed.0) {
            self.idle.push(sealed);
            return Err(error);
        }
        let memory = sealed.0.as_mut_ptr();
        let number = self.begin(Flight::Write {
            at: write.at,
            token: write.token,
            sealed,
            outstanding: copies,
            stored: 0,
            refused: None,
            lost: None,
        });
        Ok((memory, number))
    }

    fn begin(&mut self, flight: Flight) -> FlightNumber {
        let number = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[number] = Some(flight);
        FlightNumber(number)
    }

    /// Ends the flight, or a copy's part in it: opens what was read. `is_lost` says whether the
    /// blade that it was with is lost.
    ///
    /// # Safety
    /// What [`PageRead::into`] of a read points to is still lent to the lane, if it was not
    /// answered.
    pub(crate) unsafe fn end(
        &mut self,
        copy: FlightCopy,
        result: Result<(), PageError>,
        is_lost: bool,
    ) -> Ended {
        let FlightCopy { number, nth } = copy;
        let (mut damaged, mut unwritten) = (None, None);
        let flight = self.flights[number].as_mut().expect("a page arrives that was asked for");
        let (outcome, is_over) = match flight {
            Flight::Write { at, outstanding, stored, refused, lost, token, .. } => {
                match result {
                    Ok(()) => *stored += 1,
                    Err(error) if is_lost => *lost = lost.or(Some(error)),
                    Err(error) => *refused = refused.or(Some(error)),
                }
                *outstanding -= 1;
                // A page is stored once all copies have it whose blades live.
                let error = refused.or(lost.filter(|_| *stored == 0));
                let done = Completion { token: *token, result: error.map_or(Ok(()), Err) };
                match *outstanding {
                    0 => {
                        unwritten = error.map(|_| *at);
                        (Outcome::Done(done), true)
                    }
                    _ => (Outcome::NotYet, false),
                }
            }
            Flight::Read(flight) => {
                let to = flight.asked[nth].take().expect("a copy answers that was asked");
                let buffer = match to {
                    Destination::Page => None,
                    Destination::Lent(_, buffer) => Some(buffer),
                };
                // SAFETY: as promised by the caller.
                let outcome =
                    unsafe { flight.take_answer(result, buffer.as_deref(), &mut damaged) };
                let outstanding = flight.outstanding();
                self.idle.extend(buffer);
                match (flight.is_answered, &outcome) {
                    (true, Outcome::Done(_)) => self.stragglers += outstanding,
                    (true, _) => self.stragglers -= 1,
                    (false, _) => {}
                }
                (outcome, outstanding == 0)
            }
        };
        if is_over {
            if let Some(Flight::Write { sealed, .. }) = self.flights[number].take() {
                self.idle.push(sealed);
            }
            self.free.push(number);
            if self.free.len() == self.flights.len() {
                self.idle.truncate(IDLE_PAGES);
            }
        }
        Ended { outcome, damaged, unwritten }
    }
}

impl ReadFlight {
    /// Notes that a copy is asked. Returns the memory for its answer.
    fn ask(&mut self, nth: usize, mut to: Destination) -> *mut u8 {
        let memory = match &mut to {
            Destination::Page => self.read.into,
            Destination::Lent(_, buffer) => buffer.0.as_mut_ptr(),
        };
        self.tried = self.tried.with(nth);
        self.asked[nth] = Some(to);
        memory
    }

    /// Takes the answer of one copy, whose [`ReadFlight::asked`] is taken.
    ///
    /// # Safety
    /// As for [`Sealer::end`].
    unsafe fn take_answer(
        &mut self,
        result: Result<(), PageError>,
        buffer: Option<&Buffer>,
        damaged: &mut Option<SegmentPage>,
    ) -> Outcome {
        if self.is_answered {
            return Outcome::NotYet;
        }
        // SAFETY: as promised by the caller: 4096 writable bytes that nothing else uses.
        let bytes = unsafe { &mut *self.read.into.cast::<[u8; PAGE_BYTES]>() };
        if let Some(buffer) = buffer.filter(|_| result.is_ok()) {
            *bytes = buffer.0;
        }
        match result.and_then(|()| self.seals.open(self.read.at.page, self.seal, bytes)) {
            Ok(()) => {
                self.is_answered = true;
                Outcome::Done(Completion { token: self.read.token, result: Ok(()) })
            }
            Err(error) => {
                *damaged = is_damage(error).then_some(self.read.at);
                match self.outstanding() {
                    0 => Outcome::Again(self.read, self.tried, error),
                    _ => Outcome::NotYet,
                }
            }
        }
    }
}
