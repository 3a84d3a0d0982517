//! The records in the store: intent, and nothing that is reported again.
//!
//! One JSON value per record, under a key of its kind and id. Bricks and ports are kept by name,
//! because their numbers change when the graph is rebuilt.

use farpool_api::{ClientId, ClientSpec, Event, Key, NodeSpec, SegmentId, SegmentSpec, TenantSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::store::version::VERSION_KEY;

/// One change of the store. A batch of them is carried out as a whole or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreOp {
    /// Sets a key.
    Put(String, Vec<u8>),
    /// Removes a key.
    Delete(String),
}

/// A record that cannot be what this program wrote.
#[derive(Debug, thiserror::Error)]
#[error("the store's record {key} is damaged: {reason}")]
pub struct RecordError {
    key: String,
    reason: String,
}

/// A node that has registered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: String,
    pub spec: NodeSpec,
    /// Its place at the packet switch, if there is no topology.
    pub slot: u32,
    pub draining: bool,
}

/// A client that has registered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClientRecord {
    pub id: ClientId,
    pub spec: ClientSpec,
}

/// A run of superpages: client address, length, place in the brick.
pub type Piece = (u64, u64, u64);

/// A grant, without what its segment's record has already.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GrantRecord {
    /// The rack's number of the segment.
    pub number: u64,
    pub epoch: u64,
    pub key: Key,
    /// The node, and its memory brick.
    pub node: String,
    pub memory: String,
    /// Ports as `name:number`.
    pub path: Vec<String>,
    pub pieces: Vec<Piece>,
}

impl GrantRecord {
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, bytes, _)| bytes).sum()
    }
}

/// A segment and its desired state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentRecord {
    pub id: SegmentId,
    pub spec: SegmentSpec,
    /// The compute brick.
    pub host: String,
    pub current: GrantRecord,
    /// Where it is moving to.
    pub target: Option<GrantRecord>,
    /// Its data is at the target: the old grant is dropped.
    pub evacuated: bool,
    /// It is released: all its grants are dropped.
    pub releasing: bool,
    /// Its memory is gone: all its grants are dropped.
    pub lost: bool,
    pub revision: u64,
}

/// What a tenant is promised.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TenantRecord {
    pub name: String,
    pub spec: TenantSpec,
}

/// The events of one command.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventRecord {
    pub events: Vec<Event>,
}

impl EventRecord {
    /// The id of its first event; 0 if there is none.
    pub fn first(&self) -> u64 {
        self.events.first().map_or(0, |event| event.id)
    }

    /// The key of the record whose first event has this id; keys are in the order of ids.
    pub fn key_of(first: u64) -> String {
        format!("event/{first:020}")
    }
}

/// Numbers that never decrease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MetaRecord {
    /// Counts the times a controller began to lead; the upper half of versions and event ids.
    pub life: u64,
    /// No rack segment number above this was given.
    pub number_ceiling: u64,
    /// No epoch above this was given.
    pub epoch_ceiling: u64,
}

/// A record with a key of its own.
pub trait Record: Serialize + DeserializeOwned {
    fn key(&self) -> String;

    fn put(&self) -> StoreOp {
        // Records are plain data with string keys, which always serialize.
        StoreOp::Put(self.key(), serde_json::to_vec(self).unwrap_or_default())
    }

    fn delete(&self) -> StoreOp {
        StoreOp::Delete(self.key())
    }
}

impl Record for NodeRecord {
    fn key(&self) -> String {
        format!("node/{}", self.name)
    }
}

impl Record for ClientRecord {
    fn key(&self) -> String {
        format!("client/{}", self.id)
    }
}

impl Record for SegmentRecord {
    fn key(&self) -> String {
        format!("segment/{}", self.id)
    }
}

impl Record for TenantRecord {
    fn key(&self) -> String {
        format!("tenant/{}", self.name)
    }
}

impl Record for EventRecord {
    fn key(&self) -> String {
        Self::key_of(self.first())
    }
}

impl Record for MetaRecord {
    fn key(&self) -> String {
        "meta".to_owned()
    }
}

/// Everything in a store.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Records {
    pub meta: MetaRecord,
    pub nodes: Vec<NodeRecord>,
    pub clients: Vec<ClientRecord>,
    pub segments: Vec<SegmentRecord>,
    pub tenants: Vec<TenantRecord>,
    pub events: Vec<EventRecord>,
}

impl Records {
    /// Returns all records with their keys, in the order of their keys.
    #[must_use]
    pub fn pairs(&self) -> Vec<(String, Vec<u8>)> {
        let ops = [self.meta.put()].into_iter();
        let ops = ops.chain(self.nodes.iter().map(Record::put));
        let ops = ops.chain(self.clients.iter().map(Record::put));
        let ops = ops.chain(self.segments.iter().map(Record::put));
        let ops = ops.chain(self.tenants.iter().map(Record::put));
        let ops = ops.chain(self.events.iter().map(Record::put));
        let mut pairs: Vec<_> = ops
            .filter_map(|op| match op {
                StoreOp::Put(key, value) => Some((key, value)),
                StoreOp::Delete(_) => None,
            })
            .collect();
        pairs.sort();
        pairs
    }

    /// Reads what a store holds.
    pub fn read(pairs: &[(String, Vec<u8>)]) -> Result<Self, RecordError> {
        let mut all = Self::default();
        for (key, value) in pairs {
            match key.split_once('/').map_or(key.as_str(), |(kind, _)| kind) {
                "meta" => all.meta = parse(key, value)?,
                "node" => all.nodes.push(parse(key, value)?),
                "client" => all.clients.push(parse(key, value)?),
                "segment" => all.segments.push(parse(key, value)?),
                "tenant" => all.tenants.push(parse(key, value)?),
                "event" => all.events.push(parse(key, value)?),
                VERSION_KEY => {}
                _ => {
                    let reason = "there is no such kind".to_owned();
                    return Err(RecordError { key: key.clone(), reason });
                }
            }
        }
        Ok(all)
    }
}

fn parse<T: Record>(key: &str, value: &[u8]) -> Result<T, RecordError> {
    let damaged = |reason: String| RecordError { key: key.to_owned(), reason };
    let record: T = serde_json::from_slice(value).map_err(|error| damaged(error.to_string()))?;
    if record.key() != key {
        return Err(damaged(format!("it says it is {}", record.key())));
    }
    Ok(record)
}
