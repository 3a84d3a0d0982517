//! A lane's sealing: pages are sealed into memory of the lane's own before they are sent, since
//! their owner may take them back meanwhile, and opened in place when they arrive.
//!
//! Links know each page by the number of its flight; its owner's token comes back with the
//! completion. A page that is written to several copies has one flight.

use std::sync::Arc;

use farpool_fabric::LinkPage;
use farpool_units::{PAGE_BYTES, exactly};

use crate::seals::{Seal, Seals};
use crate::{Completion, PageError, PageRead, PageWrite};

/// Pages of memory that are kept while no page is on its way: one request of the pager's.
const IDLE_PAGES: usize = 64;

/// Pages on their way, and the memory that they travel from.
#[derive(Debug, Default)]
pub(crate) struct Sealer {
    flights: Vec<Option<Flight>>,
    /// Numbers of flights that are free.
    free: Vec<usize>,
    idle: Vec<Box<Buffer>>,
}

#[derive(Debug)]
enum Flight {
    Read {
        read: PageRead,
        seals: Arc<Seals>,
        seal: Seal,
        /// The copies that were read, this one included.
        tried: CopySet,
    },
    Write {
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

/// What the end of a page's way leads to.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done(Completion),
    /// Other copies of a page that is written have not answered.
    NotYet,
    /// This copy is of no use; others than those tried may be.
    Again(PageRead, CopySet, PageError),
}

/// Not aligned to a page: allocators give two pages for one that is.
#[derive(Debug)]
struct Buffer([u8; PAGE_BYTES]);

impl Sealer {
    /// Makes a page to be read known. The link is to read what is returned.
    ///
    /// # Errors
    /// Nothing was ever written there.
    pub(crate) fn expect(
        &mut self,
        read: &PageRead,
        seals: &Arc<Seals>,
        page: LinkPage,
        tried: CopySet,
    ) -> Result<LinkPage, PageError> {
        let seal = seals.of_page(read.at.page).ok_or(PageError::Forged)?;
        let seals = Arc::clone(seals);
        let token = self.begin(Flight::Read { read: *read, seals, seal, tried });
        Ok(LinkPage { token, ..page })
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
    ) -> Result<(*mut u8, u64), PageError> {
        let mut sealed = self.idle.pop().unwrap_or_else(|| Box::new(Buffer([0; PAGE_BYTES])));
        // SAFETY: as promised by the caller; the buffer is the lane's own.
        unsafe { write.from.copy_to_nonoverlapping(sealed.0.as_mut_ptr(), PAGE_BYTES) };
        if let Err(error) = seals.seal(write.at.page, &mut sealed.0) {
            self.idle.push(sealed);
            return Err(error);
        }
        let memory = sealed.0.as_mut_ptr();
        let token = self.begin(Flight::Write {
            token: write.token,
            sealed,
            outstanding: copies,
            stored: 0,
            refused: None,
            lost: None,
        });
        Ok((memory, token))
    }

    fn begin(&mut self, flight: Flight) -> u64 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[number] = Some(flight);
        number as u64
    }

    /// Ends the flight of this number, or of one of its copies: opens what was read. `is_lost` says
    /// whether the blade that it was with is lost.
    ///
    /// # Safety
    /// What [`PageRead::into`] of a read points to is still lent to the lane.
    pub(crate) unsafe fn end(
        &mut self,
        number: u64,
        result: Result<(), PageError>,
        is_lost: bool,
    ) -> Outcome {
        let number: usize = exactly(number);
        let flight = self.flights[number].as_mut().expect("a page arrives that was asked for");
        if let Flight::Write { outstanding, stored, refused, lost, .. } = flight {
            match result {
                Ok(()) => *stored += 1,
                Err(error) if is_lost => *lost = lost.or(Some(error)),
                Err(error) => *refused = refused.or(Some(error)),
            }
            *outstanding -= 1;
            if *outstanding > 0 {
                return Outcome::NotYet;
            }
        }
        let flight = self.flights[number].take().expect("it is there");
        self.free.push(number);
        match flight {
            Flight::Write { token, sealed, stored, refused, lost, .. } => {
                self.idle.push(sealed);
                if self.free.len() == self.flights.len() {
                    self.idle.truncate(IDLE_PAGES);
                }
                // A page is stored once all copies have it whose blades live.
                let error = refused.or(lost.filter(|_| stored == 0));
                Outcome::Done(Completion { token, result: error.map_or(Ok(()), Err) })
            }
            Flight::Read { read, seals, seal, tried } => {
                // SAFETY: as promised by the caller: 4096 writable bytes that nothing else uses.
                let bytes = unsafe { &mut *read.into.cast::<[u8; PAGE_BYTES]>() };
                match result.and_then(|()| seals.open(read.at.page, seal, bytes)) {
                    Ok(()) => Outcome::Done(Completion { token: read.token, result: Ok(()) }),
                    Err(error) => Outcome::Again(read, tried, error),
                }
            }
        }
    }
}
