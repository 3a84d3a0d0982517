//! The events that are remembered: in memory for readers, and in the store for the next life.
//!
//! Invariants:
//! - The events of a command are stored in the batch of its changes, as one record: an event that
//!   was told is there after a restart, one that was not told may be.
//! - At most [`EVENTS_LIMIT`] events are remembered; the record of the oldest is removed with them.

use std::collections::VecDeque;

use farpool_api::Event;

use crate::model::record::{EventRecord, Record, StoreOp};

/// Events kept for later readers; older ones are dropped, with the rest of their record. Each takes
/// about 200 bytes of the store.
pub(crate) const EVENTS_LIMIT: usize = 10_000;

/// The events, by id.
#[derive(Debug, Default)]
pub(crate) struct History {
    events: VecDeque<Event>,
    /// The stored records, oldest first, as the id of their first event and their number of events.
    records: VecDeque<(u64, usize)>,
}

impl History {
    /// Returns the events of a store.
    pub(crate) fn of(mut records: Vec<EventRecord>) -> Self {
        records.sort_by_key(EventRecord::first);
        let mut history = Self::default();
        for record in records {
            history.records.push_back((record.first(), record.events.len()));
            history.events.extend(record.events);
        }
        history
    }

    /// Adds the events of one command. Returns what is to be stored with its changes.
    pub(crate) fn add(&mut self, events: &[Event]) -> Vec<StoreOp> {
        let record = EventRecord { events: events.to_vec() };
        if record.events.is_empty() {
            return Vec::new();
        }
        let mut ops = vec![record.put()];
        self.records.push_back((record.first(), events.len()));
        self.events.extend(record.events);
        while self.events.len() > EVENTS_LIMIT && self.records.len() > 1 {
            let Some((first, count)) = self.records.pop_front() else { break };
            self.events.drain(..count.min(self.events.len()));
            ops.push(StoreOp::Delete(EventRecord::key_of(first)));
        }
        ops
    }

    /// Returns the events as they are stored.
    pub(crate) fn records(&self) -> Vec<EventRecord> {
        let mut events = self.events.iter().cloned();
        let record = |(_, count): &(u64, usize)| EventRecord {
            events: events.by_ref().take(*count).collect(),
        };
        self.records.iter().map(record).collect()
    }

    /// Returns the events after the one with id `after`.
    pub(crate) fn after(&self, after: u64) -> Vec<Event> {
        let first = self.events.partition_point(|event| event.id <= after);
        self.events.range(first..).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn event(id: u64) -> Event {
        let (kind, subject, detail) = ("node-up".into(), "n0".into(), String::new());
        Event { id, kind, subject, detail, uptime_ms: 1, time_unix_ms: 2 }
    }

    #[test]
    fn the_store_has_what_is_remembered_and_nothing_else() {
        let (mut history, mut store) = (History::default(), BTreeMap::new());
        let mut next = 1;
        for round in 0..4_000 {
            let count = 1 + round % 7;
            let events: Vec<Event> = (next..next + count).map(event).collect();
            next += count;
            for op in history.add(&events) {
                match op {
                    StoreOp::Put(key, value) => drop(store.insert(key, value)),
                    StoreOp::Delete(key) => assert!(store.remove(&key).is_some(), "{key}"),
                }
            }
        }
        let remembered = history.after(0);
        assert!(remembered.len() <= EVENTS_LIMIT && remembered.len() > EVENTS_LIMIT - 8);
        assert_eq!(remembered.last().map(|event| event.id), Some(next - 1));
        let records: Vec<EventRecord> =
            store.values().map(|value| serde_json::from_slice(value).unwrap()).collect();
        let again = History::of(records.clone());
        assert_eq!(again.records(), records);
        assert_eq!(again.after(0), remembered);
        assert_eq!(again.after(next - 3).len(), 2);
        assert!(history.add(&[]).is_empty());
    }
}
