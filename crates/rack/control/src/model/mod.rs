//! The controller's state and every change of it, as plain functions.
//!
//! *Intent* (records: what shall be) is stored; *observation* (what nodes, clients and switches
//! say) is not, because it comes again. No I/O, no clock, no randomness: time is the controller's
//! uptime in milliseconds, passed in, and so is the source of keys.
//!
//! Invariants:
//! - [`State::apply`] changes everything a command means, or nothing and says why.
//! - Whatever changes intent is in the operations for the store, in the same order.
//! - A grant's memory is free again only when its node has said that it let go of it.
//! - Every grant has an epoch above all before it and a key of its own, also after restarts.

mod clients;
pub mod graph;
mod load;
mod moves;
mod nodes;
pub mod record;
mod segments;
mod tasks;
mod views;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farpool_api::{
    ClientId, ClientReport, ClientSpec, Event, Key, MoveRequest, NodeReport, NodeSpec, Problem,
    ProblemKind, SegmentId, SegmentSpec, SegmentState, Task, TaskId,
};
use farpool_placement::{Allocator, Graph};
use farpool_switch::Circuit;

pub use graph::AdoptError;
use record::{ClientRecord, MetaRecord, NodeRecord, Record, SegmentRecord};
pub use record::{Records, StoreOp};

/// A node that has not reported for this long gets nothing new.
pub const NODE_LATE_MS: u64 = 5_000;
/// A node that has not reported for this long is lost: what is evacuated from it needs no
/// confirmation any more.
pub const NODE_LOST_MS: u64 = 30_000;
/// Time a client has to move away what a donor wants back; then the donor gets it in any case.
pub const RECLAIM_DEADLINE_MS: u64 = 30_000;
/// How long a segment that found no place waits before it is tried again.
pub const RETRY_MS: u64 = 1_000;
/// A client is told to leave a reclaimed place without a target when none was found for this long:
/// it then still has most of the time until [`RECLAIM_DEADLINE_MS`] to take its data home.
pub const LEAVE_AFTER_MS: u64 = 5_000;
/// Nodes; another one is refused. Without a topology each new one builds the graph anew, 18 ms with
/// 1,000 nodes and 10,000 segments (benches/state_speed.rs).
pub const NODES_LIMIT: usize = 10_000;
/// Clients; another one is refused.
pub const CLIENTS_LIMIT: usize = 100_000;
/// Segments; another one is refused. The reconciler looks at all of them five times a second, 69 ms
/// for that many (benches/state_speed.rs).
pub const SEGMENTS_LIMIT: usize = 100_000;
/// Tasks remembered; the oldest that has ended is forgotten for a new one.
pub const TASKS_LIMIT: usize = 1_000;
/// Epochs and segment numbers are reserved in the store in steps of this many, so that most grants
/// do not write the counter.
const CEILING_STEP: u64 = 1_024;
/// Versions and event ids of one life of the controller.
const LIFE_SHIFT: u32 = 32;

/// Something that shall happen.
#[derive(Clone, Debug)]
pub enum Command {
    PutNode {
        name: String,
        spec: NodeSpec,
    },
    DeleteNode {
        name: String,
    },
    Drain {
        name: String,
        draining: bool,
    },
    NodeReport {
        name: String,
        report: NodeReport,
    },
    PutClient {
        id: ClientId,
        spec: ClientSpec,
    },
    DeleteClient {
        id: ClientId,
    },
    ClientReport {
        id: ClientId,
        report: ClientReport,
    },
    PutSegment {
        id: SegmentId,
        spec: SegmentSpec,
    },
    DeleteSegment {
        id: SegmentId,
        revision: Option<u64>,
    },
    MoveSegment {
        id: SegmentId,
        wish: MoveRequest,
        revision: Option<u64>,
    },
    /// The reconciler's: a node's age has changed what may be placed on it.
    NoteAge {
        name: String,
    },
    /// The reconciler's: a client's lease has run out.
    ExpireClient {
        id: ClientId,
    },
    /// The reconciler's: a segment must leave its node, by a deadline or without.
    Evacuate {
        id: SegmentId,
        deadline_ms: Option<u64>,
    },
    /// The reconciler's: a segment may stay after all.
    Stay {
        id: SegmentId,
    },
    /// The reconciler's: the deadline has passed.
    GiveUp {
        id: SegmentId,
    },
    /// The reconciler's: what a node must confirm may not be needed any more.
    Settle {
        id: SegmentId,
    },
    /// The reconciler's: a task may have ended.
    CheckTask {
        id: TaskId,
    },
    /// The reconciler's: circuits that a switch says stand, and why not all that shall, if that is
    /// known.
    NoteCircuits {
        switch: String,
        circuits: Vec<Circuit>,
        trouble: Option<String>,
    },
}

/// The result of a command; its changes are in the state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Something new.
    Created,
    /// It was there, and may have changed.
    Done,
    /// It goes on under this id.
    Task(TaskId),
}

/// A command carried out.
#[derive(Debug)]
pub struct Applied {
    pub outcome: Outcome,
    /// To be made durable, as one batch, before any client is told.
    pub ops: Vec<StoreOp>,
    pub events: Vec<Event>,
}

/// What a node said last.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeSeen {
    pub sequence: u64,
    pub known_version: u64,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub lendable_bytes: u64,
    pub read_bytes_total: u64,
    pub write_bytes_total: u64,
    pub load_permille: u16,
    /// Epoch of each grant it has.
    pub grants: BTreeMap<SegmentId, u64>,
    /// Lies it has told, so that each is an event once.
    pub lies: BTreeSet<&'static str>,
}

/// How long ago a node was heard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Age {
    Fresh,
    Late,
    Lost,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub record: NodeRecord,
    /// Its brick in the graph, if it lends memory.
    pub memory: Option<String>,
    /// Its last report since the controller began to lead.
    pub seen: Option<NodeSeen>,
    /// Its last registration or report, or the controller's start.
    pub heard_ms: u64,
    /// Its age as last noted.
    pub age: Age,
    /// Of what it shall have; grows with every change of that.
    pub version: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub record: ClientRecord,
    pub heard_ms: u64,
    pub sequence: Option<u64>,
    pub version: u64,
    pub segments: BTreeSet<SegmentId>,
}

/// The state of a segment besides its record.
#[derive(Clone, Debug)]
pub(crate) struct Runtime {
    /// As last announced.
    pub state: SegmentState,
    /// Whether its target was announced.
    pub target_ready: bool,
    pub used_bytes: Option<u64>,
    /// When the donor takes the place back.
    pub deadline_ms: Option<u64>,
    /// When to try again: it must leave and has found no place yet.
    pub retry_ms: Option<u64>,
    /// Its client was told to leave the place for any other it has; no target is sought any more.
    pub leave: bool,
    /// Version of its node's intent from which the old grant, or all of it, is no longer in it.
    pub dropped_version: u64,
    /// The same for the target's node.
    pub target_dropped_version: u64,
}

/// Everything the controller knows.
#[derive(Debug)]
pub struct State {
    /// Given; otherwise the graph is made of the nodes.
    topology: Option<Graph>,
    rack: Allocator,
    meta: MetaRecord,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) segments: BTreeMap<SegmentId, SegmentRecord>,
    pub(crate) runtime: BTreeMap<SegmentId, Runtime>,
    /// Segments with a grant on a node, current or target.
    pub(crate) on_node: BTreeMap<String, BTreeSet<SegmentId>>,
    /// The node that is a memory brick.
    node_of_brick: BTreeMap<String, String>,
    pub(crate) tasks: VecDeque<Task>,
    /// Circuits that stand, as the switches say.
    standing: BTreeSet<(String, u32, u32)>,
    /// Why a switch is not as it shall be, by its name.
    troubles: BTreeMap<String, String>,
    pub(crate) last_version: u64,
    last_event: u64,
}

/// What a command has changed so far; handed from function to function.
pub(crate) struct Changes<'a> {
    now_ms: u64,
    random: &'a mut dyn FnMut() -> u128,
    ops: Vec<StoreOp>,
    events: Vec<(&'static str, String, String)>,
}

impl Changes<'_> {
    fn put(&mut self, record: &impl Record) {
        self.ops.push(record.put());
    }

    fn event(&mut self, kind: &'static str, subject: impl ToString, detail: impl Into<String>) {
        self.events.push((kind, subject.to_string(), detail.into()));
    }

    fn key(&mut self) -> Key {
        Key((self.random)())
    }
}

/// A refusal of this kind.
fn refuse<T>(kind: ProblemKind, detail: impl Into<String>) -> Result<T, Problem> {
    Err(Problem::new(kind, detail))
}

impl State {
    /// Carries out a command at `now_ms` of the controller's uptime. `random` gives fresh bits for
    /// keys and task ids.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    pub fn apply(
        &mut self,
        command: Command,
        now_ms: u64,
        random: &mut dyn FnMut() -> u128,
    ) -> Result<Applied, Problem> {
        let mut changes = Changes { now_ms, random, ops: Vec::new(), events: Vec::new() };
        let to = &mut changes;
        let outcome = match command {
            Command::PutNode { name, spec } => self.put_node(&name, spec, to)?,
            Command::DeleteNode { name } => self.delete_node(&name, to)?,
            Command::Drain { name, draining } => self.drain(&name, draining, to)?,
            Command::NodeReport { name, report } => self.node_report(&name, report, to)?,
            Command::PutClient { id, spec } => self.put_client(id, spec, to)?,
            Command::DeleteClient { id } => self.delete_client(id, "it said so", to)?,
            Command::ClientReport { id, report } => self.client_report(id, &report, to)?,
            Command::PutSegment { id, spec } => self.put_segment(id, spec, to)?,
            Command::DeleteSegment { id, revision } => self.delete_segment(id, revision, to)?,
            Command::MoveSegment { id, wish, revision } => {
                self.move_segment(id, &wish, revision, to)?
            }
            Command::NoteAge { name } => self.note_age(&name, to),
            Command::ExpireClient { id } => self.delete_client(id, "its lease ran out", to)?,
            Command::Evacuate { id, deadline_ms } => self.evacuate(id, deadline_ms, to),
            Command::Stay { id } => self.stay(id, to),
            Command::GiveUp { id } => self.give_up(id, to),
            Command::Settle { id } => self.settle(id, to),
            Command::CheckTask { id } => self.check_task(id),
            Command::NoteCircuits { switch, circuits, trouble } => {
                self.note_trouble(&switch, trouble, to);
                self.note_circuits(&switch, &circuits, to)
            }
        };
        let Changes { ops, events, .. } = changes;
        let events = events.into_iter().map(|event| self.number(event, now_ms)).collect();
        Ok(Applied { outcome, ops, events })
    }

    fn number(&mut self, event: (&'static str, String, String), uptime_ms: u64) -> Event {
        self.last_event += 1;
        let (kind, subject, detail) = event;
        Event { id: self.last_event, kind: kind.to_owned(), subject, detail, uptime_ms }
    }

    /// Notes that what a node shall have has changed; gives the new version.
    fn touch_node(&mut self, name: &str) -> u64 {
        self.last_version += 1;
        if let Some(node) = self.nodes.get_mut(name) {
            node.version = self.last_version;
        }
        self.last_version
    }

    /// Notes that the answer to a client has changed.
    fn touch_client(&mut self, id: Option<ClientId>) {
        self.last_version += 1;
        if let Some(client) = id.and_then(|id| self.clients.get_mut(&id)) {
            client.version = self.last_version;
        }
    }

    /// Brings the stored ceilings above everything the rack has given.
    fn raise_ceilings(&mut self, to: &mut Changes<'_>) {
        let (number, epoch) = self.rack.highest_ids();
        let meta = &mut self.meta;
        if number.0 <= meta.number_ceiling && epoch.0 <= meta.epoch_ceiling {
            return;
        }
        meta.number_ceiling = meta.number_ceiling.max(number.0 + CEILING_STEP);
        meta.epoch_ceiling = meta.epoch_ceiling.max(epoch.0 + CEILING_STEP);
        to.put(meta);
    }

    /// The state of intent and of reservations as text: equal texts, equal states. For tests.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        format!(
            "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            self.meta,
            self.nodes,
            self.clients,
            self.segments,
            self.runtime,
            self.on_node,
            self.tasks,
            self.last_version,
            self.rack.snapshot()
        )
    }

    /// Everything stored, as it would be loaded again.
    #[must_use]
    pub fn records(&self) -> Records {
        Records {
            meta: self.meta,
            nodes: self.nodes.values().map(|node| node.record.clone()).collect(),
            clients: self.clients.values().map(|client| client.record.clone()).collect(),
            segments: self.segments.values().cloned().collect(),
        }
    }
}
