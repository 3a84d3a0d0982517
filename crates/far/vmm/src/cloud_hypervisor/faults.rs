//! Answers the page faults of a guest that Cloud Hypervisor has restored in postcopy mode. It holds
//! the userfaultfd; we write what is missing into the memory that we handed over.
//!
//! Invariants:
//! - a page of the image is written once, before it is answered, and never again: after that it is
//!   the guest's;
//! - a page is written by one pwrite(2): who touches it meanwhile waits for the page's lock, and
//!   finds all of it;
//! - a lost page is not answered: the monitor is told of an error, and killed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use farpool_units::PAGE_BYTES_U64;
use rustix::fs::FallocateFlags;

use super::snapshot::read_request;
use super::{GuestError, Options, Snapshot};
use crate::page_set::PageSet;
use crate::socket::{SocketError, Stop, Talk, wait};
use crate::store::{READING_PAGES, Reader};
use crate::wire::cloud_hypervisor::{Command, MigrationError, Place, Range, Response};

/// Pages that are fetched at once for nobody: few, so that a fault waits for little.
const BEFOREHAND_PAGES: usize = 16;

/// One restored guest.
#[derive(Debug)]
pub(super) struct Faults {
    snapshot: Arc<Snapshot>,
    /// The memory of each slot, shared with the guest.
    files: Vec<(u32, File)>,
    owed: PageSet,
    reader: Reader,
    /// Pages before it were looked at to be written beforehand.
    cursor: u32,
}

impl Faults {
    pub(super) fn new(
        snapshot: Arc<Snapshot>,
        files: Vec<(u32, File)>,
    ) -> Result<Faults, GuestError> {
        let (owed, reader) = (snapshot.image.present().clone(), snapshot.image.reader()?);
        Ok(Faults { snapshot, files, owed, reader, cursor: 0 })
    }

    /// Answers until the monitor closes the connection.
    ///
    /// # Errors
    /// It asks for what there is not, a page is lost, or it is time to stop. The monitor must be
    /// ended then.
    pub(super) fn serve(
        &mut self,
        socket: &OwnedFd,
        options: Options,
        stop: &Stop,
    ) -> Result<(), GuestError> {
        let talk = Talk { stop, patience: None };
        loop {
            if !self.await_request(socket, options, stop)? {
                return Ok(());
            }
            let answered = self.answer(&talk, socket);
            match &answered {
                Ok(()) => talk.send(socket, &Response::DONE.encode(), None)?,
                Err(_) => {
                    // If it cannot be told, it is ended all the same.
                    let _ = talk.send(socket, &Response::Error.encode(), None);
                    return answered;
                }
            }
        }
    }

    /// Waits for a request, and writes pages beforehand meanwhile. False at the end.
    fn await_request(
        &mut self,
        socket: &OwnedFd,
        options: Options,
        stop: &Stop,
    ) -> Result<bool, GuestError> {
        use rustix::net::RecvFlags;
        loop {
            if stop.is_now() {
                return Err(GuestError::Stopped);
            }
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(socket, &mut [0_u8; 1][..], flags).map(|(_, count)| count) {
                Ok(0) | Err(rustix::io::Errno::CONNRESET) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(SocketError::from(error).into()),
            }
            if !(options.beforehand && self.write_beforehand()?) {
                wait(&[socket.as_fd(), stop.as_fd()], None);
            }
        }
    }

    fn answer(&mut self, talk: &Talk<'_>, socket: &OwnedFd) -> Result<(), GuestError> {
        let mut descriptors = Vec::new();
        let (command, payload) = read_request(talk, socket, &mut descriptors)?;
        let range = match <[u8; 16]>::try_from(payload) {
            Ok(bytes) if command == Command::PageFault => Range::decode(&bytes),
            _ => return Err(MigrationError::Order { command, expected: "PageFault" }.into()),
        };
        let place = self.snapshot.parts.memory.locate(range)?;
        self.write(place)
    }

    /// Makes a part of the guest's memory present.
    fn write(&mut self, place: Place) -> Result<(), GuestError> {
        let pages = place.first_page..place.first_page + place.pages;
        let owed: Vec<u32> = pages.filter(|page| self.owed.has(*page)).collect();
        self.write_pages(&owed, place)?;
        // What is still missing is zeros, also what the guest has had and dropped since. What is
        // there stays.
        let length = u64::from(place.pages) * PAGE_BYTES_U64;
        let file = self.file(place.slot)?;
        rustix::fs::fallocate(file, FallocateFlags::empty(), place.file_offset, length)
            .map_err(|error| GuestError::Memory(error.into()))
    }

    /// Fetches pages and writes them where `place` says.
    fn write_pages(&mut self, pages: &[u32], place: Place) -> Result<(), GuestError> {
        for some in pages.chunks(READING_PAGES) {
            self.reader.fetch(some);
            while self.reader.is_busy() {
                for fetched in self.reader.wait()? {
                    let within = u64::from(fetched.page - place.first_page) * PAGE_BYTES_U64;
                    let bytes = self.reader.bytes(fetched.number);
                    let written =
                        self.file(place.slot)?.write_all_at(bytes, place.file_offset + within);
                    written.map_err(GuestError::Memory)?;
                    self.reader.release(fetched.number);
                    self.owed.remove(fetched.page);
                }
            }
        }
        Ok(())
    }

    /// Writes some pages that nobody asked for. False if there are none any more.
    fn write_beforehand(&mut self) -> Result<bool, GuestError> {
        let Some(first) = self.owed.first_from(self.cursor) else { return Ok(false) };
        let memory = &self.snapshot.parts.memory;
        let found = memory.mappings().find(|(mapping, first_page)| {
            first.checked_sub(*first_page).is_some_and(|within| within < mapping.pages())
        });
        let Some((mapping, first_page)) = found else { return Ok(false) };
        let end = first_page + mapping.pages();
        let mut pages = vec![first];
        while let Some(page) = self.owed.first_from(pages[pages.len() - 1] + 1)
            && page < end
            && pages.len() < BEFOREHAND_PAGES
        {
            pages.push(page);
        }
        self.cursor = pages[pages.len() - 1] + 1;
        let (slot, file_offset) = (mapping.slot, mapping.file_offset);
        self.write_pages(&pages, Place { slot, file_offset, first_page, pages: mapping.pages() })?;
        Ok(true)
    }

    fn file(&self, slot: u32) -> Result<&File, GuestError> {
        let file = self.files.iter().find(|it| it.0 == slot);
        Ok(file.map(|it| &it.1).ok_or(MigrationError::NoMemory { slot })?)
    }
}
