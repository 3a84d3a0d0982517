//! REST: routes, who may ask them, and the OpenAPI document.

mod answers;
mod conditions;
mod document;
mod nodes;
mod rack;
mod segments;
mod stream;
mod tenants;

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use farpool_api::{Problem, ProblemKind};
use farpool_http::{PROBLEM_TYPE, Protection, Refusal};
use farpool_kernel::{read_lock, write_lock};
use utoipa::openapi::{ContentBuilder, RefOr, Response as ResponseDoc};
use utoipa::{IntoResponses, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::core::Core;

pub use document::openapi;

/// Largest body of a request from people and clients, in bytes; a larger one is refused with 413.
pub const BODY_LIMIT_BYTES: usize = 1 << 20;
/// Largest body of a report, in bytes: 100,000 grants of about 120 bytes each.
pub const REPORT_LIMIT_BYTES: usize = 16 << 20;

/// Whether this controller leads; only a leader answers most requests.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    Standby { leader: Option<String> },
    Leading(Arc<Core>),
}

/// What all handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub role: RwLock<Role>,
    /// Longest time that an answer waits for a change.
    pub wait_limit: Duration,
    /// The OpenAPI document as JSON.
    pub document: String,
}

pub(crate) type Shared = State<Arc<App>>;

impl App {
    /// Returns the role at this moment: a leader whose time is over, for example because it was
    /// stopped meanwhile, is none, though it has not noticed yet.
    pub(crate) fn role(&self) -> Role {
        match read_lock(&self.role).clone() {
            Role::Leading(core) if !core.leads() => Role::Standby { leader: None },
            role => role,
        }
    }

    pub(crate) fn set_role(&self, role: Role) {
        *write_lock(&self.role) = role;
    }

    /// Returns the time that an answer may wait: what was requested, up to the limit.
    pub(crate) fn wait(&self, wait_ms: u64) -> Duration {
        Duration::from_millis(wait_ms).min(self.wait_limit)
    }

    /// Returns the leading core. Errors if this controller does not lead.
    pub(crate) fn core(&self) -> Result<Arc<Core>, Refusal> {
        match self.role() {
            Role::Leading(core) => Ok(core),
            Role::Standby { leader } => {
                let detail = match &leader {
                    Some(leader) => format!("the controller at {leader} leads"),
                    None => "no controller leads yet".to_owned(),
                };
                let problem = Problem::new(ProblemKind::NotLeader, detail);
                let leader = leader.map(String::into_boxed_str);
                Err(Refusal(Problem { leader, ..problem }))
            }
        }
    }
}

#[derive(OpenApi)]
#[openapi(info(
    title = "Farpool controller",
    description = "Who gets which far memory of the rack, over which path, at which rate.",
    license(name = "Apache-2.0", identifier = "Apache-2.0")
))]
struct Doc;

/// The refusals that every operation may answer with.
pub(crate) struct Problems;

impl IntoResponses for Problems {
    fn responses() -> BTreeMap<String, RefOr<ResponseDoc>> {
        let kinds = [
            ProblemKind::BadRequest,
            ProblemKind::Unauthorized,
            ProblemKind::Forbidden,
            ProblemKind::NotFound,
            ProblemKind::RequestTimeout,
            ProblemKind::Conflict,
            ProblemKind::PreconditionFailed,
            ProblemKind::TooLarge,
            ProblemKind::UriTooLong,
            ProblemKind::UnsupportedMediaType,
            ProblemKind::Misdirected,
            ProblemKind::Invalid,
            ProblemKind::HeadTooLarge,
            ProblemKind::NotLeader,
        ];
        let schema = utoipa::openapi::Ref::from_schema_name("Problem");
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let response = |kind: ProblemKind| {
            let title = Problem::new(kind, "").title.into_string();
            let mut response = ResponseDoc::new(title);
            response.content.insert(PROBLEM_TYPE.to_owned(), RefOr::T(content.clone()));
            (kind.status().to_string(), RefOr::T(response))
        };
        kinds.into_iter().map(response).collect()
    }
}

fn router() -> OpenApiRouter<Arc<App>> {
    let public = OpenApiRouter::new()
        .routes(routes!(nodes::list))
        .routes(routes!(nodes::get, nodes::put, nodes::delete))
        .routes(routes!(nodes::drain, nodes::undrain))
        .routes(routes!(segments::get_client, segments::put_client, segments::delete_client))
        .routes(routes!(segments::list))
        .routes(routes!(segments::get, segments::put, segments::delete))
        .routes(routes!(segments::move_away))
        .routes(routes!(tenants::list))
        .routes(routes!(tenants::get, tenants::put, tenants::delete))
        .routes(routes!(rack::circuits))
        .routes(routes!(rack::topology))
        .routes(routes!(stream::events))
        .routes(routes!(rack::tasks))
        .routes(routes!(rack::task))
        .routes(routes!(rack::openapi))
        .routes(routes!(rack::backup))
        .routes(routes!(rack::health))
        .routes(routes!(rack::metrics))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES));
    let upcalls = OpenApiRouter::new()
        .routes(routes!(nodes::report))
        .routes(routes!(segments::report))
        .layer(DefaultBodyLimit::max(REPORT_LIMIT_BYTES));
    OpenApiRouter::with_openapi(Doc::openapi()).merge(public).merge(upcalls)
}

/// Refuses a query where none is taken: a misspelled or misplaced parameter must not pass silently.
/// Whoever probes health or scrapes metrics may add some, against caches.
async fn check_query(request: Request, next: Next) -> Response {
    let takes = match request.uri().path() {
        "/v1/segments" | "/v1/events" | "/healthz" | "/metrics" => true,
        path => {
            let segment = path.strip_prefix("/v1/segments/");
            request.method() == Method::GET && segment.is_some_and(|id| !id.contains('/'))
        }
    };
    match request.uri().query() {
        Some(query) if !takes && !query.is_empty() => {
            Refusal::new(ProblemKind::BadRequest, "this request takes no query").into_response()
        }
        _ => next.run(request).await,
    }
}

/// Returns the routes, protected. With a token they answer only requests that present it, and
/// `/healthz`; with certificates, what the role of each may ask. `names` are hosts by which this
/// controller is known besides its addresses.
pub(crate) fn service(app: Arc<App>, protection: &Protection, names: &[String]) -> Router {
    let (router, _) = router().split_for_parts();
    let router = router
        .fallback(|| async { Refusal::new(ProblemKind::NotFound, "there is no such path") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(ProblemKind::MethodNotAllowed, "the path does not have this method")
        });
    let router = router.layer(from_fn(check_query));
    protection.guard(router, "controller", names).with_state(app)
}
