//! Segments that change their size. A segment grows at once: its memory is reserved, and its node
//! is told. It shrinks in two steps: its node is told first, and its memory is free when the node
//! has reported that no more is used and that it takes no more.

use farpool_api::{Problem, ProblemKind, SegmentId};
use farpool_placement::RequestId;
use farpool_units::SUPERPAGE_BYTES;

use super::record::{GrantRecord, Record, SegmentRecord};
use super::tenants::superpages_for;
use super::{Changes, Outcome, State, refuse};

impl SegmentRecord {
    /// The size that was asked for, in whole superpages.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.spec.bytes.checked_next_multiple_of(SUPERPAGE_BYTES).unwrap_or(u64::MAX)
    }

    /// The bytes of one of its places that it may use: less than are reserved while it shrinks.
    pub(crate) fn usable_bytes(&self, place: &GrantRecord) -> u64 {
        place.bytes().min(self.size_bytes())
    }
}

impl State {
    /// Changes the size of a segment that is there.
    pub(super) fn resize(
        &mut self,
        id: SegmentId,
        bytes: u64,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let segment = self.segment_with(id)?;
        let refusal = match segment {
            segment if segment.lost => Some("has lost its memory"),
            segment if segment.target.is_some() => Some("is being moved; change its size later"),
            _ => None,
        };
        if let Some(refusal) = refusal {
            return refuse(ProblemKind::Conflict, format!("segment {id} {refusal}"));
        }
        if bytes == 0 {
            return refuse(ProblemKind::Invalid, "a segment has at least one byte");
        }
        let wanted = SegmentRecord {
            spec: farpool_api::SegmentSpec { bytes, ..segment.spec.clone() },
            ..segment.clone()
        };
        let (before, size, reserved) =
            (segment.size_bytes(), wanted.size_bytes(), segment.current.bytes());
        let used = self.runtime.get(&id).and_then(|runtime| runtime.used_bytes).unwrap_or(0);
        if size < before && used > size {
            let detail = format!(
                "{used} bytes of segment {id} hold data, which {size} do not take; free them first"
            );
            return refuse(ProblemKind::Conflict, detail);
        }
        let pieces = match size > reserved {
            false => wanted.current.pieces.clone(),
            true => {
                // What is reserved counts already, also what the segment has given back and its
                // node has not let go of.
                let more = superpages_for(size - reserved);
                self.check_quota(wanted.spec.client, more)?;
                self.check_claims(wanted.spec.client, more, to.now_ms)?;
                let grant = self.rack.resize(RequestId(id.0.as_u128()), bytes);
                let grant = grant.map_err(|error| self.refusal(&error, &wanted.spec))?;
                let entries = grant.entries.iter();
                entries
                    .map(|it| (it.client_base_bytes, it.length_bytes, it.brick_offset_bytes))
                    .collect()
            }
        };
        let Some(segment) = self.segments.get_mut(&id) else { return Ok(Outcome::Done) };
        segment.spec.bytes = bytes;
        segment.current.pieces = pieces;
        segment.revision += 1;
        to.ops.push(segment.put());
        let (node, client) = (segment.current.node.clone(), segment.spec.client);
        if size != before {
            to.event("segment-resized", id, format!("from {before} to {size} bytes on {node}"));
            let version = self.touch_node(&node);
            if let Some(runtime) = self.runtime.get_mut(&id) {
                runtime.resized_version = version;
            }
        }
        self.touch_client(client);
        Ok(Outcome::Done)
    }

    /// Frees what a segment does not need any more, once its node has let go of it.
    pub(super) fn settle_size(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get(&id) else { return };
        let is_at_rest =
            !segment.releasing && !segment.lost && !segment.evacuated && segment.target.is_none();
        let (size, place) = (segment.size_bytes(), &segment.current);
        if !is_at_rest || size >= place.bytes() {
            return;
        }
        let since = self.runtime.get(&id).map_or(0, |runtime| runtime.resized_version);
        let node = self.nodes.get(&place.node);
        if !node.is_some_and(|node| node.keeps_to(id, place.epoch, size, since)) {
            return;
        }
        let resized = self.rack.resize(RequestId(id.0.as_u128()), segment.spec.bytes);
        let Ok(grant) = resized else { return };
        let Some(segment) = self.segments.get_mut(&id) else { return };
        let entries = grant.entries.iter();
        segment.current.pieces = entries
            .map(|it| (it.client_base_bytes, it.length_bytes, it.brick_offset_bytes))
            .collect();
        segment.revision += 1;
        to.ops.push(segment.put());
        let (node, client) = (segment.current.node.clone(), segment.spec.client);
        to.event("segment-shrunk", id, format!("{node} has {size} bytes of it"));
        self.touch_client(client);
    }
}
