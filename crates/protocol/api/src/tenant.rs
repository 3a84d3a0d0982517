//! A program's part in a pool, whoever gives the memory: a controller or a node that collaborates.
//!
//! It joins, asks for memory in as many pieces as the pool has it, reports and hears. What it does
//! about what it hears is [`crate::placements`]'s.

use std::time::Duration;

use farpool_units::at_most;
use farpool_wire::Address;

use crate::{
    ApiError, Client, ClientId, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec, Place,
    ProblemKind, Segment, SegmentId, SegmentSpec,
};

/// Smallest segment taken where the pool has no more in one piece.
const PIECE_MIN_BYTES: u64 = 64 << 20;

/// Memory that a program wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// How much, if the pool has it in one piece.
    pub bytes: u64,
    /// Bandwidth wanted in each direction; the usual if left out.
    pub rate_bytes_per_s: Option<u64>,
    /// Failure domains that will not do.
    pub avoid: &'a [String],
}

/// A program that uses a pool.
#[derive(Debug)]
pub struct Tenant {
    client: Client,
    id: ClientId,
    spec: ClientSpec,
    known_version: u64,
    sequence: u64,
}

impl Tenant {
    /// Nobody is told yet.
    #[must_use]
    pub fn new(client: Client, id: ClientId, spec: ClientSpec) -> Self {
        Self { client, id, spec, known_version: 0, sequence: 0 }
    }

    /// Tells the pool that the program is there, or still there.
    ///
    /// # Errors
    /// See [`ApiError`]; so for all operations.
    pub fn join(&self) -> Result<(), ApiError> {
        self.client.put_client(self.id, &self.spec).map(drop)
    }

    /// Asks for memory, and for less where there is no more in one piece. Memory of the program's
    /// own host is taken only where nobody else has any. `fresh_id` names each attempt.
    ///
    /// # Errors
    /// See [`ApiError`], of which [`is_no_room`] tells whether the pool just has none; or no id.
    pub fn ask<E: From<ApiError>>(
        &self,
        wish: Wish<'_>,
        mut fresh_id: impl FnMut() -> Result<SegmentId, E>,
    ) -> Result<Segment, E> {
        let mut spec = SegmentSpec::of_client(self.id, wish.bytes);
        if let Some(rate) = wish.rate_bytes_per_s {
            (spec.read_bytes_per_s, spec.write_bytes_per_s) = (rate, rate);
        }
        loop {
            spec.avoid = wish.avoid.to_vec();
            spec.avoid.push(self.spec.host.clone());
            let elsewhere = self.client.put_segment(fresh_id()?, &spec);
            let granted = match elsewhere {
                Err(error) if is_no_room(&error) => {
                    spec.avoid.pop();
                    self.client.put_segment(fresh_id()?, &spec)
                }
                other => other,
            };
            match granted {
                Err(error) if is_no_room(&error) && spec.bytes / 2 >= PIECE_MIN_BYTES => {
                    spec.bytes /= 2;
                }
                other => return Ok(other?),
            }
        }
    }

    /// Says how the program uses its segments and waits so long for news: all its segments, or None
    /// when the pool does not know the program (its lease ran out, or the pool lost its store):
    /// what was granted is not its own any more, and it has to [`join`](Self::join) anew.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn report(
        &mut self,
        segments: Vec<ClientSegmentUse>,
        wait: Duration,
    ) -> Result<Option<Vec<ClientSegment>>, ApiError> {
        self.sequence += 1;
        let report = ClientReport {
            sequence: self.sequence,
            segments,
            known_version: self.known_version,
            wait_ms: at_most(wait.as_millis()),
        };
        match self.client.report_client(self.id, &report) {
            Ok(answer) => {
                self.known_version = answer.version;
                Ok(Some(answer.segments))
            }
            Err(error) if error.is(ProblemKind::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives a segment up.
    ///
    /// # Errors
    /// See [`ApiError`]; a node that collaborates has no such operation.
    pub fn release(&self, id: SegmentId) -> Result<(), ApiError> {
        self.client.delete_segment(id, None)
    }

    /// Ends the program's part: all it has goes back.
    ///
    /// # Errors
    /// See [`ApiError`]; who cannot be told finds out by the lease.
    pub fn leave(&self) -> Result<(), ApiError> {
        self.client.delete_client(self.id)
    }
}

/// Whether a wish was refused because the pool does not have so much, there.
#[must_use]
pub fn is_no_room(error: &ApiError) -> bool {
    use ProblemKind::{Invalid, NoRoom, NotFound};
    [NoRoom, Invalid, NotFound].into_iter().any(|kind| error.is(kind))
}

/// The address to reach a place by: its unix socket where that is on this machine, else TCP. None
/// if it has neither.
#[must_use]
pub fn best_address(place: &Place) -> Option<Address> {
    let parsed: Vec<Address> =
        place.addresses.iter().filter_map(|text| text.parse().ok()).collect();
    let is_here = |address: &&Address| match address {
        Address::Unix(path) => path.exists(),
        _ => false,
    };
    let best = parsed.iter().find(is_here);
    best.or_else(|| parsed.iter().find(|it| matches!(it, Address::Tcp(_)))).cloned()
}
