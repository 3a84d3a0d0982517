//! A lane's sealing: pages are sealed into memory of the lane's own before they are sent, since
//! their owner may take them back meanwhile, and opened in place when they arrive.
//!
//! Links know each page by the number of its flight; its owner's token comes back with the
//! completion.

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
    Read { read: PageRead, seals: Arc<Seals>, seal: Seal },
    Write { token: u64, sealed: Box<Buffer> },
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
    ) -> Result<LinkPage, PageError> {
        let seal = seals.of_page(read.at.page).ok_or(PageError::Forged)?;
        let token = self.begin(Flight::Read { read: *read, seals: Arc::clone(seals), seal });
        Ok(LinkPage { token, ..page })
    }

    /// Seals a page to be written. The link is to write what is returned.
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
        page: LinkPage,
    ) -> Result<LinkPage, PageError> {
        let mut sealed = self.idle.pop().unwrap_or_else(|| Box::new(Buffer([0; PAGE_BYTES])));
        // SAFETY: as promised by the caller; the buffer is the lane's own.
        unsafe { write.from.copy_to_nonoverlapping(sealed.0.as_mut_ptr(), PAGE_BYTES) };
        if let Err(error) = seals.seal(write.at.page, &mut sealed.0) {
            self.idle.push(sealed);
            return Err(error);
        }
        let memory = sealed.0.as_mut_ptr();
        let token = self.begin(Flight::Write { token: write.token, sealed });
        Ok(LinkPage { memory, token, ..page })
    }

    fn begin(&mut self, flight: Flight) -> u64 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[number] = Some(flight);
        number as u64
    }

    /// Ends the flight of this number: opens what was read. Returns its owner's completion.
    ///
    /// # Safety
    /// What [`PageRead::into`] of a read points to is still lent to the lane.
    pub(crate) unsafe fn end(&mut self, number: u64, result: Result<(), PageError>) -> Completion {
        let number: usize = exactly(number);
        let flight = self.flights[number].take().expect("a page arrives that was asked for");
        self.free.push(number);
        match flight {
            Flight::Write { token, sealed } => {
                self.idle.push(sealed);
                if self.free.len() == self.flights.len() {
                    self.idle.truncate(IDLE_PAGES);
                }
                Completion { token, result }
            }
            Flight::Read { read, seals, seal } => {
                // SAFETY: as promised by the caller: 4096 writable bytes that nothing else uses.
                let bytes = unsafe { &mut *read.into.cast::<[u8; PAGE_BYTES]>() };
                let result = result.and_then(|()| seals.open(read.at.page, seal, bytes));
                Completion { token: read.token, result }
            }
        }
    }
}
