//! MULTIGETs that wait for lower tiers: all keys are read at once, and the answer is made when the
//! last read is complete.
//!
//! A key that is in memory is read when it is requested, and one that has to wait takes its place
//! among the requests on its key; so each is answered in the order of the requests, whatever
//! arrives first. Results are kept until all are there. An answer that would become too long, or
//! for which there is no room, stops early, as the protocol allows: the client asks for the rest.

use std::collections::HashMap;

use farpool_keyvault::frame::{FRAME_BYTES_MAX, HEADER_BYTES, Header, Status};
use farpool_keyvault::message::{FOUND_BYTES, Item, begin_found, finish_found};
use farpool_units::exactly;

use crate::mail::mailbox::Origin;
use farpool_kv_protocol::keyvault::{self, AnswerHead};

/// The most bytes that one thread keeps of incomplete answers: four of the longest. Beyond it
/// answers stop early.
pub(crate) const GATHERED_BYTES_MAX: usize = 4 * FRAME_BYTES_MAX;
/// The cost of an awaited key, including its place among the parked requests.
const PART_BYTES: usize = 512;
/// The most bytes of an answer, besides its header and the count of keys.
const ANSWER_BYTES_MAX: usize = FRAME_BYTES_MAX - HEADER_BYTES - 8;

/// The number of a MULTIGET that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GatheringId(u64);

#[derive(Debug)]
enum Part {
    Awaited,
    Missing,
    /// Encoded as in the answer.
    Found(Vec<u8>),
}

/// The partial results of one MULTIGET.
#[derive(Debug)]
pub(crate) struct Gathering {
    header: Header,
    checked: bool,
    pub(crate) origin: Origin,
    /// One for each key that this answer covers.
    parts: Vec<Part>,
    awaited: usize,
    found_bytes: usize,
    /// Even the first value is too long for an answer.
    is_too_large: bool,
}

impl Gathering {
    /// Leaves the last key to another request. Returns the bytes that this frees.
    fn drop_last(&mut self) -> usize {
        let found_bytes = match self.parts.pop() {
            Some(Part::Found(bytes)) => bytes.len(),
            Some(Part::Awaited) => {
                self.awaited -= 1;
                0
            }
            Some(Part::Missing) | None => 0,
        };
        self.found_bytes -= found_bytes;
        PART_BYTES + found_bytes
    }

    fn kept_bytes(&self) -> usize {
        self.found_bytes + self.parts.len() * PART_BYTES
    }

    /// Appends the answer.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let head = AnswerHead { header: &self.header, checked: self.checked };
        keyvault::answer_by(head, out, |out| {
            if self.is_too_large {
                return Status::TooLarge;
            }
            let at = begin_found(out);
            for part in &self.parts {
                if let Part::Found(bytes) = part {
                    out.extend_from_slice(bytes);
                }
            }
            finish_found(out, at, exactly(self.parts.len()));
            Status::Ok
        });
    }
}

/// All MULTIGETs that wait in one thread.
#[derive(Debug)]
pub(crate) struct Gatherings {
    open: HashMap<GatheringId, Gathering>,
    next: u64,
    kept_bytes: usize,
    kept_bytes_max: usize,
    answer_bytes_max: usize,
}

impl Default for Gatherings {
    fn default() -> Self {
        Self::new(GATHERED_BYTES_MAX, ANSWER_BYTES_MAX)
    }
}

impl Gatherings {
    fn new(kept_bytes_max: usize, answer_bytes_max: usize) -> Self {
        Self { open: HashMap::new(), next: 0, kept_bytes: 0, kept_bytes_max, answer_bytes_max }
    }

    /// Begins to wait for as many of the first keys as there is room for, at least one.
    pub(crate) fn begin(
        &mut self,
        AnswerHead { header, checked }: AnswerHead<'_>,
        origin: Origin,
        keys: usize,
    ) -> GatheringId {
        let room = self.kept_bytes_max.saturating_sub(self.kept_bytes) / PART_BYTES;
        let keys = keys.min(room.max(1));
        let parts: Vec<Part> = (0..keys).map(|_| Part::Awaited).collect();
        self.kept_bytes += keys * PART_BYTES;
        self.next += 1;
        let gathering = Gathering {
            header: *header,
            checked,
            origin,
            parts,
            awaited: keys,
            found_bytes: 0,
            is_too_large: false,
        };
        self.open.insert(GatheringId(self.next), gathering);
        GatheringId(self.next)
    }

    /// Whether a key is still covered by the answer.
    pub(crate) fn wants(&self, id: GatheringId, index: u16) -> bool {
        self.open.get(&id).is_some_and(|it| usize::from(index) < it.parts.len())
    }

    /// Takes the outcome for a key.
    pub(crate) fn take(&mut self, id: GatheringId, index: u16, item: Option<Item<'_>>) {
        let Some(gathering) = self.open.get_mut(&id) else { return };
        let at = usize::from(index);
        let Some(part @ Part::Awaited) = gathering.parts.get_mut(at) else { return };
        gathering.awaited -= 1;
        *part = Part::Missing;
        let Some(item) = item else { return };
        let bytes = item.value.len() + FOUND_BYTES;
        if bytes > self.answer_bytes_max {
            gathering.is_too_large |= at == 0;
            while gathering.parts.len() > at.max(1) {
                self.kept_bytes -= gathering.drop_last();
            }
            return;
        }
        let mut found = Vec::with_capacity(bytes);
        item.write_found(index, &mut found);
        gathering.parts[at] = Part::Found(found);
        gathering.found_bytes += bytes;
        self.kept_bytes += bytes;
        // What does not fit into the answer is dropped from its end: the last key could not be in
        // it in any case.
        while gathering.parts.len() > 1
            && (gathering.found_bytes > self.answer_bytes_max
                || self.kept_bytes > self.kept_bytes_max)
        {
            self.kept_bytes -= gathering.drop_last();
        }
    }

    /// Removes and returns a MULTIGET if none of its keys is awaited any more.
    pub(crate) fn finished(&mut self, id: GatheringId) -> Option<Gathering> {
        if self.open.get(&id)?.awaited > 0 {
            return None;
        }
        let gathering = self.open.remove(&id)?;
        self.kept_bytes -= gathering.kept_bytes();
        Some(gathering)
    }
}

#[cfg(test)]
mod tests {
    use farpool_keyvault::frame::Opcode;
    use farpool_keyvault::message::read_found;
    use proptest::prelude::*;

    use super::*;
    use crate::mail::mailbox::{ConnectionId, Ticket};

    const ANSWER_MAX: usize = 4000;
    const KEPT_MAX: usize = 20_000;

    fn begin(gatherings: &mut Gatherings, request: u32, keys: usize) -> GatheringId {
        let (opcode, status) = (Opcode::MultiGet, None);
        let header = Header { length: 0, opcode, status, shard: 0, connection: 0, request };
        let address = ConnectionId { number: 1, generation: 2 }.address(Ticket(0));
        let head = AnswerHead { header: &header, checked: true };
        gatherings.begin(head, Origin { thread: 0, address }, keys)
    }

    /// The number of keys that the answer covers; what it says of them must be right. None: too
    /// large.
    fn judge(
        gathering: &Gathering,
        values: &[Option<Vec<u8>>],
    ) -> Result<Option<usize>, TestCaseError> {
        let mut out = Vec::new();
        gathering.write(&mut out);
        let header = Header::read(&out, true).unwrap();
        prop_assert!(out.len() <= HEADER_BYTES + 8 + ANSWER_MAX);
        if header.status == Some(Status::TooLarge) {
            return Ok(None);
        }
        let (looked_at, found) = read_found(&out[HEADER_BYTES..]).unwrap();
        let looked_at = usize::from(looked_at);
        let found: Vec<(usize, &[u8])> =
            found.into_iter().map(|(at, item)| (usize::from(at), item.value)).collect();
        let there = values[..looked_at].iter().enumerate();
        let there: Vec<(usize, &[u8])> =
            there.filter_map(|(at, value)| Some((at, value.as_deref()?))).collect();
        prop_assert_eq!(found, there);
        Ok(Some(looked_at))
    }

    fn footprint(values: &[Option<Vec<u8>>]) -> usize {
        values.iter().flatten().map(|value| value.len() + FOUND_BYTES).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

        /// Items arrive in any order, for any of several waiting MULTIGETs. Every answer is right
        /// for the keys it covers, covers as many as it can, and nothing is kept afterwards.
        #[test]
        fn answers_are_right_as_far_as_they_go(
            sizes in prop::collection::vec(
                prop::collection::vec(prop_oneof![3 => (0usize..600).prop_map(Some), 1 => Just(None), 1 => Just(Some(5000))], 1..12), 1..6),
            order in prop::collection::vec(any::<prop::sample::Index>(), 72),
            has_room: bool,
        ) {
            let kept_max = if has_room { 1 << 30 } else { KEPT_MAX };
            let mut gatherings = Gatherings::new(kept_max, ANSWER_MAX);
            let mut open = Vec::new();
            let mut to_come = Vec::new();
            for (number, sizes) in sizes.iter().enumerate() {
                let value = |(at, size): (usize, &Option<usize>)| size.map(|size| vec![u8::try_from(at).unwrap(); size]);
                let values: Vec<_> = sizes.iter().enumerate().map(value).collect();
                let id = begin(&mut gatherings, u32::try_from(number).unwrap(), values.len());
                to_come.extend((0..values.len()).map(|at| (number, at)));
                open.push((id, values, false));
            }
            let mut order = order.iter();
            while !to_come.is_empty() {
                let (number, at) = to_come.swap_remove(order.next().unwrap().index(to_come.len()));
                let (id, values, _) = &open[number];
                let index = u16::try_from(at).unwrap();
                let item = values[at].as_ref().map(|value| Item { client_flags: 0, cas: 1, value });
                gatherings.take(*id, index, item);
                let overhead = open.iter().filter(|it| !it.2).count() * (PART_BYTES + FOUND_BYTES + 600);
                prop_assert!(gatherings.kept_bytes <= kept_max + overhead, "{} \
                    bytes", gatherings.kept_bytes);
                let (id, values, is_done) = &mut open[number];
                let Some(gathering) = gatherings.finished(*id) else { continue };
                prop_assert!(!*is_done, "answered twice");
                *is_done = true;
                match judge(&gathering, values)? {
                    None => prop_assert!(footprint(&values[..1]) > ANSWER_MAX),
                    Some(looked_at) => {
                        prop_assert!(looked_at >= 1);
                        if has_room && looked_at < values.len() {
                            prop_assert!(footprint(&values[..=looked_at]) > ANSWER_MAX);
                        }
                    }
                }
            }
            prop_assert!(open.iter().all(|(_, _, is_done)| *is_done));
            prop_assert!(gatherings.open.is_empty() && gatherings.kept_bytes == 0);
        }
    }
}
