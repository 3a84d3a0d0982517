//! Nodes over REST.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use farpool_api::{Node, NodeAnswer, NodeList, NodeReport, NodeSpec, Task};
use farpool_http::{Body, Name, Refusal, json};

use super::answers::{accepted, created, task_of};
use super::{Problems, Shared};
use crate::model::{Command, State as Model};

/// All nodes, by name.
#[utoipa::path(get, path = "/v1/nodes", tag = "nodes",
    responses((status = 200, description = "All nodes", body = NodeList), Problems))]
pub(super) async fn list(State(app): Shared) -> Result<Response, Refusal> {
    let list = app.core()?.read(|state, now_ms| state.node_list(now_ms)).await?;
    Ok(json(StatusCode::OK, &list))
}

/// One node.
#[utoipa::path(get, path = "/v1/nodes/{name}", tag = "nodes",
    params(("name" = String, Path, description = "The node")),
    responses((status = 200, description = "The node", body = Node), Problems))]
pub(super) async fn get(State(app): Shared, Name(name): Name<String>) -> Result<Response, Refusal> {
    let node = app.core()?.read(|state, now_ms| state.node(&name, now_ms)).await??;
    Ok(json(StatusCode::OK, &node))
}

/// Registers a node, or updates its registration.
#[utoipa::path(put, path = "/v1/nodes/{name}", tag = "nodes", request_body = NodeSpec,
    params(("name" = String, Path, description = "The node")),
    responses((status = 200, description = "It was known", body = Node),
        (status = 201, description = "It is new", body = Node), Problems))]
pub(super) async fn put(
    State(app): Shared,
    Name(name): Name<String>,
    Body(spec): Body<NodeSpec>,
) -> Result<Response, Refusal> {
    let command = Command::PutNode { name: name.clone(), spec };
    let core = app.core()?;
    let (outcome, node) = core
        .apply(command, |state, applied, now_ms| Ok((applied.outcome, state.node(&name, now_ms)?)))
        .await?;
    Ok(json(created(outcome), &node))
}

/// Forgets a node that has no segments.
#[utoipa::path(delete, path = "/v1/nodes/{name}", tag = "nodes",
    params(("name" = String, Path, description = "The node")),
    responses((status = 204, description = "It is forgotten"), Problems))]
pub(super) async fn delete(
    State(app): Shared,
    Name(name): Name<String>,
) -> Result<StatusCode, Refusal> {
    app.core()?.apply(Command::DeleteNode { name }, |_, _, _| Ok(())).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Empties a node: what can be moved is moved, nothing new is placed on it.
#[utoipa::path(post, path = "/v1/nodes/{name}/drain", tag = "nodes",
    params(("name" = String, Path, description = "The node")),
    responses((status = 202, description = "Begun", body = Task), Problems))]
pub(super) async fn drain(
    State(app): Shared,
    Name(name): Name<String>,
) -> Result<Response, Refusal> {
    let command = Command::Drain { name, draining: true };
    let task = app.core()?.apply(command, task_of).await?;
    Ok(accepted(&task))
}

/// Lets a node be used again.
#[utoipa::path(delete, path = "/v1/nodes/{name}/drain", tag = "nodes",
    params(("name" = String, Path, description = "The node")),
    responses((status = 200, description = "The node", body = Node), Problems))]
pub(super) async fn undrain(
    State(app): Shared,
    Name(name): Name<String>,
) -> Result<Response, Refusal> {
    let command = Command::Drain { name: name.clone(), draining: false };
    let core = app.core()?;
    let node = core.apply(command, |state, _, now_ms| state.node(&name, now_ms)).await?;
    Ok(json(StatusCode::OK, &node))
}

/// A node's report, answered with all grants that the node should have.
#[utoipa::path(post, path = "/upcall/v1/nodes/{name}/report", tag = "upcalls",
    request_body = NodeReport, params(("name" = String, Path, description = "The node")),
    responses((status = 200, description = "What shall stand", body = NodeAnswer), Problems))]
pub(super) async fn report(
    State(app): Shared,
    Name(name): Name<String>,
    Body(report): Body<NodeReport>,
) -> Result<Response, Refusal> {
    let core = app.core()?;
    let known = report.known_version;
    let wait = app.wait(report.wait_ms);
    let (incarnation, blade_id) = (report.incarnation, report.blade_id);
    let command = Command::NodeReport { name: name.clone(), report };
    let look = |state: &Model| state.node_answer(&name, incarnation, blade_id);
    let mut answer = core.apply(command, |state, _, _| look(state)).await?;
    if answer.version == known && !wait.is_zero() {
        core.wait(wait, |state| state.node_version(&name) != Some(known)).await?;
        // Another daemon may have registered meanwhile: its answer is not for this one.
        answer = core.read(|state, _| look(state)).await??;
    }
    Ok(json(StatusCode::OK, &answer))
}
