//! Which port is joined to which: the rules of a circuit switch, without any I/O.
//!
//! Invariants: a port is in one circuit at most; a circuit joins both ways; a call that is refused
//! changes nothing.

use crate::Circuit;

/// The circuits of one switch.
#[derive(Clone, Debug)]
pub(crate) struct CircuitTable {
    peers: Vec<Option<u32>>,
}

/// Why a circuit cannot be set up or taken down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Conflict {
    /// There is no such port.
    NoPort(u32),
    /// The port is in this other circuit.
    InUse(u32, Circuit),
}

impl CircuitTable {
    pub(crate) fn new(ports: usize) -> Self {
        Self { peers: vec![None; ports] }
    }

    /// The port at the other end, if there is one.
    pub(crate) fn peer(&self, port: u32) -> Option<u32> {
        *self.peers.get(usize::try_from(port).ok()?)?
    }

    /// All circuits, in ascending order.
    pub(crate) fn circuits(&self) -> Vec<Circuit> {
        let ends = (0..).zip(&self.peers).filter_map(|(port, peer)| Some((port, (*peer)?)));
        let lower = ends.filter(|(port, peer)| port < peer);
        lower.filter_map(|(port, peer)| Circuit::new(port, peer)).collect()
    }

    /// Sets a circuit up. Returns false if it was up already.
    pub(crate) fn connect(&mut self, circuit: Circuit) -> Result<bool, Conflict> {
        let (low, high) = self.check(circuit)?;
        for port in [low, high] {
            match self.peer(port).and_then(|peer| Circuit::new(port, peer)) {
                Some(other) if other == circuit => return Ok(false),
                Some(other) => return Err(Conflict::InUse(port, other)),
                None => {}
            }
        }
        self.set(low, Some(high));
        self.set(high, Some(low));
        Ok(true)
    }

    /// Takes a circuit down. Returns false if it was not up.
    pub(crate) fn disconnect(&mut self, circuit: Circuit) -> Result<bool, Conflict> {
        let (low, high) = self.check(circuit)?;
        if self.peer(low) != Some(high) {
            return Ok(false);
        }
        self.set(low, None);
        self.set(high, None);
        Ok(true)
    }

    fn check(&self, circuit: Circuit) -> Result<(u32, u32), Conflict> {
        let (low, high) = circuit.ports();
        let is_there = |port: u32| usize::try_from(port).is_ok_and(|port| port < self.peers.len());
        match [low, high].into_iter().find(|port| !is_there(*port)) {
            Some(port) => Err(Conflict::NoPort(port)),
            None => Ok((low, high)),
        }
    }

    fn set(&mut self, port: u32, peer: Option<u32>) {
        let place = usize::try_from(port).ok().and_then(|port| self.peers.get_mut(port));
        if let Some(place) = place {
            *place = peer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PORTS: u32 = 6;

    /// The rules in their simplest form: a set of circuits that share no port.
    #[derive(Default, Debug)]
    struct Model(BTreeSet<Circuit>);

    impl Model {
        fn connect(&mut self, circuit: Circuit) -> Result<bool, Conflict> {
            let (low, high) = circuit.ports();
            if let Some(port) = [low, high].into_iter().find(|port| *port >= PORTS) {
                return Err(Conflict::NoPort(port));
            }
            if self.0.contains(&circuit) {
                return Ok(false);
            }
            let holds = |other: &Circuit, port| other.ports().0 == port || other.ports().1 == port;
            for port in [low, high] {
                if let Some(other) = self.0.iter().find(|other| holds(other, port)) {
                    return Err(Conflict::InUse(port, *other));
                }
            }
            Ok(self.0.insert(circuit))
        }

        fn disconnect(&mut self, circuit: Circuit) -> Result<bool, Conflict> {
            let (low, high) = circuit.ports();
            match [low, high].into_iter().find(|port| *port >= PORTS) {
                Some(port) => Err(Conflict::NoPort(port)),
                None => Ok(self.0.remove(&circuit)),
            }
        }
    }

    proptest! {
        #[test]
        fn the_table_does_what_the_model_does(
            steps in prop::collection::vec((any::<bool>(), 0..PORTS + 2, 0..PORTS + 2), 1..60),
        ) {
            let (mut table, mut model) = (CircuitTable::new(PORTS as usize), Model::default());
            for (up, a, b) in steps {
                let Some(circuit) = Circuit::new(a, b) else { continue };
                let (told, expected) = match up {
                    true => (table.connect(circuit), model.connect(circuit)),
                    false => (table.disconnect(circuit), model.disconnect(circuit)),
                };
                prop_assert_eq!(told, expected);
                prop_assert_eq!(table.circuits(), model.0.iter().copied().collect::<Vec<_>>());
                for port in 0..PORTS {
                    let peer = table.peer(port);
                    prop_assert_eq!(peer.and_then(|peer| table.peer(peer)), peer.map(|_| port));
                }
            }
        }
    }
}
