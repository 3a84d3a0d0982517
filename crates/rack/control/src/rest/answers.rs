//! Answers that nodes and segments have in common.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use farpool_api::Task;
use farpool_http::json;

use crate::model::Outcome;

/// Returns the task that a command began.
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

/// Returns 202 with a task and its path.
pub(super) fn accepted(task: &Task) -> Response {
    let place = [("location", format!("/v1/tasks/{}", task.id))];
    (place, json(StatusCode::ACCEPTED, task)).into_response()
}

/// Returns the status for the outcome of a create.
pub(super) fn created(outcome: Outcome) -> StatusCode {
    match outcome {
        Outcome::Created => StatusCode::CREATED,
        _ => StatusCode::OK,
    }
}
