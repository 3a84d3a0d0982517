//! A blade's responses.

use crate::codec::{Append, Fields, within};
use crate::header::{Head, Header, Kind, Opcode, append_head};
use crate::stat::{BladeTotals, ClientUsage};
use crate::{
    ErrorCode, PAGES_PER_FRAME_LIMIT, RequestId, SPAN_LIMIT_SUPERPAGES, SegmentId, SegmentToken,
    SuperpageNumber, WireError,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// An entry of the superpage table: superpage `sma` of the segment has its memory at superpage
/// `rmma` of the segment's memory on the blade (for shared memory: at `rmma` x 16 MiB of the
/// descriptor).
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SuperpagePair {
    sma: U32,
    rmma: U32,
}

const _: () = assert!(size_of::<SuperpagePair>() == 8);

impl SuperpagePair {
    /// Creates an entry of the table.
    pub fn new(sma: SuperpageNumber, rmma: SuperpageNumber) -> Self {
        SuperpagePair { sma: U32::new(sma.0), rmma: U32::new(rmma.0) }
    }

    /// Returns the number within the segment.
    pub fn sma(self) -> SuperpageNumber {
        SuperpageNumber(self.sma.get())
    }

    /// Returns the number within the segment's memory on the blade.
    pub fn rmma(self) -> SuperpageNumber {
        SuperpageNumber(self.rmma.get())
    }
}

/// Answer to hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloOk {
    /// Random number of what this blade lends: if it changes, the client's memory there is lost.
    pub blade_id: u64,
    /// All memory that the blade lends, in bytes.
    pub capacity_bytes: u64,
    /// This client's quota, in bytes.
    pub quota_bytes: u64,
    /// How long the client's memory is kept after its last connection closed.
    pub lease_ms: u32,
    /// The most pages of one read or write; 1 to [`PAGES_PER_FRAME_LIMIT`].
    pub pages_per_request_limit: u16,
    /// True if what it lends outlives its process: a blade that cannot be reached may come back
    /// with the same `blade_id`.
    pub outlives_process: bool,
}

/// Whether a segment can be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SegmentState {
    /// One user, who may write.
    Writable,
    /// Immutable, with any number of users.
    Frozen,
}

/// A segment in the response to attach and list-superpages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attached<'a> {
    /// The segment.
    pub segment: SegmentId,
    /// Its length.
    pub span_superpages: u32,
    /// Number of superpages with memory in total, whether or not they fit into `superpages`.
    pub allocated_superpages: u32,
    /// Whether it can be written.
    pub state: SegmentState,
    /// Superpages with memory, in ascending SMA order, as many as fit; list-superpages returns the
    /// rest.
    pub superpages: &'a [SuperpagePair],
}

/// A response, its lists borrowed from the caller (to encode) or from the received head (decoded).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(
    missing_docs,
    reason = "fields are named after their types; docs/contributors/protocol.md has them all"
)]
pub enum Response<'a> {
    /// To hello. The header's credits tell how many requests may be in flight.
    HelloOk(HelloOk),
    /// To create-segment. The token lets another client attach.
    SegmentCreated { segment: SegmentId, token: SegmentToken },
    /// To allocate-superpages: one pair per superpage, ascending.
    Allocated { superpages: &'a [SuperpagePair] },
    /// To attach and list-superpages.
    Attached(Attached<'a>),
    /// To read: this many pages follow the head, in the order requested.
    Pages { page_count: u16 },
    /// To shm-map: the descriptor is sent with the first byte of this frame (SCM_RIGHTS).
    ShmMapped { bytes: u64, writable: bool },
    /// To stat: as many clients as fit.
    Stat { totals: &'a BladeTotals, clients: &'a [ClientUsage] },
    /// To free, freeze, thaw, detach, discard, write, ping, goodbye, report.
    Done,
    /// To any request: refused, without effect.
    Error { code: ErrorCode, detail: u64 },
}

impl<'a> Response<'a> {
    /// Appends the head of the response to a request of `opcode`. For [`Response::Pages`] the pages
    /// must follow on the stream and `pages_checksum` is theirs; otherwise it is 0.
    ///
    /// # Errors
    /// The response does not belong to `opcode`, or exceeds a limit; `out` is then unchanged.
    pub fn encode(
        &self,
        opcode: Opcode,
        request_id: RequestId,
        credits: u16,
        pages_checksum: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        if !self.answers(opcode) {
            return Err(WireError::Opcode { found: opcode.number() });
        }
        self.validate()?;
        let kind =
            if matches!(self, Response::Error { .. }) { Kind::Error } else { Kind::Response };
        let page_count = if let Response::Pages { page_count } = self { *page_count } else { 0 };
        let header = Header {
            opcode,
            kind,
            is_background: false,
            request_id,
            meta_bytes: 0,
            page_count,
            credits,
            pages_checksum,
        };
        append_head(out, header, |out| self.append_meta(out))
    }

    fn answers(&self, opcode: Opcode) -> bool {
        match self {
            Response::HelloOk(_) => opcode == Opcode::Hello,
            Response::SegmentCreated { .. } => opcode == Opcode::CreateSegment,
            Response::Allocated { .. } => opcode == Opcode::AllocateSuperpages,
            Response::Attached(_) => matches!(opcode, Opcode::Attach | Opcode::ListSuperpages),
            Response::Pages { .. } => opcode == Opcode::Read,
            Response::ShmMapped { .. } => opcode == Opcode::ShmMap,
            Response::Stat { .. } => opcode == Opcode::Stat,
            Response::Done => is_answered_by_done(opcode),
            Response::Error { .. } => true,
        }
    }

    fn validate(&self) -> Result<(), WireError> {
        match self {
            Response::HelloOk(ok) => {
                let limit = ok.pages_per_request_limit;
                within("page limit", u64::from(limit), u64::from(PAGES_PER_FRAME_LIMIT))?;
                if limit == 0 { Err(WireError::Value { what: "page limit" }) } else { Ok(()) }
            }
            Response::Allocated { superpages } => validate_pairs(superpages),
            Response::Attached(a) => {
                within("span", u64::from(a.span_superpages), u64::from(SPAN_LIMIT_SUPERPAGES))?;
                within("superpages", a.superpages.len() as u64, u64::from(a.allocated_superpages))?;
                within(
                    "allocated superpages",
                    u64::from(a.allocated_superpages),
                    u64::from(a.span_superpages),
                )?;
                validate_pairs(a.superpages)
            }
            Response::Pages { page_count: 0 } => Err(WireError::Value { what: "page count" }),
            _ => Ok(()),
        }
    }

    fn append_meta(&self, out: &mut Vec<u8>) {
        match self {
            Response::HelloOk(ok) => {
                out.put_u64(ok.blade_id);
                out.put_u64(ok.capacity_bytes);
                out.put_u64(ok.quota_bytes);
                out.put_u32(ok.lease_ms);
                out.put_u16(ok.pages_per_request_limit);
                out.put_u16(u16::from(ok.outlives_process));
            }
            Response::SegmentCreated { segment, token } => {
                out.put_u64(segment.0);
                out.put_u128(token.0);
            }
            Response::Allocated { superpages } => out.extend_from_slice(superpages.as_bytes()),
            Response::Attached(attached) => attached.append_meta(out),
            Response::ShmMapped { bytes, writable } => {
                out.put_u64(*bytes);
                out.put_u32(u32::from(*writable));
            }
            Response::Stat { totals, clients } => {
                out.extend_from_slice(totals.as_bytes());
                out.extend_from_slice(clients.as_bytes());
            }
            Response::Error { code, detail } => {
                out.put_u16(code.number());
                out.extend_from_slice(&[0; 6]);
                out.put_u64(*detail);
            }
            Response::Pages { .. } | Response::Done => {}
        }
    }

    /// Decodes a verified head. The caller checks that opcode and request id are those of a request
    /// in flight.
    ///
    /// # Errors
    /// The meta is not one that [`Response::encode`] makes.
    pub fn decode(head: &Head<'a>) -> Result<Response<'a>, WireError> {
        let mut fields = Fields::new(head.meta);
        let response = match (head.header.kind, head.header.opcode) {
            (Kind::Request, _) => return Err(WireError::Direction),
            (Kind::Error, _) => decode_error(&mut fields)?,
            (_, Opcode::Hello) => Response::HelloOk(HelloOk::decode(&mut fields)?),
            (_, Opcode::CreateSegment) => Response::SegmentCreated {
                segment: SegmentId(fields.u64()?),
                token: SegmentToken(fields.u128()?),
            },
            (_, Opcode::AllocateSuperpages) => {
                Response::Allocated { superpages: take_list(&mut fields)? }
            }
            (_, Opcode::Attach | Opcode::ListSuperpages) => {
                Response::Attached(Attached::decode(&mut fields)?)
            }
            (_, Opcode::Read) => Response::Pages { page_count: head.header.page_count },
            (_, Opcode::ShmMap) => {
                Response::ShmMapped { bytes: fields.u64()?, writable: decode_bool(fields.u32()?)? }
            }
            (_, Opcode::Stat) => Response::Stat {
                totals: BladeTotals::ref_from_bytes(
                    fields.bytes::<{ size_of::<BladeTotals>() }>()?,
                )
                .map_err(|_| WireError::Length)?,
                clients: take_list(&mut fields)?,
            },
            (_, _) => Response::Done,
        };
        fields.end()?;
        response.validate()?;
        Ok(response)
    }
}

fn is_answered_by_done(opcode: Opcode) -> bool {
    use Opcode::{Detach, Discard, FreeSuperpages, Freeze, Goodbye, Ping, Report, Thaw, Write};
    matches!(
        opcode,
        FreeSuperpages | Freeze | Thaw | Detach | Discard | Write | Ping | Goodbye | Report
    )
}

/// Takes the rest of the meta as a list.
fn take_list<'a, T>(fields: &mut Fields<'a>) -> Result<&'a [T], WireError>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let rest = std::mem::replace(fields, Fields::new(&[])).rest();
    <[T]>::ref_from_bytes(rest).map_err(|_| WireError::Length)
}

fn validate_pairs(pairs: &[SuperpagePair]) -> Result<(), WireError> {
    let in_span = |p: &SuperpagePair| p.sma().0 < SPAN_LIMIT_SUPERPAGES;
    if pairs.iter().all(in_span) && pairs.is_sorted_by(|a, b| a.sma() < b.sma()) {
        Ok(())
    } else {
        Err(WireError::Value { what: "list of superpages" })
    }
}

fn decode_bool(number: u32) -> Result<bool, WireError> {
    match number {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::Value { what: "truth value" }),
    }
}

fn decode_error<'a>(fields: &mut Fields<'a>) -> Result<Response<'a>, WireError> {
    let code =
        ErrorCode::from_number(fields.u16()?).ok_or(WireError::Value { what: "error code" })?;
    fields.reserved::<6>()?;
    Ok(Response::Error { code, detail: fields.u64()? })
}

impl HelloOk {
    fn decode(fields: &mut Fields<'_>) -> Result<Self, WireError> {
        Ok(HelloOk {
            blade_id: fields.u64()?,
            capacity_bytes: fields.u64()?,
            quota_bytes: fields.u64()?,
            lease_ms: fields.u32()?,
            pages_per_request_limit: fields.u16()?,
            outlives_process: decode_bool(fields.u16()?.into())?,
        })
    }
}

impl<'a> Attached<'a> {
    fn append_meta(&self, out: &mut Vec<u8>) {
        out.put_u64(self.segment.0);
        out.put_u32(self.span_superpages);
        out.put_u32(self.allocated_superpages);
        out.put_u32(match self.state {
            SegmentState::Writable => 0,
            SegmentState::Frozen => 1,
        });
        out.extend_from_slice(self.superpages.as_bytes());
    }

    fn decode(fields: &mut Fields<'a>) -> Result<Self, WireError> {
        Ok(Attached {
            segment: SegmentId(fields.u64()?),
            span_superpages: fields.u32()?,
            allocated_superpages: fields.u32()?,
            state: if decode_bool(fields.u32()?)? {
                SegmentState::Frozen
            } else {
                SegmentState::Writable
            },
            superpages: take_list(fields)?,
        })
    }
}
