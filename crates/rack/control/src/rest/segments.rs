//! Clients and segments over REST.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use farpool_api::{
    ClientAnswer, ClientId, ClientReport, ClientSpec, ClientView, MoveRequest, Problem,
    ProblemKind, Segment, SegmentId, SegmentList, SegmentSpec, SegmentState, Task,
};
use farpool_http::{Asked, Asker, Body, Name, Refusal, json};
use serde::Deserialize;
use utoipa::IntoParams;

use super::answers::{accepted, created, task_of};
use super::conditions::conditions;
use super::{Problems, Shared};
use crate::core::{Core, say_refused};
use crate::model::{ASK_AGAIN_MS, Command, Condition, Outcome, State as Model};

/// Refuses if a client is not the asker's.
fn may_see_client(state: &Model, asker: &Asker, id: ClientId) -> Result<(), Problem> {
    let checked = asker.tenant().map(|tenant| state.check_owns_client(tenant, id));
    checked.unwrap_or(Ok(())).inspect_err(say_refused)
}

/// Refuses if a segment is not the asker's.
fn may_see_segment(state: &Model, asker: &Asker, id: SegmentId) -> Result<(), Problem> {
    let checked = asker.tenant().map(|tenant| state.check_owns_segment(tenant, id));
    checked.unwrap_or(Ok(())).inspect_err(say_refused)
}

fn tagged(status: StatusCode, segment: &Segment) -> Response {
    let tag = [(header::ETAG, format!("\"{}\"", segment.revision))];
    (tag, json(status, segment)).into_response()
}

/// The header `If-Match`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Header)]
pub(super) struct IfMatch {
    /// Only if it is at one of these revisions; `*` for any.
    #[param(rename = "if-match", pattern = r#"^(\*|(W/)?"[!#-~]*"( *, *(W/)?"[!#-~]*")*)$"#)]
    _tags: Option<String>,
}

/// The header `If-None-Match`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Header)]
pub(super) struct IfNoneMatch {
    /// Only if it is at none of these revisions; `*`: only if it is not there.
    #[param(rename = "if-none-match", pattern = r#"^(\*|(W/)?"[!#-~]*"( *, *(W/)?"[!#-~]*")*)$"#)]
    _tags: Option<String>,
}

/// One client.
#[utoipa::path(get, path = "/v1/clients/{id}", tag = "clients",
    params(("id" = uuid::Uuid, Path, description = "The client")),
    responses((status = 200, description = "The client", body = ClientView), Problems))]
pub(super) async fn get_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
) -> Result<Response, Refusal> {
    let look = |state: &Model, _| may_see_client(state, &asker, id).and_then(|()| state.client(id));
    let client = app.core()?.read(look).await??;
    Ok(json(StatusCode::OK, &client))
}

/// Registers a client, or updates its registration.
#[utoipa::path(put, path = "/v1/clients/{id}", tag = "clients", request_body = ClientSpec,
    params(("id" = uuid::Uuid, Path, description = "The client")),
    responses((status = 200, description = "It was known", body = ClientView),
        (status = 201, description = "It is new", body = ClientView), Problems))]
pub(super) async fn put_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
    Body(mut spec): Body<ClientSpec>,
) -> Result<Response, Refusal> {
    let core = app.core()?;
    // What its certificate says need not be said again.
    spec.tenant = spec.tenant.or_else(|| asker.tenant().map(str::to_owned));
    let command = Command::PutClient { id, spec };
    let look = core
        .apply_of(&asker, command, |state, applied, _| Ok((applied.outcome, state.client(id)?)));
    let (outcome, client) = look.await?;
    Ok(json(created(outcome), &client))
}

/// Ends a client: all its segments are released.
#[utoipa::path(delete, path = "/v1/clients/{id}", tag = "clients",
    params(("id" = uuid::Uuid, Path, description = "The client")),
    responses((status = 204, description = "It is ended"), Problems))]
pub(super) async fn delete_client(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
) -> Result<StatusCode, Refusal> {
    app.core()?.apply_of(&asker, Command::DeleteClient { id }, |_, _, _| Ok(())).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A client's report, answered with all its segments.
#[utoipa::path(post, path = "/upcall/v1/clients/{id}/report", tag = "upcalls",
    request_body = ClientReport, params(("id" = uuid::Uuid, Path, description = "The client")),
    responses((status = 200, description = "Its segments", body = ClientAnswer), Problems))]
pub(super) async fn report(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<ClientId>,
    Body(report): Body<ClientReport>,
) -> Result<Response, Refusal> {
    let core = app.core()?;
    let known = report.known_version;
    let wait = app.wait(report.wait_ms);
    let command = Command::ClientReport { id, report };
    let look = |state: &Model, now_ms| {
        may_see_client(state, &asker, id).and_then(|()| state.client_answer(id, now_ms))
    };
    let mut answer = core.apply_of(&asker, command, |state, _, now_ms| look(state, now_ms)).await?;
    if answer.version == known && !wait.is_zero() {
        core.wait(wait, |state| state.client_version(id) != Some(known)).await?;
        // Its id may be another's by now.
        answer = core.read(look).await??;
    }
    Ok(json(StatusCode::OK, &answer))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// Most segments of the page, up to 1000.
    #[param(minimum = 1)]
    limit: Option<u32>,
    /// `next_page_token` of the previous page.
    #[param(format = Uuid)]
    page_token: Option<String>,
}

/// A page of segments, by id.
#[utoipa::path(get, path = "/v1/segments", tag = "segments", params(ListQuery),
    responses((status = 200, description = "The page", body = SegmentList), Problems))]
pub(super) async fn list(
    State(app): Shared,
    Asked(query): Asked<ListQuery>,
) -> Result<Response, Refusal> {
    let after = query.page_token.map(|token| token.parse::<SegmentId>()).transpose();
    let after =
        after.map_err(|_| Refusal::new(ProblemKind::BadRequest, "page_token was never given"))?;
    let core = app.core()?;
    let page = core.read(|state, now_ms| state.segment_page(after, query.limit, now_ms)).await?;
    Ok(json(StatusCode::OK, &page))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WaitQuery {
    /// Answer when the segment is in this state.
    wait_state: Option<SegmentState>,
    /// Answer after this time in ms in any case, 30,000 at most.
    wait_ms: Option<u64>,
}

/// One segment.
#[utoipa::path(get, path = "/v1/segments/{id}", tag = "segments",
    params(("id" = uuid::Uuid, Path, description = "The segment"), WaitQuery, IfMatch, IfNoneMatch),
    responses((status = 200, description = "The segment", body = Segment,
        headers(("etag" = String, description = "Its revision"))),
        (status = 304, description = "It is as one of the tags in If-None-Match"), Problems))]
pub(super) async fn get(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<SegmentId>,
    Asked(query): Asked<WaitQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let condition = conditions(&headers)?;
    let core = app.core()?;
    let look = |state: &Model, now_ms| {
        may_see_segment(state, &asker, id).and_then(|()| state.segment(id, now_ms))
    };
    if let Some(wanted) = query.wait_state {
        core.read(look).await??;
        let wait = app.wait(query.wait_ms.unwrap_or(0));
        let arrived =
            |state: &Model| state.segment(id, 0).map_or(true, |segment| segment.state == wanted);
        core.wait(wait, arrived).await?;
    }
    let segment = core.read(look).await??;
    let only = |condition: Condition| condition.admits(Some(segment.revision));
    if !only(Condition { if_none_match: None, ..condition.clone() }) {
        let detail = format!("segment {id} is at revision {}", segment.revision);
        return Err(Refusal::new(ProblemKind::PreconditionFailed, detail));
    }
    if !only(condition) {
        let tag = [(header::ETAG, format!("\"{}\"", segment.revision))];
        return Ok((StatusCode::NOT_MODIFIED, tag).into_response());
    }
    Ok(tagged(StatusCode::OK, &segment))
}

/// Creates a segment, or changes its size. Repeating the request gives the same answer.
#[utoipa::path(put, path = "/v1/segments/{id}", tag = "segments", request_body = SegmentSpec,
    params(("id" = uuid::Uuid, Path, description = "The segment, named by its creator"),
        IfMatch, IfNoneMatch),
    responses((status = 200, description = "It was there, and is of this size", body = Segment),
        (status = 201, description = "It is granted and stored", body = Segment), Problems))]
pub(super) async fn put(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<SegmentId>,
    headers: HeaderMap,
    Body(spec): Body<SegmentSpec>,
) -> Result<Response, Refusal> {
    let core = app.core()?;
    let wish = spec.clone();
    let command = Command::PutSegment { id, spec, condition: conditions(&headers)? };
    let look = core.apply_of(&asker, command, |state, applied, now_ms| {
        Ok((applied.outcome, state.segment(id, now_ms)?))
    });
    let (outcome, segment) = match look.await {
        Ok(done) => done,
        Err(refusal) => return Err(make_room(&core, &asker, refusal, id, wish).await.into()),
    };
    Ok(tagged(created(outcome), &segment))
}

/// Has others give memory up for a segment that found no room, if memory is what is short and they
/// have more than they were promised. Returns the refusal, which then says that asking again helps.
async fn make_room(
    core: &Core,
    asker: &Asker,
    mut refusal: Problem,
    id: SegmentId,
    spec: SegmentSpec,
) -> Problem {
    if !refusal.is(ProblemKind::NoRoom) || refusal.limit.is_some() {
        return refusal;
    }
    let command = Command::MakeRoom { id, spec };
    let made = core.apply_of(asker, command, |_, applied, _| Ok(applied.outcome)).await;
    if made == Ok(Outcome::Created) {
        refusal.detail.push_str("; others give up memory for it");
        refusal.retry_after_ms = Some(ASK_AGAIN_MS);
    }
    refusal
}

/// Releases a segment. Its memory is free when its node has let go of it.
#[utoipa::path(delete, path = "/v1/segments/{id}", tag = "segments",
    params(("id" = uuid::Uuid, Path, description = "The segment"),
        IfMatch, IfNoneMatch),
    responses((status = 202, description = "Its node must let go of it", body = Segment),
        (status = 204, description = "It is gone"), Problems))]
pub(super) async fn delete(
    State(app): Shared,
    asker: Asker,
    Name(id): Name<SegmentId>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let command = Command::DeleteSegment { id, condition: conditions(&headers)? };
    let core = app.core()?;
    let look =
        core.apply_of(&asker, command, |state, _, now_ms| Ok(state.segment(id, now_ms).ok()));
    let left = look.await?;
    Ok(match left {
        Some(segment) => tagged(StatusCode::ACCEPTED, &segment),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

/// Moves a segment to another brick.
#[utoipa::path(post, path = "/v1/segments/{id}/move", tag = "segments",
    request_body = MoveRequest,
    params(("id" = uuid::Uuid, Path, description = "The segment"),
        IfMatch, IfNoneMatch),
    responses((status = 202, description = "Begun", body = Task), Problems))]
pub(super) async fn move_away(
    State(app): Shared,
    Name(id): Name<SegmentId>,
    headers: HeaderMap,
    Body(wish): Body<MoveRequest>,
) -> Result<Response, Refusal> {
    let command = Command::MoveSegment { id, wish, condition: conditions(&headers)? };
    let task = app.core()?.apply(command, task_of).await?;
    Ok(accepted(&task))
}
