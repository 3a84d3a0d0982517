//! Requests from programs of this node.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use farpool_api::{
    ClientId, ClientReport, ClientSpec, Place, ProblemKind, Segment, SegmentId, SegmentSpec,
    SegmentState, WAIT_LIMIT_MS,
};
use farpool_http::{Asker, Body, Name, Refusal, json};
use tokio::time::{Instant, timeout_at};

use super::Shared;
use crate::core::{Core, State as Node};
use crate::ledger::LedgerError;

/// Most failure domains that a wish may name; they have no effect here.
const AVOID_LIMIT: usize = 64;

impl From<LedgerError> for Refusal {
    fn from(error: LedgerError) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}

fn created(is_new: bool) -> StatusCode {
    if is_new { StatusCode::CREATED } else { StatusCode::OK }
}

/// Refuses a program of a tenant that registers as another's.
fn check_speaks_for(tenant: Option<&str>, spec: &ClientSpec) -> Result<(), LedgerError> {
    match (tenant, spec.tenant.as_deref()) {
        (Some(own), Some(named)) if own != named => {
            let what = format!("tenant {named}");
            Err(LedgerError::Foreign { tenant: own.to_owned(), what })
        }
        _ => Ok(()),
    }
}

/// Refuses a program if the node is ending.
fn check_stays(node: &Node) -> Result<(), Refusal> {
    if node.is_ending {
        return Err(Refusal::new(ProblemKind::Ending, "this node is ending"));
    }
    Ok(())
}

pub(super) async fn get_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
) -> Result<Response, Refusal> {
    let client = app.core.read(|node, _| {
        node.ledger.check_owns(asker.tenant(), id)?;
        node.ledger.client(id)
    })?;
    Ok(json(StatusCode::OK, &client))
}

pub(super) async fn put_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
    Body(mut spec): Body<ClientSpec>,
) -> Result<Response, Refusal> {
    // What its certificate says need not be said again.
    spec.tenant = spec.tenant.or_else(|| asker.tenant().map(str::to_owned));
    let (is_new, client) = app.core.with(|node, now| {
        check_stays(node)?;
        node.ledger.check_owns(asker.tenant(), id)?;
        check_speaks_for(asker.tenant(), &spec)?;
        let about = format!("{} (process {})", spec.name, spec.pid);
        let is_new = node.ledger.put_client(id, spec, now)?;
        if is_new {
            tracing::info!(client = %id, about, "a program uses this node's far memory");
            node.tell("client-created", id, about);
        }
        Ok::<_, Refusal>((is_new, node.ledger.client(id)?))
    })?;
    Ok(json(created(is_new), &client))
}

pub(super) async fn delete_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
) -> Result<StatusCode, Refusal> {
    app.core.with(|node, _| {
        node.ledger.check_owns(asker.tenant(), id)?;
        if node.ledger.end_client(id) {
            tracing::info!(client = %id, "a program has ended");
            node.tell("client-deleted", id, String::new());
        }
        Ok::<_, Refusal>(())
    })?;
    // A repeated request has no further effect.
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn put_segment(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<SegmentId>,
    Body(spec): Body<SegmentSpec>,
) -> Result<Response, Refusal> {
    if spec.avoid.len() > AVOID_LIMIT {
        let detail = format!("at most {AVOID_LIMIT} failure domains can be avoided");
        return Err(Refusal::new(ProblemKind::Invalid, detail));
    }
    let (wished, host) = app.core.with(|node, now| {
        check_stays(node)?;
        if let Some(client) = spec.client {
            node.ledger.check_owns(asker.tenant(), client)?;
        }
        let wished = node.ledger.wish(id, &spec, now)?;
        if wished.is_new {
            tracing::info!(client = %wished.client, bytes = wished.bytes, "memory wanted");
        }
        Ok::<_, Refusal>((wished, node.ledger.client(wished.client)?.host))
    })?;
    // A wish has no place yet; its result is in the answers to reports.
    let segment = Segment {
        id,
        client: Some(wished.client),
        host,
        state: SegmentState::Pending,
        epoch: 0,
        revision: 1,
        spec: Some(spec.clone()),
        place: Place {
            node: app.core.here.node.clone(),
            domain: None,
            addresses: Vec::new(),
            key: None,
            bytes: wished.bytes,
            read_bytes_per_s: spec.read_bytes_per_s,
            write_bytes_per_s: spec.write_bytes_per_s,
        },
        target: None,
        waits_for: Vec::new(),
        used_bytes: None,
        deadline_ms: None,
    };
    Ok(json(created(wished.is_new), &segment))
}

pub(super) async fn report(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
    Body(report): Body<ClientReport>,
) -> Result<Response, Refusal> {
    let core = &app.core;
    let lease_ms = core.with(|node, now| {
        node.ledger.check_owns(asker.tenant(), id)?;
        node.ledger.report(id, &report, now)?;
        Ok::<_, Refusal>(node.ledger.client(id)?.lease_ms)
    })?;
    // A program that waits must not seem silent meanwhile.
    let wait_ms = report.wait_ms.min(WAIT_LIMIT_MS).min(lease_ms / 2);
    wait_for_news(core, id, report.known_version, Duration::from_millis(wait_ms)).await;
    let answer = core.read(|node, now| {
        // Its id may be another's by now.
        node.ledger.check_owns(asker.tenant(), id)?;
        node.ledger.answer(id, &core.here, now)
    })?;
    Ok(json(StatusCode::OK, &answer))
}

async fn wait_for_news(core: &Core, id: ClientId, known: u64, wait: Duration) {
    let until = Instant::now() + wait;
    let mut changes = core.changes();
    loop {
        changes.mark_unchanged();
        if core.read(|node, _| node.ledger.version(id)) != Some(known) {
            return;
        }
        match timeout_at(until, changes.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}
