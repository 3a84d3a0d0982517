//! The rack, tasks and the controller itself over REST.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use farpool_api::{CircuitList, Health, Problem, Task, TaskId, TaskList, Topology};
use farpool_http::{Name, Refusal, json};

use super::{Problems, Role, Shared};

/// All circuits that should be up.
#[utoipa::path(get, path = "/v1/circuits", tag = "rack",
    responses((status = 200, description = "All circuits", body = CircuitList), Problems))]
pub(super) async fn circuits(State(app): Shared) -> Result<Response, Refusal> {
    let list = app.core()?.read(|state, _| state.circuit_list()).await?;
    Ok(json(StatusCode::OK, &list))
}

/// The rack's graph: as JSON, as a drawing (text/plain) or as a topology file (application/toml).
#[utoipa::path(get, path = "/v1/topology", tag = "rack",
    responses((status = 200, description = "The graph", content(
        (Topology = "application/json"), (String = "text/plain"), (String = "application/toml"))),
        Problems))]
pub(super) async fn topology(State(app): Shared, headers: HeaderMap) -> Result<Response, Refusal> {
    let core = app.core()?;
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let kinds = accept.unwrap_or_default().split(',');
    let kinds = kinds.map(|kind| kind.split(';').next().unwrap_or_default().trim());
    let known = |kind: &&str| ["application/toml", "text/plain", "application/json"].contains(kind);
    match kinds.into_iter().find(known) {
        Some("application/toml") => {
            let text = core.read(|state, _| state.topology_toml()).await?;
            Ok(([(header::CONTENT_TYPE, "application/toml")], text).into_response())
        }
        Some("text/plain") => {
            let text = core.read(|state, _| state.topology_drawing()).await?;
            Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
        }
        _ => {
            let graph = core.read(|state, _| state.topology()).await?;
            Ok(json(StatusCode::OK, &graph))
        }
    }
}

/// All tasks that are remembered.
#[utoipa::path(get, path = "/v1/tasks", tag = "tasks",
    responses((status = 200, description = "All tasks", body = TaskList), Problems))]
pub(super) async fn tasks(State(app): Shared) -> Result<Response, Refusal> {
    let list = app.core()?.read(|state, _| state.task_list()).await?;
    Ok(json(StatusCode::OK, &list))
}

/// One task.
#[utoipa::path(get, path = "/v1/tasks/{id}", tag = "tasks",
    params(("id" = uuid::Uuid, Path, description = "The task")),
    responses((status = 200, description = "The task", body = Task), Problems))]
pub(super) async fn task(State(app): Shared, Name(id): Name<TaskId>) -> Result<Response, Refusal> {
    let task = app.core()?.read(|state, _| state.task(id)).await??;
    Ok(json(StatusCode::OK, &task))
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "controller",
    responses((status = 200, description = "The OpenAPI document", body = serde_json::Value,
        content_type = "application/json"), Problems))]
pub(super) async fn openapi(State(app): Shared) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], app.document.clone()).into_response()
}

/// A backup of everything that is stored, keys of grants included: lines of JSON for
/// `farpool control restore`.
#[utoipa::path(get, path = "/v1/backup", tag = "controller",
    responses((status = 200, description = "The backup", body = String,
        content_type = "application/jsonl"), Problems))]
pub(super) async fn backup(State(app): Shared) -> Result<Response, Refusal> {
    let text = app.core()?.backup().await?;
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], text).into_response())
}

/// The controller's health; needs no token. A standby is healthy, too.
#[utoipa::path(get, path = "/healthz", tag = "controller",
    responses((status = 200, description = "It runs", body = Health),
        (status = 503, description = "It does not", body = Problem,
            content_type = "application/problem+json")))]
pub(super) async fn health(State(app): Shared) -> Response {
    let (leader, leader_address) = match app.role() {
        Role::Leading(_) => (true, None),
        Role::Standby { leader } => (false, leader),
    };
    let version = env!("CARGO_PKG_VERSION").to_owned();
    json(StatusCode::OK, &Health { leader, leader_address, version })
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "controller",
    responses((status = 200, description = "OpenMetrics text", body = String,
        content_type = "application/openmetrics-text"), Problems))]
pub(super) async fn metrics(State(app): Shared) -> Response {
    let core = app.core().ok();
    farpool_http::metrics::answer(&crate::metrics::registry(core.as_deref()))
}
