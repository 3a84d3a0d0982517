//! How foca names nodes and writes its messages.
//!
//! Invariants: a node's identity in a later life always replaces an earlier one; decoding never
//! panics.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::{Buf, BufMut};
use thiserror::Error;

use crate::ids::{Incarnation, NodeId, Peer};

/// A node as membership names it. `bump` rises when a living node must refute its own death.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    pub(crate) peer: Peer,
    pub(crate) bump: u16,
}

impl foca::Identity for Identity {
    type Addr = NodeId;

    fn renew(&self) -> Option<Self> {
        Some(Self { peer: self.peer, bump: self.bump.checked_add(1)? })
    }

    fn addr(&self) -> NodeId {
        self.peer.node
    }

    fn win_addr_conflict(&self, other: &Self) -> bool {
        (self.peer.incarnation, self.bump) > (other.peer.incarnation, other.bump)
    }
}

/// Foca's part of a datagram could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("membership bytes are not valid")]
pub(crate) struct CodecError;

/// Little-endian layout of foca's messages; see docs/operators/collaboration.md.
#[derive(Debug)]
pub(crate) struct Codec {
    /// The latest life that may be named. A later one would replace the node's true identity for as
    /// long as it is remembered.
    pub(crate) latest_life: Arc<AtomicU32>,
}

impl Codec {
    fn identity(&self, buf: &mut impl Buf) -> Result<Identity, CodecError> {
        let id = get_identity(buf)?;
        let latest = self.latest_life.load(Ordering::Relaxed);
        if id.peer.incarnation.0 <= latest { Ok(id) } else { Err(CodecError) }
    }
}

fn put_identity(id: &Identity, buf: &mut impl BufMut) {
    buf.put_u64_le(id.peer.node.0);
    buf.put_u32_le(id.peer.incarnation.0);
    buf.put_u16_le(id.bump);
    match id.peer.addr.ip() {
        IpAddr::V4(ip) => {
            buf.put_u8(4);
            buf.put_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            buf.put_u8(6);
            buf.put_slice(&ip.octets());
        }
    }
    buf.put_u16_le(id.peer.addr.port());
}

fn get_array<const N: usize>(buf: &mut impl Buf) -> Result<[u8; N], CodecError> {
    let mut bytes = [0; N];
    buf.try_copy_to_slice(&mut bytes).map_err(|_| CodecError)?;
    Ok(bytes)
}

fn get_identity(buf: &mut impl Buf) -> Result<Identity, CodecError> {
    let node = NodeId(u64::from_le_bytes(get_array(buf)?));
    let incarnation = Incarnation(u32::from_le_bytes(get_array(buf)?));
    let bump = u16::from_le_bytes(get_array(buf)?);
    let ip = match get_array::<1>(buf)? {
        [4] => IpAddr::from(get_array::<4>(buf)?),
        [6] => IpAddr::from(get_array::<16>(buf)?),
        _ => return Err(CodecError),
    };
    let addr = SocketAddr::new(ip, u16::from_le_bytes(get_array(buf)?));
    if node == NodeId::ANYONE {
        return Err(CodecError);
    }
    Ok(Identity { peer: Peer { node, incarnation, addr }, bump })
}

impl foca::Codec<Identity> for Codec {
    type Error = CodecError;

    fn encode_header(
        &mut self,
        header: &foca::Header<Identity>,
        mut buf: impl BufMut,
    ) -> Result<(), CodecError> {
        // Three identities at their longest and the numbers are 103 bytes; foca's buffer is far
        // larger.
        if buf.remaining_mut() < 128 {
            return Err(CodecError);
        }
        put_identity(&header.src, &mut buf);
        buf.put_u16_le(header.src_incarnation);
        put_identity(&header.dst, &mut buf);
        let mut put = |code: u8, id: Option<&Identity>, number: Option<u8>| {
            buf.put_u8(code);
            if let Some(id) = id {
                put_identity(id, &mut buf);
            }
            if let Some(number) = number {
                buf.put_u8(number);
            }
        };
        match &header.message {
            foca::Message::Ping(n) => put(1, None, Some(*n)),
            foca::Message::Ack(n) => put(2, None, Some(*n)),
            foca::Message::PingReq { target, probe_number } => {
                put(3, Some(target), Some(*probe_number));
            }
            foca::Message::IndirectPing { origin, probe_number } => {
                put(4, Some(origin), Some(*probe_number));
            }
            foca::Message::IndirectAck { target, probe_number } => {
                put(5, Some(target), Some(*probe_number));
            }
            foca::Message::ForwardedAck { origin, probe_number } => {
                put(6, Some(origin), Some(*probe_number));
            }
            foca::Message::Announce => put(7, None, None),
            foca::Message::Feed => put(8, None, None),
            foca::Message::Gossip => put(9, None, None),
            foca::Message::Broadcast => put(10, None, None),
            foca::Message::TurnUndead => put(11, None, None),
        }
        Ok(())
    }

    fn decode_header(&mut self, mut buf: impl Buf) -> Result<foca::Header<Identity>, CodecError> {
        let src = self.identity(&mut buf)?;
        let src_incarnation = u16::from_le_bytes(get_array(&mut buf)?);
        let dst = self.identity(&mut buf)?;
        let [code] = get_array::<1>(&mut buf)?;
        let number = |buf: &mut _| get_array::<1>(buf).map(|[number]| number);
        let message = match code {
            1 => foca::Message::Ping(number(&mut buf)?),
            2 => foca::Message::Ack(number(&mut buf)?),
            3..=6 => {
                let id = self.identity(&mut buf)?;
                let probe_number = number(&mut buf)?;
                match code {
                    3 => foca::Message::PingReq { target: id, probe_number },
                    4 => foca::Message::IndirectPing { origin: id, probe_number },
                    5 => foca::Message::IndirectAck { target: id, probe_number },
                    _ => foca::Message::ForwardedAck { origin: id, probe_number },
                }
            }
            7 => foca::Message::Announce,
            8 => foca::Message::Feed,
            9 => foca::Message::Gossip,
            10 => foca::Message::Broadcast,
            11 => foca::Message::TurnUndead,
            _ => return Err(CodecError),
        };
        Ok(foca::Header { src, src_incarnation, dst, message })
    }

    fn encode_member(
        &mut self,
        member: &foca::Member<Identity>,
        mut buf: impl BufMut,
    ) -> Result<(), CodecError> {
        // Expected: foca fills a datagram until a member does not fit.
        if buf.remaining_mut() < 8 + 4 + 2 + crate::bytes_io::ADDR_BYTES_MAX + 3 {
            return Err(CodecError);
        }
        put_identity(member.id(), &mut buf);
        buf.put_u16_le(member.incarnation());
        buf.put_u8(match member.state() {
            foca::State::Alive => 1,
            foca::State::Suspect => 2,
            foca::State::Down => 3,
        });
        Ok(())
    }

    fn decode_member(&mut self, mut buf: impl Buf) -> Result<foca::Member<Identity>, CodecError> {
        let id = self.identity(&mut buf)?;
        let incarnation = u16::from_le_bytes(get_array(&mut buf)?);
        let state = match get_array::<1>(&mut buf)? {
            [1] => foca::State::Alive,
            [2] => foca::State::Suspect,
            [3] => foca::State::Down,
            _ => return Err(CodecError),
        };
        Ok(foca::Member::new(id, incarnation, state))
    }
}
