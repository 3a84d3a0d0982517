//! The nodes a node knows to be alive, for choosing some at random, and the life of each.
//!
//! Invariants: a node is listed once; a known life never goes back to an earlier one.

use std::collections::BTreeMap;

use crate::ids::{Incarnation, NodeId, Peer};
use crate::limits::PEERS_MAX;
use crate::replay::Received;
use crate::rng::Rng;

/// Alive nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    list: Vec<Peer>,
    place: BTreeMap<NodeId, usize>,
    lives: BTreeMap<NodeId, Incarnation>,
    /// Numbers of the datagrams received from the present life of each node; with a rack key only.
    received: BTreeMap<NodeId, Received>,
}

impl Peers {
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn list(&self) -> &[Peer] {
        &self.list
    }

    /// Notes that `node` is in the life `life`. Returns Less if a later one is known, Greater if
    /// only an earlier one was, else Equal.
    pub(crate) fn note_life(&mut self, node: NodeId, life: Incarnation) -> std::cmp::Ordering {
        match self.lives.get_mut(&node) {
            Some(known) => {
                let order = life.cmp(known);
                *known = life.max(*known);
                if order.is_gt() {
                    self.received.remove(&node);
                }
                order
            }
            None => {
                // Full: the node is served nevertheless, but its stale datagrams are not
                // recognized. What they could end or bind is protected by the life inside each
                // grant.
                if self.lives.len() < PEERS_MAX {
                    self.lives.insert(node, life);
                }
                std::cmp::Ordering::Equal
            }
        }
    }

    /// Takes the number of a signed datagram of a node's present life. Returns false if it was
    /// received before, or if that cannot be known.
    pub(crate) fn take(&mut self, node: NodeId, number: u64) -> bool {
        if let Some(received) = self.received.get_mut(&node) {
            return received.take(number);
        }
        let is_known = self.received.len() < PEERS_MAX;
        if is_known {
            self.received.insert(node, Received::first(number));
        }
        is_known
    }

    pub(crate) fn up(&mut self, peer: Peer) {
        if let Some(place) = self.place.get(&peer.node) {
            let before = std::mem::replace(&mut self.list[*place], peer);
            assert_eq!(before.node, peer.node, "a node stands at its place");
        } else if self.list.len() < PEERS_MAX {
            self.place.insert(peer.node, self.list.len());
            self.list.push(peer);
        }
    }

    pub(crate) fn down(&mut self, node: NodeId) {
        if let Some(place) = self.place.remove(&node) {
            let gone = self.list.swap_remove(place);
            assert_eq!(gone.node, node, "a node stands at its place");
            if let Some(moved) = self.list.get(place) {
                self.place.insert(moved.node, place);
            }
        }
    }

    /// Returns at most `count` different nodes, drawn at random.
    pub(crate) fn sample(&self, count: usize, rng: &mut Rng) -> Vec<Peer> {
        let mut chosen: Vec<Peer> = Vec::with_capacity(count);
        // A few more draws than needed: two of them may draw the same node.
        for _ in 0..count * 4 {
            if chosen.len() == count.min(self.list.len()) {
                break;
            }
            if let Some(peer) = self.list.get(rng.index(self.list.len()))
                && !chosen.contains(peer)
            {
                chosen.push(*peer);
            }
        }
        chosen
    }
}
