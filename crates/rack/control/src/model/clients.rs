//! Clients: registration, reports, leases.

use std::collections::BTreeSet;

use farpool_api::{ClientId, ClientReport, ClientSpec, Problem, ProblemKind, SegmentId};
use farpool_placement::{ComputeId, Vertex};
use farpool_units::is_unprintable;

use super::nodes::check_name;
use super::record::{ClientRecord, Record};
use super::{CLIENTS_LIMIT, Changes, Client, Outcome, State, refuse};

/// Shortest lease, in ms: with a shorter one, a report that a pause of the scheduler delays would
/// cost a program its memory.
pub(super) const LEASE_LEAST_MS: u64 = 1_000;
/// Longest lease, in ms: a longer one would keep the memory of dead programs for too long.
pub(super) const LEASE_LIMIT_MS: u64 = 3_600_000;
/// Longest name of a client, in characters; a longer one is refused.
const NAME_LIMIT_CHARACTERS: usize = 256;

impl State {
    pub(super) fn compute_named(&self, host: &str) -> Result<ComputeId, Problem> {
        match self.rack.graph().vertex(host) {
            Some(Vertex::Compute(id)) => Ok(id),
            _ => refuse(ProblemKind::NotFound, format!("there is no compute brick named {host:?}")),
        }
    }

    pub(super) fn put_client(
        &mut self,
        id: ClientId,
        spec: ClientSpec,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        if !(LEASE_LEAST_MS..=LEASE_LIMIT_MS).contains(&spec.lease_ms) {
            let detail = format!("a lease is {LEASE_LEAST_MS} to {LEASE_LIMIT_MS} ms long");
            return refuse(ProblemKind::Invalid, detail);
        }
        if spec.name.chars().count() > NAME_LIMIT_CHARACTERS {
            let detail = format!("a client's name is {NAME_LIMIT_CHARACTERS} characters at most");
            return refuse(ProblemKind::Invalid, detail);
        }
        if spec.name.is_empty() || spec.name.chars().any(is_unprintable) {
            let detail = "a client's name has at least one character, and none that moves a cursor";
            return refuse(ProblemKind::Invalid, detail);
        }
        if let Some(tenant) = &spec.tenant {
            check_name(tenant, "tenant")?;
        }
        self.compute_named(&spec.host)?;
        if let Some(client) = self.clients.get_mut(&id) {
            if client.record.spec.host != spec.host {
                let detail = format!("client {id} runs on {}", client.record.spec.host);
                return refuse(ProblemKind::Conflict, detail);
            }
            client.heard_ms = to.now_ms;
            if client.record.spec != spec {
                client.record.spec = spec;
                to.ops.push(client.record.put());
            }
            return Ok(Outcome::Done);
        }
        if self.clients.len() >= CLIENTS_LIMIT {
            let detail = format!("there are {CLIENTS_LIMIT} clients already");
            return refuse(ProblemKind::NoRoom, detail);
        }
        let record = ClientRecord { id, spec };
        to.put(&record);
        to.event("client-joined", id, format!("{} on {}", record.spec.name, record.spec.host));
        self.last_version += 1;
        let client = Client {
            record,
            heard_ms: to.now_ms,
            sequence: None,
            version: self.last_version,
            segments: BTreeSet::new(),
        };
        self.clients.insert(id, client);
        Ok(Outcome::Created)
    }

    pub(super) fn delete_client(
        &mut self,
        id: ClientId,
        why: &str,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let Some(client) = self.clients.remove(&id) else {
            return refuse(ProblemKind::NotFound, format!("there is no client {id}"));
        };
        to.ops.push(client.record.delete());
        to.event("client-left", id, why);
        for segment in client.segments {
            self.release(segment, to);
        }
        Ok(Outcome::Done)
    }

    pub(super) fn client_report(
        &mut self,
        id: ClientId,
        report: &ClientReport,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let Some(client) = self.clients.get_mut(&id) else {
            return refuse(ProblemKind::NotFound, format!("there is no client {id}"));
        };
        if client.sequence.is_some_and(|last| report.sequence <= last) {
            return Ok(Outcome::Done);
        }
        client.sequence = Some(report.sequence);
        client.heard_ms = to.now_ms;
        let own: Vec<_> =
            report.segments.iter().filter(|used| client.segments.contains(&used.id)).collect();
        for used in own {
            self.note_use(used.id, used.used_bytes);
            if used.evacuated {
                self.note_evacuated(used.id, used.epoch, to);
            }
        }
        Ok(Outcome::Done)
    }

    fn note_use(&mut self, id: SegmentId, used_bytes: u64) {
        let granted = self.segments.get(&id).map_or(0, |segment| segment.current.bytes());
        if let Some(runtime) = self.runtime.get_mut(&id) {
            runtime.used_bytes = Some(used_bytes.min(granted));
        }
    }
}
