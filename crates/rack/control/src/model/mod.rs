//! The controller's state and every change of it, as plain functions.
//!
//! *Intent* (records: the desired state) is stored; *observation* (what nodes, clients and switches
//! report) is not, because it is reported again. No I/O, no clock, no randomness: time is the
//! controller's uptime in milliseconds and is passed in, as is the source of keys.
//!
//! Invariants:
//! - [`State::apply`] makes all changes of a command, or none and returns the reason.
//! - Every change of intent is in the operations for the store, in the same order.
//! - A grant's memory is free again only when its node has reported that it let go of the grant, or
//!   is lost.
//! - Every grant has an epoch above all earlier ones and a key of its own, even after restarts.

mod clients;
mod condition;
pub mod graph;
mod load;
mod moves;
mod nodes;
mod owners;
pub mod record;
mod resize;
mod segments;
mod short;
mod tasks;
mod tenants;
mod views;
mod yielding;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farpool_api::{
    ClientId, ClientReport, ClientSpec, Event, Key, MoveRequest, NodeReport, NodeSpec, Problem,
    ProblemKind, SegmentId, SegmentSpec, SegmentState, Task, TaskId, TenantSpec,
};
use farpool_placement::{Allocator, Graph};
use farpool_switch::Circuit;

pub use condition::{Condition, Tags};
pub use graph::AdoptError;
use record::{ClientRecord, MetaRecord, NodeRecord, Record, SegmentRecord, TenantRecord};
pub use record::{Records, StoreOp};
pub(crate) use short::ASK_AGAIN_MS;

/// A node that has not reported for this long gets nothing new.
pub const NODE_LATE_MS: u64 = 5_000;
/// A node that has not reported for this long is lost: grants that leave it need no confirmation
/// any more.
pub const NODE_LOST_MS: u64 = 30_000;
/// Time that a client has to move out of memory that a donor reclaims; then the donor gets it in
/// any case.
pub const RECLAIM_DEADLINE_MS: u64 = 30_000;
/// How long a segment for which no place was found waits for the next attempt.
pub const RETRY_MS: u64 = 1_000;
/// How long a target is sought for a reclaimed segment before its client is told to leave without
/// one: it then still has most of the time until [`RECLAIM_DEADLINE_MS`] to take its data home.
pub const LEAVE_AFTER_MS: u64 = 5_000;
/// Most nodes; a further one is refused. Without a topology each new node rebuilds the graph, which
/// takes 18 ms with 1,000 nodes and 10,000 segments (benches/state_speed.rs).
pub const NODES_LIMIT: usize = 10_000;
/// Most clients; a further one is refused.
pub const CLIENTS_LIMIT: usize = 100_000;
/// Most segments; a further one is refused. The reconciler checks all of them five times a second,
/// which takes 69 ms for that many (benches/state_speed.rs).
pub const SEGMENTS_LIMIT: usize = 100_000;
/// Most tasks remembered; a new one replaces the oldest that has ended, or the oldest if none has.
pub const TASKS_LIMIT: usize = 1_000;
/// Epochs and segment numbers are reserved in the store in steps of this many, so that most grants
/// do not write the counter.
const CEILING_STEP: u64 = 1_024;
/// Bits of a version or event id that count within one life of the controller.
const LIFE_SHIFT: u32 = 32;

/// A command to the state.
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
        condition: Condition,
    },
    DeleteSegment {
        id: SegmentId,
        condition: Condition,
    },
    MoveSegment {
        id: SegmentId,
        wish: MoveRequest,
        condition: Condition,
    },
    PutTenant {
        name: String,
        spec: TenantSpec,
    },
    DeleteTenant {
        name: String,
    },
    /// From a request that found no room for this segment: others may have to give memory up.
    MakeRoom {
        id: SegmentId,
        spec: SegmentSpec,
    },
    /// From the reconciler: a node's age has changed what may be placed on it.
    NoteAge {
        name: String,
    },
    /// From the reconciler: a client's lease has run out.
    ExpireClient {
        id: ClientId,
    },
    /// From the reconciler: a segment must leave its node, by a deadline or without one.
    Evacuate {
        id: SegmentId,
        deadline_ms: Option<u64>,
    },
    /// From the reconciler: a segment may stay after all.
    Stay {
        id: SegmentId,
    },
    /// From the reconciler: the deadline has passed.
    GiveUp {
        id: SegmentId,
    },
    /// From the reconciler: the confirmation of a node may not be needed any more.
    Settle {
        id: SegmentId,
    },
    /// From the reconciler: a task may have ended.
    CheckTask {
        id: TaskId,
    },
    /// From the reconciler: the circuits that a switch reports as up, and why wanted ones are not,
    /// if known.
    NoteCircuits {
        switch: String,
        circuits: Vec<Circuit>,
        trouble: Option<String>,
    },
}

/// The result of a command; its changes are in the state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Something new was created.
    Created,
    /// The subject existed, and may have changed.
    Done,
    /// The command continues as the task with this id.
    Task(TaskId),
}

/// A command carried out.
#[derive(Debug)]
pub struct Applied {
    pub outcome: Outcome,
    /// Operations to be made durable, as one batch, before any client is answered.
    pub ops: Vec<StoreOp>,
    pub events: Vec<Event>,
}

/// What a node reported last.
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
    /// Each grant it has.
    pub grants: BTreeMap<SegmentId, GrantSeen>,
    /// Lies in its last report, so that each kind is an event only when it begins.
    pub lies: BTreeSet<&'static str>,
}

/// A grant as its node reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GrantSeen {
    pub epoch: u64,
    /// Its size on the blade; None if the node does not say.
    pub bytes: Option<u64>,
    pub used_bytes: u64,
}

/// How long ago a node was last heard from.
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
    /// Time of its last registration or report, or of the controller's start, in ms.
    pub heard_ms: u64,
    /// Its age as last noted.
    pub age: Age,
    /// Its daemon has said that it ends.
    pub has_ended: bool,
    /// Version of its intent; grows with every change.
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
    /// Its state as last announced.
    pub state: SegmentState,
    /// Whether its target was announced as ready.
    pub target_ready: bool,
    pub used_bytes: Option<u64>,
    /// When the donor takes the memory back, in ms.
    pub deadline_ms: Option<u64>,
    /// When to seek a place again, in ms: the segment must leave and no place was found yet.
    pub retry_ms: Option<u64>,
    /// Whether its client was told to leave the place for any other it has; no target is sought any
    /// more.
    pub leave: bool,
    /// Whether its client was asked to leave it for a tenant that is within its promise.
    pub yielding: bool,
    /// Version of its node's intent from which on its present size is in it.
    pub resized_version: u64,
    /// Version of its node's intent from which on the current grant is not in it, once dropped.
    pub dropped_version: u64,
    /// Version of the target node's intent from which on the target is not in it, once dropped.
    pub target_dropped_version: u64,
}

/// Everything the controller knows.
#[derive(Debug)]
pub struct State {
    /// The given topology; if None, the graph is made of the nodes.
    topology: Option<Graph>,
    rack: Allocator,
    meta: MetaRecord,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) segments: BTreeMap<SegmentId, SegmentRecord>,
    pub(crate) runtime: BTreeMap<SegmentId, Runtime>,
    /// Segments with a grant on a node, current or target.
    pub(crate) on_node: BTreeMap<String, BTreeSet<SegmentId>>,
    /// The node of each memory brick, by the brick's name.
    node_of_brick: BTreeMap<String, String>,
    pub(crate) tasks: VecDeque<Task>,
    pub(crate) tenants: BTreeMap<String, TenantRecord>,
    /// What others were asked to give up for a tenant, by its name.
    claims: BTreeMap<String, yielding::Claim>,
    /// Circuits that are up, as the switches report: switch, lower port, higher port.
    standing: BTreeSet<(String, u32, u32)>,
    /// Why a switch is not in its desired state, by its name.
    troubles: BTreeMap<String, String>,
    pub(crate) last_version: u64,
    last_event: u64,
}

/// What a command has changed so far; passed from function to function.
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

/// Refuses with this kind of problem.
fn refuse<T>(kind: ProblemKind, detail: impl Into<String>) -> Result<T, Problem> {
    Err(Problem::new(kind, detail))
}

impl State {
    /// Carries out a command at `now_ms` of the controller's uptime. `random` gives fresh bits for
    /// keys and task ids.
    ///
    /// # Errors
    /// Says why the command is refused; nothing has changed then.
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
            Command::PutSegment { id, spec, condition } => {
                self.put_segment(id, spec, &condition, to)?
            }
            Command::DeleteSegment { id, condition } => self.delete_segment(id, &condition, to)?,
            Command::MoveSegment { id, wish, condition } => {
                self.move_segment(id, &wish, &condition, to)?
            }
            Command::PutTenant { name, spec } => self.put_tenant(&name, spec, to)?,
            Command::DeleteTenant { name } => self.delete_tenant(&name, to)?,
            Command::MakeRoom { id, spec } => self.make_room(id, &spec, to),
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
        let (id, kind) = (self.last_event, kind.to_owned());
        // There is no clock here; whoever publishes the event adds its time.
        Event { id, kind, subject, detail, uptime_ms, time_unix_ms: 0 }
    }

    /// Notes that a node's intent has changed. Returns the new version.
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

    /// Raises the stored ceilings above all numbers that the rack has given.
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

    /// Returns intent and reservations as text: equal texts mean equal states. For tests.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        format!(
            "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            self.meta,
            self.nodes,
            self.clients,
            self.segments,
            self.runtime,
            self.on_node,
            self.tasks,
            self.tenants,
            self.claims,
            self.last_version,
            self.rack.snapshot()
        )
    }

    /// Returns everything stored, as it would be loaded again.
    #[must_use]
    pub fn records(&self) -> Records {
        Records {
            meta: self.meta,
            nodes: self.nodes.values().map(|node| node.record.clone()).collect(),
            clients: self.clients.values().map(|client| client.record.clone()).collect(),
            segments: self.segments.values().cloned().collect(),
            tenants: self.tenants.values().cloned().collect(),
            ..Records::default()
        }
    }
}
