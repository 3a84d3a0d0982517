//! A program's part in a pool, whether a controller or a collaborating node lends the memory.
//!
//! It joins, asks for memory in as many pieces as the pool needs, reports and receives answers. How
//! it acts on those is up to [`crate::placements`].

use std::time::Duration;

use farpool_units::at_most;
use farpool_wire::Address;

use crate::{
    ApiError, Client, ClientId, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec, Place,
    ProblemKind, Segment, SegmentId, SegmentSpec,
};

/// Least bandwidth that is taken where a tenant may have no more, in each direction: with less,
/// what is far is out of reach.
const RATE_MIN_BYTES_PER_S: u64 = 8 << 20;
/// Smallest segment accepted when the pool has no more in one piece.
const PIECE_MIN_BYTES: u64 = 64 << 20;

/// Memory that a program asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish<'a> {
    /// Its size, if the pool has it in one piece.
    pub bytes: u64,
    /// Bandwidth in each direction; None for the default, or what the tenant may still have.
    pub rate_bytes_per_s: Option<u64>,
    /// Failure domains to avoid.
    pub avoid: &'a [String],
    /// Whether it is for copies of what other segments of the program have.
    pub apart: bool,
    /// Whether less is of no use.
    pub is_whole: bool,
    /// Whether it waits for memory that is on its way: a refusal that [`retry_after`] knows a time
    /// for is returned then. Else less is taken, if there is less.
    pub may_wait: bool,
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
    /// Creates a tenant that has not joined yet.
    #[must_use]
    pub fn new(client: Client, id: ClientId, spec: ClientSpec) -> Self {
        Self { client, id, spec, known_version: 0, sequence: 0 }
    }

    /// Registers the program with the pool, or renews its registration.
    ///
    /// # Errors
    /// See [`ApiError`], as for all operations.
    pub fn join(&self) -> Result<(), ApiError> {
        self.client.put_client(self.id, &self.spec).map(drop)
    }

    /// Asks for memory, and for less if there is no more in one piece and none to wait for. Memory
    /// of the program's own host is taken only if no other has any. `fresh_id` names each attempt.
    ///
    /// # Errors
    /// See [`ApiError`], of which [`is_no_room`] tells whether the pool just has none; or no id.
    pub fn ask<E: From<ApiError>>(
        &self,
        wish: Wish<'_>,
        mut fresh_id: impl FnMut() -> Result<SegmentId, E>,
    ) -> Result<Segment, E> {
        let of_client = SegmentSpec::of_client(self.id, wish.bytes);
        let mut spec = SegmentSpec { apart: wish.apart, ..of_client };
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
            if let Some(left) = granted.as_ref().err().and_then(rate_left) {
                let is_some = (RATE_MIN_BYTES_PER_S..spec.read_bytes_per_s).contains(&left);
                if wish.rate_bytes_per_s.is_some() || !is_some {
                    return Ok(granted?); // less memory would not help
                }
                (spec.read_bytes_per_s, spec.write_bytes_per_s) = (left, left);
                continue;
            }
            match granted {
                Err(error) if wish.may_wait && retry_after(&error).is_some() => {
                    return Err(error.into());
                }
                Err(error)
                    if is_no_room(&error)
                        && !wish.is_whole
                        && spec.bytes / 2 >= PIECE_MIN_BYTES =>
                {
                    spec.bytes /= 2;
                }
                other => return Ok(other?),
            }
        }
    }

    /// Asks for so much more of a segment, where it is, and for less if there is less. Returns how
    /// much more it has.
    ///
    /// # Errors
    /// See [`ApiError`]; a collaborating node does not have this operation.
    pub fn enlarge(&self, id: SegmentId, more_bytes: u64) -> Result<u64, ApiError> {
        let known = self.client.segment(id)?;
        let has_bytes = known.place.bytes;
        let Some(spec) = known.spec else { return Ok(0) };
        let mut more_bytes = more_bytes;
        loop {
            let larger =
                SegmentSpec { bytes: has_bytes.saturating_add(more_bytes), ..spec.clone() };
            match self.client.resize_segment(id, &larger, Some(known.revision)) {
                Err(error) if is_no_room(&error) && more_bytes / 2 >= PIECE_MIN_BYTES => {
                    more_bytes /= 2;
                }
                other => return Ok(other?.place.bytes.saturating_sub(has_bytes)),
            }
        }
    }

    /// Reports the program's use of its segments and waits up to `wait` for news. Returns all its
    /// segments, or None if the pool does not know the program (its lease ran out, or the pool lost
    /// its store): then its grants are no longer its own, and it has to [`join`](Self::join) again.
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

    /// Releases a segment.
    ///
    /// # Errors
    /// See [`ApiError`]; a collaborating node does not have this operation.
    pub fn release(&self, id: SegmentId) -> Result<(), ApiError> {
        self.client.delete_segment(id, None)
    }

    /// Leaves the pool: all its segments are released.
    ///
    /// # Errors
    /// See [`ApiError`]; a pool that cannot be reached releases them when the lease runs out.
    pub fn leave(&self) -> Result<(), ApiError> {
        self.client.delete_client(self.id)
    }
}

/// True if a wish was refused because the pool does not have that much there.
#[must_use]
pub fn is_no_room(error: &ApiError) -> bool {
    use ProblemKind::{Invalid, NoRoom, NotFound};
    [NoRoom, Invalid, NotFound].into_iter().any(|kind| error.is(kind))
}

/// The bandwidth that the tenant may still be granted, if more was asked for.
fn rate_left(error: &ApiError) -> Option<u64> {
    let ApiError::Problem(problem) = error else { return None };
    problem.rate_left_bytes_per_s.as_deref().copied()
}

/// Returns when to ask again, if a wish was refused only for as long as memory is on its way back.
#[must_use]
pub fn retry_after(error: &ApiError) -> Option<Duration> {
    let ApiError::Problem(problem) = error else { return None };
    problem.retry_after_ms.map(|ms| Duration::from_millis(u64::from(ms.get())))
}

/// Returns the best address of a place: its unix socket if that is on this machine, else TCP. None
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
