//! Answers that nodes and segments have in common.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use farpool_api::Task;
use farpool_http::json;

use crate::model::Outcome;

/// The task that a command began.
pub(super) fn task_of(
    state: &crate::model::State,
    applied: &crate::model::Applied,
    _now_ms: u64,
) -> Result<Task, farpool_api::Problem> {
    match applied.outcome {
        Outcome::Task(id) => state.task(id),
        _ => Err(farpool_api::Problem::new(
            farpool_api::ProblemKind::Conflict,
            "there is nothing to do",
        )),
    }
}

/// 202 with a task and where to look for it.
pub(super) fn accepted(task: &Task) -> Response {
    let place = [("location", format!("/v1/tasks/{}", task.id))];
    (place, json(StatusCode::ACCEPTED, task)).into_response()
}

/// The status for what a create did.
pub(super) fn created(outcome: Outcome) -> StatusCode {
    match outcome {
        Outcome::Created => StatusCode::CREATED,
        _ => StatusCode::OK,
    }
}
