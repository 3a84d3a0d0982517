//! REST: routes, the token, and the OpenAPI document.

mod answers;
mod nodes;
mod rack;
mod segments;
mod stream;

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use farpool_api::{Problem, ProblemKind};
use farpool_http::{PROBLEM_TYPE, Refusal, bearer};
use farpool_kernel::{read_lock, write_lock};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi as Document, RefOr, Response as ResponseDoc};
use utoipa::{IntoResponses, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::core::Core;

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
    pub(crate) fn role(&self) -> Role {
        read_lock(&self.role).clone()
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
            ProblemKind::NotFound,
            ProblemKind::Conflict,
            ProblemKind::PreconditionFailed,
            ProblemKind::TooLarge,
            ProblemKind::UnsupportedMediaType,
            ProblemKind::Invalid,
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
        .routes(routes!(rack::circuits))
        .routes(routes!(rack::topology))
        .routes(routes!(stream::events))
        .routes(routes!(rack::tasks))
        .routes(routes!(rack::task))
        .routes(routes!(rack::openapi))
        .routes(routes!(rack::health))
        .routes(routes!(rack::metrics))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES));
    let upcalls = OpenApiRouter::new()
        .routes(routes!(nodes::report))
        .routes(routes!(segments::report))
        .layer(DefaultBodyLimit::max(REPORT_LIMIT_BYTES));
    OpenApiRouter::with_openapi(Doc::openapi()).merge(public).merge(upcalls)
}

/// The OpenAPI document.
#[must_use]
pub fn openapi() -> Document {
    let mut document = router().into_openapi();
    let components = document.components.get_or_insert_default();
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    components.security_schemes.insert("token".to_owned(), RefOr::T(SecurityScheme::Http(scheme)));
    // A controller on loopback may run without a token.
    let none = utoipa::openapi::SecurityRequirement::default();
    let token = utoipa::openapi::SecurityRequirement::new("token", Vec::<String>::new());
    document.security = Some(vec![none, token]);
    document
}

/// Returns the routes. If there is a token, they answer only requests that present it, and
/// `/healthz`.
pub(crate) fn service(app: Arc<App>, token: Option<&str>) -> Router {
    let (router, _) = router().split_for_parts();
    let router = router
        .fallback(|| async { Refusal::new(ProblemKind::NotFound, "there is no such path") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(ProblemKind::MethodNotAllowed, "the path does not have this method")
        });
    bearer::guard(router, token, "controller").with_state(app)
}
