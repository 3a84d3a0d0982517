//! How many clients and servers there are, and which side broadcasts (ACMS, section 4.3: the
//! responsibility to broadcast goes to the group with fewer nodes).
//!
//! No node counts all others. Every rumour datagram carries its sender's class and estimate; the
//! receiver moves its own estimate towards both. Senders choose receivers at random, so the classes
//! received are a fair sample, and averaging the estimates makes the nodes agree.
//!
//! Invariant: the side changes only when the broadcasting side is larger than the other by more
//! than [`SIDE_RATIO_NUM`] : [`SIDE_RATIO_DEN`].

use farpool_units::exactly;

use crate::classify::Class;
use crate::limits::{SIDE_RATIO_DEN, SIDE_RATIO_NUM};
use crate::message::Mood;

/// The whole, in the unit of the shares on the wire.
const WHOLE: i64 = 65_535;
/// The estimate moves by one part in this many towards the sender's estimate.
const AVERAGE_PART: i64 = 4;
/// The estimate moves by one part in this many towards the sender's class: larger is steadier,
/// smaller is faster. At 5 to 15 datagrams a second it follows a change of the mix within 5 to
/// 15 s.
const SAMPLE_PART: i64 = 64;
/// Steps inside the estimate for each step of a share on the wire, so that small moves count.
const FINE: i64 = 256;

/// Which side broadcasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Servers offer: 4-way handshake.
    Servers,
    /// Clients request: 3-way handshake.
    Clients,
}

/// A node's estimate of the mix.
#[derive(Clone, Debug)]
pub(crate) struct Ratio {
    clients: i64,
    servers: i64,
    side: Side,
}

impl Ratio {
    /// Starts with nothing known: servers broadcast, as in the paper.
    pub(crate) fn new() -> Self {
        Self { clients: 0, servers: 0, side: Side::Servers }
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    pub(crate) fn mood(&self, class: Class) -> Mood {
        let share = |fine: i64| exactly::<u16, _>(fine / FINE);
        Mood { class, clients: share(self.clients), servers: share(self.servers) }
    }

    /// Estimated servers among `nodes`, at least 1.
    pub(crate) fn servers_of(&self, nodes: usize) -> u64 {
        let share: u128 = exactly(self.servers / FINE);
        let whole: u128 = exactly(WHOLE);
        exactly::<u64, _>(share * nodes as u128 / whole).max(1)
    }

    /// Learns from one datagram. Returns true if the side changed.
    pub(crate) fn hear(&mut self, mood: &Mood) -> bool {
        let learn = |old: i64, theirs: u16, is: bool| {
            let towards = i64::from(theirs) * FINE;
            let sample = if is { WHOLE * FINE } else { 0 };
            old + (towards - old) / AVERAGE_PART + (sample - old) / SAMPLE_PART
        };
        self.clients =
            learn(self.clients, mood.clients, mood.class == Class::Client).clamp(0, WHOLE * FINE);
        self.servers =
            learn(self.servers, mood.servers, mood.class == Class::Server).clamp(0, WHOLE * FINE);
        self.choose()
    }

    fn choose(&mut self) -> bool {
        let (clients, servers) = (self.clients.unsigned_abs(), self.servers.unsigned_abs());
        let fewer =
            |few: u64, many: u64| few.saturating_mul(SIDE_RATIO_NUM) < many * SIDE_RATIO_DEN;
        let side = match self.side {
            Side::Servers if fewer(clients, servers) => Side::Clients,
            Side::Clients if fewer(servers, clients) => Side::Servers,
            same => same,
        };
        std::mem::replace(&mut self.side, side) != side
    }
}
