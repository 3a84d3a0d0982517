//! The answers to programs about their grants.

use std::time::Duration;

use farpool_acms::{Epoch, GrantId, NodeId};
use farpool_api::{
    ClientAnswer, ClientId, ClientSegment, ClientView, Key, Place, SegmentId, SegmentState,
};
use farpool_units::{at_most, exactly};

use super::{Holding, HoldingState, Ledger, LedgerError};

/// No controller divides links here, so no program is held to a rate: the links and the kernel
/// decide.
pub(crate) const NO_RATE_LIMIT: u64 = u64::MAX;

/// How programs reach this node's own blade.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HerePlace {
    /// The node's name.
    pub node: String,
    /// Its blade's addresses, best first.
    pub addresses: Vec<String>,
}

/// Returns a grant's id as a segment: its server's id and its epoch.
#[must_use]
pub fn segment_of(grant: GrantId) -> SegmentId {
    SegmentId::from_u128(u128::from(grant.server.0) << 64 | u128::from(grant.epoch.0))
}

/// Returns the grant that [`segment_of`] gave this id.
#[must_use]
pub fn grant_of(segment: SegmentId) -> GrantId {
    let bits = segment.0.as_u128();
    let [server, epoch] = [bits >> 64, bits & u128::from(u64::MAX)].map(exactly);
    GrantId { server: NodeId(server), epoch: Epoch(epoch) }
}

impl Ledger {
    /// Returns all grants of a program, and the version of this answer.
    ///
    /// # Errors
    /// The program is not known.
    pub fn answer(
        &self,
        id: ClientId,
        here: &HerePlace,
        now: Duration,
    ) -> Result<ClientAnswer, LedgerError> {
        let account = self.book.get(&id).ok_or(LedgerError::NoSuchClient(id))?;
        let segments = self.holdings_of(id).map(|(grant, it)| client_segment(grant, it, here, now));
        Ok(ClientAnswer { version: account.version, segments: segments.collect() })
    }

    fn holdings_of(&self, id: ClientId) -> impl Iterator<Item = (GrantId, &Holding)> {
        self.holdings().filter(move |(_, holding)| holding.client == id)
    }

    /// Returns the version of a program's answer. None if the program is not known.
    #[must_use]
    pub fn version(&self, id: ClientId) -> Option<u64> {
        self.book.get(&id).map(|account| account.version)
    }

    /// Returns a program as shown to people.
    ///
    /// # Errors
    /// The program is not known.
    pub fn client(&self, id: ClientId) -> Result<ClientView, LedgerError> {
        let account = self.book.get(&id).ok_or(LedgerError::NoSuchClient(id))?;
        let spec = account.spec.clone();
        Ok(ClientView {
            tenant: spec.tenant,
            id,
            host: spec.host,
            name: spec.name,
            pid: spec.pid,
            lease_ms: spec.lease_ms,
            segments: self.holdings_of(id).map(|(grant, _)| segment_of(grant)).collect(),
        })
    }

    /// Returns all programs, and the bytes that each wants.
    pub fn clients(&self) -> impl Iterator<Item = (ClientView, u64)> {
        let of = |(id, account): (&ClientId, &super::Account)| {
            Some((self.client(*id).ok()?, account.wanted_bytes))
        };
        self.book.iter().filter_map(of)
    }
}

fn client_segment(
    grant: GrantId,
    holding: &Holding,
    here: &HerePlace,
    now: Duration,
) -> ClientSegment {
    let (state, deadline) = match holding.state {
        HoldingState::Ready => (SegmentState::Ready, None),
        HoldingState::Moving { deadline } => (SegmentState::Moving, deadline),
        HoldingState::Lost => (SegmentState::Lost, None),
    };
    let left = deadline.map(|deadline| deadline.saturating_sub(now).as_millis());
    let (node, addresses) = match holding.blade {
        Some(blade) => (blade.to_string(), vec![format!("tcp://{blade}")]),
        None => (here.node.clone(), here.addresses.clone()),
    };
    ClientSegment {
        id: segment_of(grant),
        epoch: grant.epoch.0,
        state,
        place: Place {
            node,
            domain: None,
            addresses,
            key: Some(Key(holding.key.0)),
            bytes: holding.bytes,
            read_bytes_per_s: NO_RATE_LIMIT,
            write_bytes_per_s: NO_RATE_LIMIT,
        },
        target: None,
        waits_for: Vec::new(),
        leave: state == SegmentState::Moving,
        deadline_ms: left.map(at_most),
    }
}
