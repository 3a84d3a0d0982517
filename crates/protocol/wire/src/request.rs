//! A client's requests to a blade.

use crate::codec::{Append, Fields, within};
use crate::header::{Head, Header, Kind, Opcode, append_head};
use crate::{
    ClientId, DISCARD_EXTENTS_LIMIT, EXTENTS_LIMIT, Grant, GrantKey, NAME_LIMIT_BYTES,
    PAGES_PER_FRAME_LIMIT, PageNumber, RequestId, SPAN_LIMIT_SUPERPAGES,
    SUPERPAGES_PER_REQUEST_LIMIT, SegmentId, SegmentToken, SharingGroup, SuperpageNumber,
    WireError,
};
use farpool_units::exactly;
use std::num::NonZeroU64;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A run of pages of a segment, in its wire format. Once decoded, it is never empty and never
/// beyond page 2^32 - 1.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Extent {
    first: U32,
    count: U32,
}

const _: () = assert!(size_of::<Extent>() == 8);

impl Extent {
    /// Creates a run of `count_pages` pages from `first` on.
    pub fn new(first: PageNumber, count_pages: u32) -> Self {
        Extent { first: U32::new(first.0), count: U32::new(count_pages) }
    }

    /// Creates a run of a single page.
    pub fn page(page: PageNumber) -> Self {
        Self::new(page, 1)
    }

    /// Returns the first page.
    pub fn first(self) -> PageNumber {
        PageNumber(self.first.get())
    }

    /// Returns the number of pages.
    pub fn count_pages(self) -> u32 {
        self.count.get()
    }

    fn validate(self) -> Result<(), WireError> {
        let end = u64::from(self.first.get()) + u64::from(self.count.get());
        if self.count.get() == 0 || end > 1 << 32 {
            return Err(WireError::Value { what: "extent" });
        }
        Ok(())
    }
}

/// Returns the number of pages of all extents together.
pub fn pages_in(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| u64::from(e.count_pages())).sum()
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Any request of the client: page transfers and control.
    Client,
    /// Only keeps the client's lease alive while the connection is open (a keeper process).
    Keeper,
    /// Only stat and ping; belongs to no client, and its client id is ignored.
    Monitor,
}

impl Purpose {
    fn number(self) -> u16 {
        match self {
            Purpose::Client => 1,
            Purpose::Keeper => 2,
            Purpose::Monitor => 3,
        }
    }

    fn from_number(number: u16) -> Result<Self, WireError> {
        match number {
            1 => Ok(Purpose::Client),
            2 => Ok(Purpose::Keeper),
            3 => Ok(Purpose::Monitor),
            _ => Err(WireError::Value { what: "purpose" }),
        }
    }
}

/// First request of every connection. The connections of one client all give the same client id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello<'a> {
    /// The client's id. An unknown one creates a new client.
    pub client: ClientId,
    /// The client's grant, if it has one. All connections of a client use the same grant.
    pub grant: Option<Grant>,
    /// The connection's purpose.
    pub purpose: Purpose,
    /// Process id, for people who read stat.
    pub pid: u32,
    /// The connection's slot, numbered by the client. Only connections of [`Purpose::Client`] have
    /// one.
    pub slot: u32,
    /// Number of connections that this slot had before. Before the blade answers hello it closes
    /// the slot's connections of earlier generations, so that nothing sent over those can take
    /// effect any more: after a broken connection the client connects with the next generation and
    /// then repeats the unanswered requests. An earlier or equal generation is refused
    /// ([`crate::ErrorCode::Stale`]).
    pub generation: u32,
    /// The quota that the client asks for, in bytes; 0 means the blade's default. Used only for a
    /// new client.
    pub quota_wanted_bytes: u64,
    /// Whose pages a blade that packs may share with this client's; none is nobody's. Used only for
    /// a new client.
    pub sharing_group: Option<SharingGroup>,
    /// Name, for people who read stat; at most [`NAME_LIMIT_BYTES`] bytes.
    pub name: &'a str,
}

impl<'a> Hello<'a> {
    /// The greeting of a client's first connection: without a grant, in slot 0, asking for the
    /// blade's default quota.
    #[must_use]
    pub const fn first(client: ClientId, name: &'a str) -> Hello<'a> {
        Hello {
            client,
            grant: None,
            purpose: Purpose::Client,
            pid: 0,
            slot: 0,
            generation: 0,
            quota_wanted_bytes: 0,
            sharing_group: None,
            name,
        }
    }
}

/// A request, its lists borrowed from the caller (to encode) or from the received head (decoded).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(
    missing_docs,
    reason = "fields are named after their types; docs/contributors/protocol.md has them all"
)]
pub enum Request<'a> {
    /// Opens the connection.
    Hello(Hello<'a>),
    /// Creates a segment of `span_superpages`, without memory yet.
    CreateSegment { span_superpages: u32 },
    /// Allocates memory to `count` superpages from `first` on: all of them or none.
    AllocateSuperpages { segment: SegmentId, first: SuperpageNumber, count: u32 },
    /// Frees the memory of `count` superpages from `first` on: all of them or none.
    FreeSuperpages { segment: SegmentId, first: SuperpageNumber, count: u32 },
    /// Makes the segment immutable; others can then attach.
    Freeze { segment: SegmentId },
    /// Makes the frozen segment writable again, for its only user.
    Thaw { segment: SegmentId },
    /// Adds a user to the frozen segment that `token` opens.
    Attach { token: SegmentToken },
    /// Ends one use of the segment.
    Detach { segment: SegmentId },
    /// Asks for the superpages with memory, skipping the first `skip` of them.
    ListSuperpages { segment: SegmentId, skip: u32 },
    /// Discards the content of these pages; they may then read as zero or as before.
    Discard { segment: SegmentId, extents: &'a [Extent] },
    /// Asks for pages, in this order.
    Read { segment: SegmentId, extents: &'a [Extent] },
    /// Writes pages, which follow the head in this order.
    Write { segment: SegmentId, extents: &'a [Extent] },
    /// Asks for the segment's memory as a file descriptor (unix sockets, memfd backing).
    ShmMap { segment: SegmentId },
    /// Asks for totals and for clients, skipping the first `skip_clients` of them.
    Stat { skip_clients: u32 },
    /// Asks for an answer.
    Ping,
    /// Ends the client.
    Goodbye,
    /// Reports how many pages the client has moved through shared memory since it began, which the
    /// blade cannot see.
    Report { pages_read: u64, pages_written: u64 },
}

impl<'a> Request<'a> {
    /// Returns the request's opcode.
    pub fn opcode(&self) -> Opcode {
        match self {
            Request::Hello(_) => Opcode::Hello,
            Request::CreateSegment { .. } => Opcode::CreateSegment,
            Request::AllocateSuperpages { .. } => Opcode::AllocateSuperpages,
            Request::FreeSuperpages { .. } => Opcode::FreeSuperpages,
            Request::Freeze { .. } => Opcode::Freeze,
            Request::Thaw { .. } => Opcode::Thaw,
            Request::Attach { .. } => Opcode::Attach,
            Request::Detach { .. } => Opcode::Detach,
            Request::ListSuperpages { .. } => Opcode::ListSuperpages,
            Request::Discard { .. } => Opcode::Discard,
            Request::Read { .. } => Opcode::Read,
            Request::Write { .. } => Opcode::Write,
            Request::ShmMap { .. } => Opcode::ShmMap,
            Request::Stat { .. } => Opcode::Stat,
            Request::Ping => Opcode::Ping,
            Request::Goodbye => Opcode::Goodbye,
            Request::Report { .. } => Opcode::Report,
        }
    }

    /// As [`Request::encode`], for a request whose answer nobody waits for
    /// ([`crate::Priority::Background`]).
    ///
    /// # Errors
    /// As for that.
    pub fn encode_in_background(
        &self,
        request_id: RequestId,
        pages_checksum: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.encode_as(request_id, pages_checksum, true, out)
    }

    /// Appends the request's head to `out`. For a write, the pages must follow on the stream, in
    /// the extents' order, and `pages_checksum` is their [`crate::PagesChecksum`]; for every other
    /// request it is 0.
    ///
    /// # Errors
    /// A list, count or name exceeds its limit; `out` is then unchanged.
    pub fn encode(
        &self,
        request_id: RequestId,
        pages_checksum: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.encode_as(request_id, pages_checksum, false, out)
    }

    fn encode_as(
        &self,
        request_id: RequestId,
        pages_checksum: u32,
        is_background: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.validate()?;
        let page_count = match self {
            Request::Write { extents, .. } => exactly(pages_in(extents)),
            _ => 0,
        };
        let header = Header {
            opcode: self.opcode(),
            kind: Kind::Request,
            is_background,
            request_id,
            meta_bytes: 0,
            page_count,
            credits: 0,
            pages_checksum,
        };
        append_head(out, header, |out| self.append_meta(out))
    }

    fn append_meta(&self, out: &mut Vec<u8>) {
        match self {
            Request::Hello(hello) => hello.append_meta(out),
            Request::CreateSegment { span_superpages } => out.put_u32(*span_superpages),
            Request::AllocateSuperpages { segment, first, count }
            | Request::FreeSuperpages { segment, first, count } => {
                out.put_u64(segment.0);
                out.put_u32(first.0);
                out.put_u32(*count);
            }
            Request::Freeze { segment }
            | Request::Thaw { segment }
            | Request::Detach { segment }
            | Request::ShmMap { segment } => out.put_u64(segment.0),
            Request::Attach { token } => out.put_u128(token.0),
            Request::ListSuperpages { segment, skip } => {
                out.put_u64(segment.0);
                out.put_u32(*skip);
            }
            Request::Discard { segment, extents }
            | Request::Read { segment, extents }
            | Request::Write { segment, extents } => {
                out.put_u64(segment.0);
                out.extend_from_slice(extents.as_bytes());
            }
            Request::Stat { skip_clients } => out.put_u32(*skip_clients),
            Request::Report { pages_read, pages_written } => {
                out.put_u64(*pages_read);
                out.put_u64(*pages_written);
            }
            Request::Ping | Request::Goodbye => {}
        }
    }

    /// Decodes a verified head.
    ///
    /// # Errors
    /// The meta is not one that [`Request::encode`] makes.
    pub fn decode(head: &Head<'a>) -> Result<Request<'a>, WireError> {
        if head.header.kind != Kind::Request {
            return Err(WireError::Direction);
        }
        let mut fields = Fields::new(head.meta);
        let request = match head.header.opcode {
            Opcode::Hello => Request::Hello(Hello::decode(&mut fields)?),
            Opcode::CreateSegment => Request::CreateSegment { span_superpages: fields.u32()? },
            Opcode::AllocateSuperpages => Request::AllocateSuperpages {
                segment: SegmentId(fields.u64()?),
                first: SuperpageNumber(fields.u32()?),
                count: fields.u32()?,
            },
            Opcode::FreeSuperpages => Request::FreeSuperpages {
                segment: SegmentId(fields.u64()?),
                first: SuperpageNumber(fields.u32()?),
                count: fields.u32()?,
            },
            Opcode::Freeze => Request::Freeze { segment: SegmentId(fields.u64()?) },
            Opcode::Thaw => Request::Thaw { segment: SegmentId(fields.u64()?) },
            Opcode::Attach => Request::Attach { token: SegmentToken(fields.u128()?) },
            Opcode::Detach => Request::Detach { segment: SegmentId(fields.u64()?) },
            Opcode::ListSuperpages => {
                Request::ListSuperpages { segment: SegmentId(fields.u64()?), skip: fields.u32()? }
            }
            Opcode::Discard | Opcode::Read | Opcode::Write => {
                return Self::decode_extents(head, fields);
            }
            Opcode::ShmMap => Request::ShmMap { segment: SegmentId(fields.u64()?) },
            Opcode::Stat => Request::Stat { skip_clients: fields.u32()? },
            Opcode::Ping => Request::Ping,
            Opcode::Goodbye => Request::Goodbye,
            Opcode::Report => {
                Request::Report { pages_read: fields.u64()?, pages_written: fields.u64()? }
            }
        };
        fields.end()?;
        request.validate()?;
        Ok(request)
    }

    fn decode_extents(head: &Head<'a>, mut fields: Fields<'a>) -> Result<Request<'a>, WireError> {
        let segment = SegmentId(fields.u64()?);
        let extents = <[Extent]>::ref_from_bytes(fields.rest()).map_err(|_| WireError::Length)?;
        let request = match head.header.opcode {
            Opcode::Read => Request::Read { segment, extents },
            Opcode::Write => Request::Write { segment, extents },
            _ => Request::Discard { segment, extents },
        };
        request.validate()?;
        let found = u64::from(head.header.page_count);
        if head.header.opcode == Opcode::Write && pages_in(extents) != found {
            return Err(WireError::PageCount { expected: pages_in(extents), found });
        }
        Ok(request)
    }

    /// Checks the limits that hold on both sides.
    fn validate(&self) -> Result<(), WireError> {
        match self {
            Request::Hello(hello) => hello.validate(),
            Request::CreateSegment { span_superpages: span } => {
                nonzero("span", *span)?;
                within("span", u64::from(*span), u64::from(SPAN_LIMIT_SUPERPAGES))
            }
            Request::AllocateSuperpages { first, count, .. }
            | Request::FreeSuperpages { first, count, .. } => {
                nonzero("superpage count", *count)?;
                within(
                    "superpage count",
                    u64::from(*count),
                    u64::from(SUPERPAGES_PER_REQUEST_LIMIT),
                )?;
                let end = u64::from(first.0) + u64::from(*count);
                within("superpage number", end, u64::from(SPAN_LIMIT_SUPERPAGES))
            }
            Request::Discard { extents, .. } => validate_extents(extents, DISCARD_EXTENTS_LIMIT),
            Request::Read { extents, .. } | Request::Write { extents, .. } => {
                validate_extents(extents, EXTENTS_LIMIT)?;
                within("page count", pages_in(extents), u64::from(PAGES_PER_FRAME_LIMIT))
            }
            _ => Ok(()),
        }
    }
}

fn nonzero(what: &'static str, value: u32) -> Result<(), WireError> {
    if value == 0 { Err(WireError::Value { what }) } else { Ok(()) }
}

fn validate_extents(extents: &[Extent], limit: usize) -> Result<(), WireError> {
    if extents.is_empty() {
        return Err(WireError::Value { what: "list of extents" });
    }
    within("number of extents", extents.len() as u64, limit as u64)?;
    extents.iter().try_for_each(|e| e.validate())
}

impl<'a> Hello<'a> {
    fn append_meta(&self, out: &mut Vec<u8>) {
        out.put_u128(self.client.0);
        out.put_u128(self.grant.map_or(0, |grant| grant.key.0));
        out.put_u64(self.grant.map_or(0, |grant| grant.epoch));
        out.put_u64(self.quota_wanted_bytes);
        out.put_u64(self.sharing_group.map_or(0, |group| group.0.get()));
        out.put_u32(self.pid);
        out.put_u32(self.slot);
        out.put_u32(self.generation);
        out.put_u16(self.purpose.number());
        out.put_u16(exactly(self.name.len()));
        out.extend_from_slice(self.name.as_bytes());
    }

    fn decode(fields: &mut Fields<'a>) -> Result<Self, WireError> {
        let client = ClientId(fields.u128()?);
        let grant = match (fields.u128()?, fields.u64()?) {
            (0, 0) => None,
            (key, epoch) => Some(Grant { key: GrantKey(key), epoch }),
        };
        let quota_wanted_bytes = fields.u64()?;
        let sharing_group = NonZeroU64::new(fields.u64()?).map(SharingGroup);
        let pid = fields.u32()?;
        let slot = fields.u32()?;
        let generation = fields.u32()?;
        let purpose = Purpose::from_number(fields.u16()?)?;
        let name_bytes = usize::from(fields.u16()?);
        let name = std::mem::replace(fields, Fields::new(&[])).rest();
        if name.len() != name_bytes {
            return Err(WireError::Length);
        }
        let name = std::str::from_utf8(name).map_err(|_| WireError::Value { what: "name" })?;
        Ok(Hello {
            client,
            grant,
            purpose,
            pid,
            slot,
            generation,
            quota_wanted_bytes,
            sharing_group,
            name,
        })
    }

    fn validate(&self) -> Result<(), WireError> {
        if self.grant.is_some_and(|grant| grant.key.0 == 0) {
            return Err(WireError::Value { what: "grant" });
        }
        within("name length", self.name.len() as u64, NAME_LIMIT_BYTES as u64)
    }
}
