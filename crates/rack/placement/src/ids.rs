//! Names of things as types, so that a port is never mistaken for a link.
//!
//! Vertices are numbered densely from 0 in the order of the topology; people use names, which the
//! [`Graph`](crate::Graph) keeps.

use std::fmt;

macro_rules! dense_id {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $name(pub u32);

        impl $name {
            /// The number as an index into the graph's list of this kind.
            #[must_use]
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of the thing at `index`.
            ///
            /// # Panics
            /// If `index` is 2^32 - 1 or above: the builder refuses graphs that large.
            pub(crate) fn at(index: usize) -> Self {
                let number = u32::try_from(index).expect("the builder bounds every list");
                assert_ne!(number, u32::MAX, "the builder bounds every list");
                Self(number)
            }
        }
    )*};
}

dense_id! {
    /// A rack.
    RackId;
    /// A tray of a rack: the bricks on it are nearest to each other.
    TrayId;
    /// A failure domain: what fails together (a power feed, a tray, a rack).
    DomainId;
    /// A compute brick: a source of the graph.
    ComputeId;
    /// A memory brick: a sink of the graph.
    MemoryId;
    /// A switch, circuit or packet.
    SwitchId;
    /// A port of a brick (its transceiver) or of a switch.
    PortId;
    /// A cable between two ports.
    LinkId;
}

/// A standing circuit of one circuit switch: the lower of the two ports that it joins. Unique while
/// the circuit stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CircuitId(pub u32);

/// The id of a request, chosen by the client: the same id with the same content is the same
/// request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u128);

/// A segment of the rack; never reused by one [`Allocator`](crate::Allocator).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SegmentId(pub u64);

/// Fencing number of a grant. It grows with every grant, so of two holders of a segment the one
/// with the lower epoch is stale and a blade refuses it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Epoch(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
