//! The datagrams of the protocol: ACMS's five messages (Samih 2011, section 4.3) and what they need
//! to be safe on a network that loses, repeats and reorders.
//!
//! Every datagram is a header of 68 bytes and a body; all numbers are little-endian, all sizes in
//! bytes, all times in milliseconds. docs/operators/collaboration.md gives the layout byte by byte.
//!
//! Invariants: decoding never panics and allocates no more than the datagram is long; an encoded
//! message decodes to itself; a datagram with trailing bytes, a wrong length, a wrong MAC or (where
//! no key is used) a wrong checksum is refused whole, before its body is looked at.

use std::net::SocketAddr;

use farpool_units::exactly;

use crate::bytes_io::{ADDR_BYTES_MAX, Reader, Writer};
use crate::classify::Class;
use crate::datagram::DecodeError;
pub use crate::datagram::{DATAGRAM_BYTES_MAX, HEADER_BYTES, MAC_BYTES, VERSION};
use crate::ids::{ClusterId, Epoch, GrantKey, Incarnation, NodeId, RequestNo, Zone};
use crate::rack_key::RackKeys;

/// "FACM".
pub const MAGIC: u32 = u32::from_le_bytes(*b"FACM");
/// Most bytes of membership data in one datagram.
pub const GOSSIP_BYTES_MAX: usize = DATAGRAM_BYTES_MAX - HEADER_BYTES;
/// Most grants renewed by one datagram; a client with more grants of one server sends several.
pub const EPOCHS_MAX: usize = 128;

const RUMOUR_BYTES_MAX: usize = 1 + 8 + 4 + 4 + 8 + 4 + 4 + 4 + 1 + ADDR_BYTES_MAX;
const RUMOURS_HEAD_BYTES: usize = 6;
/// Rumours that always fit one datagram, whatever their addresses.
pub const RUMOURS_MAX: usize =
    (DATAGRAM_BYTES_MAX - HEADER_BYTES - RUMOURS_HEAD_BYTES) / RUMOUR_BYTES_MAX;

/// Sender and receiver of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The sender's cluster.
    pub cluster: ClusterId,
    /// The sender.
    pub from: NodeId,
    /// The sender's life.
    pub from_incarnation: Incarnation,
    /// The addressee, or [`NodeId::ANYONE`].
    pub to: NodeId,
    /// The addressee's life as the sender knows it, or 0 for any life. A node in another life drops
    /// the message.
    pub to_incarnation: Incarnation,
    /// Rises with every datagram of the sender's life, whoever receives it.
    pub number: u64,
}

/// What a rumour says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RumourKind {
    /// OFFERING_MEM: `bytes` are offered; 0 withdraws the offer.
    Offer,
    /// REQUESTING_MEM, broadcast: `bytes` are wanted; 0 withdraws the request.
    Request,
}

/// A broadcast on its way from node to node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rumour {
    /// Offer or request.
    pub kind: RumourKind,
    /// The node that sent it first.
    pub origin: NodeId,
    /// The origin's life.
    pub incarnation: Incarnation,
    /// Rises with every new rumour of the origin (for requests, the request's number).
    pub seq: u32,
    /// Bytes offered or wanted.
    pub bytes: u64,
    /// The origin's zone.
    pub zone: Zone,
    /// Time since the origin sent it, as far as the nodes on the way know.
    pub age_ms: u32,
    /// Age at which it is forgotten.
    pub valid_ms: u32,
    /// How often the origin has asked in vain; 0 for offers.
    pub attempt: u8,
    /// Where datagrams for the origin are sent.
    pub addr: SocketAddr,
}

/// A node's estimate of the cluster's mix, and its own class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mood {
    /// The sender's own class.
    pub class: Class,
    /// Share of clients, in parts of 65,535.
    pub clients: u16,
    /// Share of servers, in parts of 65,535.
    pub servers: u16,
}

/// Why a server or a client refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NackReason {
    /// Server to a REQUEST: nothing left, or not enough.
    NoMemory,
    /// Server: there is no such grant (timed out, taken back, never made).
    NoSuchGrant,
    /// Server: an unbound grant is withdrawn, because the server needs the memory itself.
    Withdrawn,
    /// Client: the grant is not needed, because another server's was taken or the need has gone.
    Declined,
}

/// The content of one datagram.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// Asks who is there: sent to an address by a node that knows only addresses.
    Hello,
    /// The answer to Hello: its header names the node.
    Welcome,
    /// Membership's own bytes (foca).
    Gossip(Vec<u8>),
    /// OFFERING_MEM and broadcast REQUESTING_MEM of several origins.
    Rumours(Mood, Vec<Rumour>),
    /// REQUESTING_MEM to one server.
    Request {
        /// The request's number; a repeated number is a repeated request.
        request: RequestNo,
        /// Bytes wanted.
        bytes: u64,
        /// The client's zone.
        zone: Zone,
    },
    /// GRANTING_MEM: reserved, not yet bound.
    Grant {
        /// The request that this answers.
        request: RequestNo,
        /// The grant.
        epoch: Epoch,
        /// Which of the server's grants it is in this life: rises with each.
        count: u32,
        /// Bytes reserved.
        bytes: u64,
        /// The key that the blade will demand.
        key: GrantKey,
        /// Time after which the reservation ends, counted from sending.
        hold_ms: u32,
        /// The server's zone.
        zone: Zone,
        /// Address of the blade that serves the memory.
        blade: SocketAddr,
    },
    /// ACK_MEM: binds the grant.
    Ack {
        /// The grant.
        epoch: Epoch,
        /// Bytes taken of the grant; the rest is free again.
        bytes: u64,
        /// The client's clock, echoed by the lease.
        sent_ms: u64,
    },
    /// The client still uses these grants.
    Renew {
        /// The client's clock, echoed by the lease.
        sent_ms: u64,
        /// The grants, at most [`EPOCHS_MAX`].
        epochs: Vec<Epoch>,
    },
    /// The server confirms: bound until `sent_ms` + `lease_ms` on the client's clock.
    Lease {
        /// Copied from the ACK or RENEW.
        sent_ms: u64,
        /// Length of the lease.
        lease_ms: u32,
        /// The grants that stand.
        epochs: Vec<Epoch>,
    },
    /// A refusal.
    Nack {
        /// The reason.
        reason: NackReason,
        /// The request it answers (0: none).
        request: RequestNo,
        /// The grant it answers (0: none).
        epoch: Epoch,
        /// Bytes that the server could still grant.
        left_bytes: u64,
    },
    /// RECLAIM_MEM: the server needs the memory; repeated until answered.
    Reclaim {
        /// The grant.
        epoch: Epoch,
        /// Time from sending until the memory is taken back in any case.
        left_ms: u32,
    },
    /// The client no longer uses the grant; repeated until answered.
    Released {
        /// The grant.
        epoch: Epoch,
    },
    /// The server knows that the grant has ended.
    Freed {
        /// The grant.
        epoch: Epoch,
    },
}

impl Message {
    /// The kind's number on the wire.
    #[must_use]
    pub fn kind(&self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::Welcome => 2,
            Self::Gossip(_) => 3,
            Self::Rumours(..) => 4,
            Self::Request { .. } => 5,
            Self::Grant { .. } => 6,
            Self::Ack { .. } => 7,
            Self::Renew { .. } => 8,
            Self::Lease { .. } => 9,
            Self::Nack { .. } => 10,
            Self::Reclaim { .. } => 11,
            Self::Released { .. } => 12,
            Self::Freed { .. } => 13,
        }
    }

    /// Encodes the datagram and signs it with the first of `keys`.
    ///
    /// Lists longer than their maximum ([`RUMOURS_MAX`], [`EPOCHS_MAX`], [`GOSSIP_BYTES_MAX`]) are
    /// cut; senders split them before.
    #[must_use]
    pub fn encode(&self, header: &Header, keys: &RackKeys) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(HEADER_BYTES + 64));
        out.u32(MAGIC).u8(VERSION).u8(self.kind()).u16(0);
        out.u64(header.cluster.0).u64(header.from.0).u32(header.from_incarnation.0);
        out.u32(header.to_incarnation.0).u64(header.to.0).u64(header.number);
        out.u32(0).u128(0);
        self.encode_body(&mut out);
        let mut bytes = out.0;
        let body: u16 = exactly(bytes.len() - HEADER_BYTES);
        bytes[6..8].copy_from_slice(&body.to_le_bytes());
        keys.seal(&mut bytes);
        bytes
    }

    fn encode_body(&self, out: &mut Writer) {
        match self {
            Self::Hello | Self::Welcome => {}
            Self::Gossip(bytes) => {
                out.bytes(&bytes[..bytes.len().min(GOSSIP_BYTES_MAX)]);
            }
            Self::Rumours(mood, rumours) => encode_rumours(out, mood, rumours),
            Self::Request { request, bytes, zone } => {
                out.u32(request.0).u64(*bytes).u32(zone.0);
            }
            Self::Grant { request, epoch, count, bytes, key, hold_ms, zone, blade } => {
                out.u32(request.0).u64(epoch.0).u32(*count).u64(*bytes).u128(key.0);
                out.u32(*hold_ms).u32(zone.0).addr(*blade);
            }
            Self::Ack { epoch, bytes, sent_ms } => {
                out.u64(epoch.0).u64(*bytes).u64(*sent_ms);
            }
            Self::Renew { sent_ms, epochs } => {
                out.u64(*sent_ms);
                encode_epochs(out, epochs);
            }
            Self::Lease { sent_ms, lease_ms, epochs } => {
                out.u64(*sent_ms).u32(*lease_ms);
                encode_epochs(out, epochs);
            }
            Self::Nack { reason, request, epoch, left_bytes } => {
                out.u8(reason_code(*reason)).u32(request.0).u64(epoch.0).u64(*left_bytes);
            }
            Self::Reclaim { epoch, left_ms } => {
                out.u64(epoch.0).u32(*left_ms);
            }
            Self::Released { epoch } | Self::Freed { epoch } => {
                out.u64(epoch.0);
            }
        }
    }

    /// Returns the header and content of a datagram that is signed with one of `keys`.
    ///
    /// # Errors
    /// Says what is wrong with the datagram.
    pub fn decode(bytes: &[u8], keys: &RackKeys) -> Result<(Header, Self), DecodeError> {
        if bytes.len() > DATAGRAM_BYTES_MAX {
            return Err(DecodeError::Long(bytes.len()));
        }
        // First: other versions have headers of other lengths.
        let mut head = Reader(bytes);
        if head.u32()? != MAGIC {
            return Err(DecodeError::Magic);
        }
        let version = head.u8()?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let (_, body) = bytes.split_at_checked(HEADER_BYTES).ok_or(DecodeError::Short)?;
        let mut body = Reader(body);
        let kind = head.u8()?;
        match usize::from(head.u16()?).cmp(&body.0.len()) {
            std::cmp::Ordering::Less => return Err(DecodeError::Trailing),
            std::cmp::Ordering::Greater => return Err(DecodeError::Short),
            std::cmp::Ordering::Equal => {}
        }
        let (cluster, from) = (ClusterId(head.u64()?), NodeId(head.u64()?));
        let (from_incarnation, to_incarnation) =
            (Incarnation(head.u32()?), Incarnation(head.u32()?));
        let (to, number) = (NodeId(head.u64()?), head.u64()?);
        let header = Header { cluster, from, from_incarnation, to, to_incarnation, number };
        keys.check(bytes)?;
        if header.from == NodeId::ANYONE {
            return Err(DecodeError::Field("sender"));
        }
        let message = Self::decode_body(kind, &mut body)?;
        if body.0.is_empty() { Ok((header, message)) } else { Err(DecodeError::Trailing) }
    }

    fn decode_body(kind: u8, body: &mut Reader) -> Result<Self, DecodeError> {
        Ok(match kind {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Gossip(body.take(body.0.len())?.to_vec()),
            4 => decode_rumours(body)?,
            5 => Self::Request {
                request: RequestNo(body.u32()?),
                bytes: body.u64()?,
                zone: Zone(body.u32()?),
            },
            6 => Self::Grant {
                request: RequestNo(body.u32()?),
                epoch: Epoch(body.u64()?),
                count: body.u32()?,
                bytes: body.u64()?,
                key: GrantKey(body.u128()?),
                hold_ms: body.u32()?,
                zone: Zone(body.u32()?),
                blade: body.addr()?,
            },
            7 => Self::Ack { epoch: Epoch(body.u64()?), bytes: body.u64()?, sent_ms: body.u64()? },
            8 => Self::Renew { sent_ms: body.u64()?, epochs: decode_epochs(body)? },
            9 => Self::Lease {
                sent_ms: body.u64()?,
                lease_ms: body.u32()?,
                epochs: decode_epochs(body)?,
            },
            10 => Self::Nack {
                reason: reason_of(body.u8()?)?,
                request: RequestNo(body.u32()?),
                epoch: Epoch(body.u64()?),
                left_bytes: body.u64()?,
            },
            11 => Self::Reclaim { epoch: Epoch(body.u64()?), left_ms: body.u32()? },
            12 => Self::Released { epoch: Epoch(body.u64()?) },
            13 => Self::Freed { epoch: Epoch(body.u64()?) },
            unknown => return Err(DecodeError::Kind(unknown)),
        })
    }
}

fn encode_epochs(out: &mut Writer, epochs: &[Epoch]) {
    let epochs = &epochs[..epochs.len().min(EPOCHS_MAX)];
    out.u8(exactly(epochs.len()));
    for epoch in epochs {
        out.u64(epoch.0);
    }
}

fn decode_epochs(body: &mut Reader) -> Result<Vec<Epoch>, DecodeError> {
    let count = usize::from(body.u8()?);
    if count > EPOCHS_MAX {
        return Err(DecodeError::Field("number of grants"));
    }
    (0..count).map(|_| Ok(Epoch(body.u64()?))).collect()
}

fn encode_rumours(out: &mut Writer, mood: &Mood, rumours: &[Rumour]) {
    let rumours = &rumours[..rumours.len().min(RUMOURS_MAX)];
    out.u8(class_code(mood.class)).u16(mood.clients).u16(mood.servers);
    out.u8(exactly(rumours.len()));
    for rumour in rumours {
        out.u8(match rumour.kind {
            RumourKind::Offer => 1,
            RumourKind::Request => 2,
        });
        out.u64(rumour.origin.0).u32(rumour.incarnation.0).u32(rumour.seq).u64(rumour.bytes);
        out.u32(rumour.zone.0).u32(rumour.age_ms).u32(rumour.valid_ms).u8(rumour.attempt);
        out.addr(rumour.addr);
    }
}

fn decode_rumours(body: &mut Reader) -> Result<Message, DecodeError> {
    let class = class_of(body.u8()?)?;
    let mood = Mood { class, clients: body.u16()?, servers: body.u16()? };
    let count = usize::from(body.u8()?);
    if count > RUMOURS_MAX {
        return Err(DecodeError::Field("number of rumours"));
    }
    let rumours: Result<Vec<_>, _> = (0..count).map(|_| decode_rumour(body)).collect();
    Ok(Message::Rumours(mood, rumours?))
}

fn decode_rumour(body: &mut Reader) -> Result<Rumour, DecodeError> {
    let kind = match body.u8()? {
        1 => RumourKind::Offer,
        2 => RumourKind::Request,
        _ => return Err(DecodeError::Field("rumour kind")),
    };
    let rumour = Rumour {
        kind,
        origin: NodeId(body.u64()?),
        incarnation: Incarnation(body.u32()?),
        seq: body.u32()?,
        bytes: body.u64()?,
        zone: Zone(body.u32()?),
        age_ms: body.u32()?,
        valid_ms: body.u32()?,
        attempt: body.u8()?,
        addr: body.addr()?,
    };
    if rumour.origin == NodeId::ANYONE {
        return Err(DecodeError::Field("rumour origin"));
    }
    Ok(rumour)
}

fn class_code(class: Class) -> u8 {
    match class {
        Class::Server => 1,
        Class::Neutral => 2,
        Class::Client => 3,
    }
}

fn class_of(code: u8) -> Result<Class, DecodeError> {
    match code {
        1 => Ok(Class::Server),
        2 => Ok(Class::Neutral),
        3 => Ok(Class::Client),
        _ => Err(DecodeError::Field("class")),
    }
}

fn reason_code(reason: NackReason) -> u8 {
    match reason {
        NackReason::NoMemory => 1,
        NackReason::NoSuchGrant => 2,
        NackReason::Withdrawn => 3,
        NackReason::Declined => 4,
    }
}

fn reason_of(code: u8) -> Result<NackReason, DecodeError> {
    match code {
        1 => Ok(NackReason::NoMemory),
        2 => Ok(NackReason::NoSuchGrant),
        3 => Ok(NackReason::Withdrawn),
        4 => Ok(NackReason::Declined),
        _ => Err(DecodeError::Field("reason")),
    }
}
