//! Which node to choose (ACMS, section 4.3: first come first served, round robin, nearest first),
//! on both sides: which servers a client asks or takes, which client a server serves first.
//!
//! Invariant: a choice is one of the candidates, and depends on nothing but the arguments.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::ids::{NodeId, Zone};
use crate::limits::CHOICES;
use crate::rng::Rng;

/// The order among competing nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Arbitration {
    /// Requests are served in the order of arrival. A client asks servers at random, by the power
    /// of two choices.
    #[default]
    Fcfs,
    /// Each node in turn, by id.
    RoundRobin,
    /// The nearest zone first.
    Nearest,
}

/// The name is none of `fcfs`, `round-robin`, `nearest`.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("arbitration \"{0}\" is not known: give fcfs, round-robin or nearest")]
pub struct UnknownArbitration(String);

impl FromStr for Arbitration {
    type Err = UnknownArbitration;

    fn from_str(name: &str) -> Result<Self, UnknownArbitration> {
        match name {
            "fcfs" => Ok(Self::Fcfs),
            "round-robin" => Ok(Self::RoundRobin),
            "nearest" => Ok(Self::Nearest),
            other => Err(UnknownArbitration(other.to_owned())),
        }
    }
}

impl fmt::Display for Arbitration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fcfs => "fcfs",
            Self::RoundRobin => "round-robin",
            Self::Nearest => "nearest",
        })
    }
}

/// A competing node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Bytes offered or wanted.
    pub bytes: u64,
    /// The node's zone.
    pub zone: Zone,
}

impl Arbitration {
    /// Returns the index of the next one among `candidates`, which are in order of arrival; `own`
    /// is the chooser's zone, `last` the node chosen before.
    #[must_use]
    pub fn first(self, candidates: &[Candidate], own: Zone, last: NodeId) -> Option<usize> {
        let indices = 0..candidates.len();
        match self {
            Self::Fcfs => indices.min(),
            Self::RoundRobin => indices.min_by_key(|index| {
                let node = candidates[*index].node;
                (node <= last, node)
            }),
            Self::Nearest => indices.min_by_key(|index| candidates[*index].zone.distance(own)),
        }
    }

    /// Returns the index of the server to ask among `offers`: two are drawn at random and the
    /// larger offer wins; with `nearest` only the nearest that suffice are drawn from, or the
    /// nearest if none suffices; with `round-robin` the next in turn is asked.
    #[must_use]
    pub fn ask(
        self,
        offers: &[Candidate],
        want_bytes: u64,
        own: Zone,
        last: NodeId,
        rng: &mut Rng,
    ) -> Option<usize> {
        match self {
            Self::RoundRobin => self.first(offers, own, last),
            Self::Fcfs => draw(offers, &(0..offers.len()).collect::<Vec<_>>(), rng),
            Self::Nearest => {
                let distance = |index: &usize| {
                    (offers[*index].bytes < want_bytes, offers[*index].zone.distance(own))
                };
                let nearest = (0..offers.len()).map(|index| distance(&index)).min()?;
                let near: Vec<usize> =
                    (0..offers.len()).filter(|index| distance(index) == nearest).collect();
                draw(offers, &near, rng)
            }
        }
    }
}

fn draw(offers: &[Candidate], from: &[usize], rng: &mut Rng) -> Option<usize> {
    let drawn = (0..CHOICES).filter_map(|_| from.get(rng.index(from.len())).copied());
    drawn.max_by_key(|index| offers[*index].bytes)
}
