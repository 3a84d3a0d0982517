//! Requests and grants.

use crate::ids::{
    CircuitId, ComputeId, DomainId, Epoch, MemoryId, PortId, RequestId, SegmentId, SwitchId,
};

use super::policy::PlacementPolicy;

/// Bytes per second, per direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RateLimits {
    /// From memory to compute.
    pub read_bytes_per_s: u64,
    /// From compute to memory.
    pub write_bytes_per_s: u64,
}

/// A request for far memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Chosen by the client; the same request with the same id is granted once.
    pub id: RequestId,
    /// The compute brick that will use the memory.
    pub compute: ComputeId,
    /// Size of the segment in bytes; rounded up to superpages.
    pub bytes: u64,
    /// Bandwidth wanted: reserved on the path and on the memory brick, and granted as rate limits.
    pub rates: RateLimits,
    /// How the brick is chosen.
    pub policy: PlacementPolicy,
    /// Failure domains whose bricks must not be chosen.
    pub avoid: Vec<DomainId>,
    /// The segment may lie in several pieces of the brick, each with its own MemPort entry.
    pub may_split: bool,
}

impl Request {
    /// A request for one piece without domains to avoid.
    #[must_use]
    pub fn new(
        id: RequestId,
        compute: ComputeId,
        bytes: u64,
        rates: RateLimits,
        policy: PlacementPolicy,
    ) -> Self {
        Self { id, compute, bytes, rates, policy, avoid: Vec::new(), may_split: false }
    }
}

/// One line of the compute brick's MemPort lookup table (Syrivelis 2017, figure 3): addresses from
/// `client_base_bytes` on leave through `port` and arrive at `brick_offset_bytes` of the brick.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemPortEntry {
    /// First address as the compute brick sees it.
    pub client_base_bytes: u64,
    /// How many bytes from there.
    pub length_bytes: u64,
    /// The transceiver that requests leave through.
    pub port: PortId,
    /// The first circuit on the path. None on a packet network.
    pub circuit: Option<CircuitId>,
    /// Where these bytes start in the memory brick.
    pub brick_offset_bytes: u64,
}

/// A path from a compute brick to a memory brick, as ports: the compute brick's port, then for each
/// switch the port in and the port out, then the memory brick's port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Path {
    /// All ports in order; links join the first and second, third and fourth, ...
    pub ports: Vec<PortId>,
}

impl Path {
    /// Returns the port in and the port out of each switch on the path.
    pub fn crossings(&self) -> impl Iterator<Item = (PortId, PortId)> + '_ {
        let inner = self.ports.get(1..self.ports.len().saturating_sub(1)).unwrap_or(&[]);
        inner.chunks_exact(2).map(|pair| (pair[0], pair[1]))
    }

    /// The compute brick's and the memory brick's port.
    pub(super) fn ends(&self) -> [PortId; 2] {
        [self.ports[0], self.ports[self.ports.len() - 1]]
    }
}

/// A setting of one circuit switch: `from` and `to` are joined. The circuit may exist already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwitchSetting {
    /// Which switch.
    pub switch: SwitchId,
    /// The circuit's name there.
    pub circuit: CircuitId,
    /// The port towards the compute brick.
    pub from: PortId,
    /// The port towards the memory brick.
    pub to: PortId,
}

/// Memory granted: what the agents of both bricks and the switches must know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The segment's id, which a move keeps.
    pub segment: SegmentId,
    /// Fencing number; a move or a new owner raises it.
    pub epoch: Epoch,
    /// The compute brick that uses the memory.
    pub compute: ComputeId,
    /// The memory brick that the segment lies in.
    pub memory: MemoryId,
    /// The compute brick's table entries, one per piece, without gaps in client addresses.
    pub entries: Vec<MemPortEntry>,
    /// The path to the memory brick.
    pub path: Path,
    /// How the circuit switches on the path are set.
    pub settings: Vec<SwitchSetting>,
    /// Limits on what the client may send and request.
    pub client_limits: RateLimits,
    /// The most that the blade serves this client.
    pub blade_limits: RateLimits,
}

impl Grant {
    /// Bytes of the whole segment.
    #[must_use]
    pub fn length_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.length_bytes).sum()
    }
}

/// Why the rack refuses. Nothing has changed then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RackError {
    /// No such compute brick.
    #[error("there is no compute brick number {}", .0.0)]
    UnknownCompute(ComputeId),
    /// No such memory brick.
    #[error("there is no memory brick number {}", .0.0)]
    UnknownMemory(MemoryId),
    /// No such failure domain.
    #[error("there is no failure domain number {}", .0.0)]
    UnknownDomain(DomainId),
    /// No segment was requested under this id.
    #[error("no segment was requested under the id {0}")]
    UnknownRequest(RequestId),
    /// The id belongs to another request.
    #[error("the id {0} stands for another request; choose a new one")]
    IdInUse(RequestId),
    /// A request for nothing.
    #[error("a segment of zero bytes was asked for")]
    ZeroBytes,
    /// No bandwidth in one direction: the rate limit would stop the client.
    #[error("no bandwidth was asked for; give at least one byte a second to read and to write")]
    ZeroBandwidth,
    /// More than the whole pool has.
    #[error("{bytes} bytes were asked for; the whole pool has {pool_bytes}")]
    LargerThanPool {
        /// Asked for.
        bytes: u64,
        /// All bricks together.
        pool_bytes: u64,
    },
    /// More than any brick has. A segment lies in one brick.
    #[error("{bytes} bytes were asked for; the largest brick has {brick_bytes}")]
    LargerThanAnyBrick {
        /// Asked for.
        bytes: u64,
        /// The largest brick.
        brick_bytes: u64,
    },
    /// No suitable brick has that much free.
    #[error("no brick that will do has {bytes} bytes free in the form asked for")]
    NoCapacity {
        /// Asked for, in whole superpages.
        bytes: u64,
    },
    /// Memory is free, but every port is taken: those of the compute brick, or those of all memory
    /// bricks with enough free.
    #[error("no port is free: {0}")]
    NoPort(&'static str),
    /// Memory and ports are free, but no path through the switches is.
    #[error("no circuit through the switches is free to any brick that will do")]
    NoCircuit,
    /// Only bandwidth is missing, on bricks or on links.
    #[error("no brick that will do, and no way to it, has that much bandwidth left")]
    NoBandwidth,
    /// The compute brick's far addresses are used up.
    #[error("the compute brick has no room left in its window of far addresses")]
    NoAddress,
    /// A move of this segment is under way.
    #[error("the segment of request {0} is being moved already")]
    Moving(RequestId),
    /// No move of this segment is under way.
    #[error("the segment of request {0} is not being moved")]
    NotMoving(RequestId),
    /// A grant that does not fit the graph or what is reserved.
    #[error("the grant of segment {segment} does not fit: {reason}")]
    Conflict {
        /// The grant's segment.
        segment: SegmentId,
        /// Why the grant does not fit.
        reason: &'static str,
    },
}
