//! Reads and writes of pages: where they are, and what of them is sent or awaited.

use super::{Close, Talk, Tools};
use crate::memory::Placed;
use crate::server::arriving::Write;
use crate::server::requests::{self, Session};
use crate::server::shared::Shared;
use crate::table::{Access, Refused};
use farpool_units::{PAGE_BYTES, exactly};
use farpool_wire::{
    ErrorCode, Extent, Header, Opcode, PagesChecksum, Request, Response, SegmentId, WireError,
    split_head,
};
use std::sync::atomic::Ordering;

/// Requests behind one that waits for flash whose pages are begun to be read, too.
const LOOK_AHEAD: usize = 16;

/// Whether a request was carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Carried {
    Out,
    /// Its pages are on flash, or there is no memory for them now; it is to be tried again.
    NotYet,
}

impl Talk {
    pub(super) fn read(
        &mut self,
        header: Header,
        segment: SegmentId,
        extents: &[Extent],
        shared: &Shared,
        tools: &mut Tools,
    ) -> Result<Carried, Refused> {
        let Tools { caller, scratch, slices, keeps, .. } = tools;
        let session = &self.session;
        let permit =
            requests::access(&shared.blade, session, segment, extents, Access::Read, scratch)?;
        slices.clear();
        keeps.clear();
        let placed = permit.memory.place(&scratch.runs, (Access::Read, caller), slices, keeps);
        if placed.map_err(|error| crate::blade::backing(&error))? == Placed::Away {
            return Ok(Carried::NotYet);
        }
        let mut checksum = PagesChecksum::new();
        slices.iter().for_each(|slice| slice.checksum(&mut checksum));
        let bytes: usize = slices.iter().map(|slice| slice.bytes()).sum();
        // A request for more pages than a frame holds was refused.
        let page_count: u16 = exactly(bytes / PAGE_BYTES);
        let response = Response::Pages { page_count };
        let credits = shared.blade.config().credits;
        let (id, checksum) = (header.request_id, checksum.value());
        self.output
            .push_head(|out| response.encode(Opcode::Read, id, credits, checksum, out))
            .map_err(|_| Refused::new(ErrorCode::TooLarge, 0))?;
        self.output.push_pages(slices, keeps);
        self.turn.pages += u32::from(page_count);
        count_pages(&self.session, shared, page_count, Access::Read);
        Ok(Carried::Out)
    }

    /// Prepares for the pages; those of a refused write are discarded as they arrive.
    pub(super) fn begin_write(
        &mut self,
        header: Header,
        segment: SegmentId,
        extents: &[Extent],
        shared: &Shared,
        tools: &mut Tools,
    ) -> Result<Carried, Refused> {
        self.arriving.begin(header.pages_bytes());
        let scratch = &mut tools.scratch;
        let session = &self.session;
        let permit =
            requests::access(&shared.blade, session, segment, extents, Access::Write, scratch)?;
        let mut keeps = Vec::new();
        let wanted = (Access::Write, &mut tools.caller);
        let slices = &mut self.arriving.slices;
        match permit.memory.place(&scratch.runs, wanted, slices, &mut keeps) {
            Ok(Placed::Here) => {}
            Ok(Placed::Away) => {
                self.arriving.begin(0);
                return Ok(Carried::NotYet);
            }
            Err(error) => {
                self.arriving.slices.clear();
                return Err(shared.blade.refusal(&error));
            }
        }
        let writing = self.gate.begin_writing(permit.guard);
        self.arriving.write = Some(Write::new(header, keeps, writing));
        Ok(Carried::Out)
    }

    /// Answers the write whose last byte has arrived.
    pub(super) fn end_write(&mut self, shared: &Shared) -> Result<(), Close> {
        let Some(write) = self.arriving.write.take() else {
            return Ok(());
        };
        if self.arriving.checksum.value() != write.header.pages_checksum {
            return Err(WireError::PagesChecksum.into());
        }
        self.turn.pages += u32::from(write.header.page_count);
        count_pages(&self.session, shared, write.header.page_count, Access::Write);
        let _always_fits = self.answer(write.header, &Response::Done, shared);
        Ok(())
    }

    /// Begins to read from flash what the next requests in the input ask for, behind one that waits
    /// for flash: they are carried out in order, but need not wait one after the other.
    pub(super) fn look_ahead(&self, mut input: &[u8], shared: &Shared, tools: &mut Tools) {
        if !tools.caller.may_look_ahead() {
            return;
        }
        for _ in 0..LOOK_AHEAD {
            let Ok(Some(head)) = split_head(input) else { return };
            let Ok(Request::Read { segment, extents }) = Request::decode(&head) else { return };
            let Tools { caller, scratch, slices, keeps, .. } = &mut *tools;
            let (blade, session) = (&shared.blade, &self.session);
            let access = requests::access(blade, session, segment, extents, Access::Read, scratch);
            let Ok(permit) = access else { return };
            let wanted = (Access::Read, caller);
            slices.clear();
            let placed = permit.memory.place(&scratch.runs, wanted, slices, keeps);
            // They are not sent now, and may leave again.
            keeps.clear();
            if placed.is_err() {
                return;
            }
            input = input.get(head.header.head_bytes()..).unwrap_or_default();
        }
    }
}

fn count_pages(session: &Session, shared: &Shared, page_count: u16, access: Access) {
    let Ok((_, client)) = session.client() else {
        return;
    };
    let count = u64::from(page_count);
    let blade = &shared.blade.counters;
    let (of_client, of_blade) = match access {
        Access::Read => (&client.pages_read, &blade.pages_read),
        Access::Write => (&client.pages_written, &blade.pages_written),
    };
    of_client.fetch_add(count, Ordering::Relaxed);
    of_blade.fetch_add(count, Ordering::Relaxed);
    if let Some(traffic) = session.traffic() {
        let of_grant = match access {
            Access::Read => &traffic.pages_read,
            Access::Write => &traffic.pages_written,
        };
        of_grant.fetch_add(count, Ordering::Relaxed);
    }
}
