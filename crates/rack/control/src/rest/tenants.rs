//! Tenants over REST.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use farpool_api::{Tenant, TenantList, TenantSpec};
use farpool_http::{Body, Name, Refusal, json};

use super::answers::created;
use super::{Problems, Shared};
use crate::model::Command;

/// All tenants that have a promise or segments, by name.
#[utoipa::path(get, path = "/v1/tenants", tag = "tenants",
    responses((status = 200, description = "All tenants", body = TenantList), Problems))]
pub(super) async fn list(State(app): Shared) -> Result<Response, Refusal> {
    let list = app.core()?.read(|state, _| state.tenant_list()).await?;
    Ok(json(StatusCode::OK, &list))
}

/// One tenant.
#[utoipa::path(get, path = "/v1/tenants/{name}", tag = "tenants",
    params(("name" = String, Path, description = "The tenant")),
    responses((status = 200, description = "The tenant", body = Tenant), Problems))]
pub(super) async fn get(State(app): Shared, Name(name): Name<String>) -> Result<Response, Refusal> {
    let tenant = app.core()?.read(|state, _| state.tenant(&name)).await??;
    Ok(json(StatusCode::OK, &tenant))
}

/// Sets what a tenant is promised and allowed.
#[utoipa::path(put, path = "/v1/tenants/{name}", tag = "tenants", request_body = TenantSpec,
    params(("name" = String, Path, description = "The tenant")),
    responses((status = 200, description = "It had a promise", body = Tenant),
        (status = 201, description = "It is new", body = Tenant), Problems))]
pub(super) async fn put(
    State(app): Shared,
    Name(name): Name<String>,
    Body(spec): Body<TenantSpec>,
) -> Result<Response, Refusal> {
    let command = Command::PutTenant { name: name.clone(), spec };
    let core = app.core()?;
    let look = core.apply(command, |state, applied, _| Ok((applied.outcome, state.tenant(&name)?)));
    let (outcome, tenant) = look.await?;
    Ok(json(created(outcome), &tenant))
}

/// Forgets what a tenant is promised and allowed; its segments stay.
#[utoipa::path(delete, path = "/v1/tenants/{name}", tag = "tenants",
    params(("name" = String, Path, description = "The tenant")),
    responses((status = 204, description = "It is forgotten"), Problems))]
pub(super) async fn delete(
    State(app): Shared,
    Name(name): Name<String>,
) -> Result<StatusCode, Refusal> {
    app.core()?.apply(Command::DeleteTenant { name }, |_, _, _| Ok(())).await?;
    Ok(StatusCode::NO_CONTENT)
}
