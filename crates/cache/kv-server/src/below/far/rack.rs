//! The thread that talks to the pool. It may wait for answers indefinitely: no other thread waits
//! for it.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use farpool_api::tenant::{Tenant, Wish};
use farpool_api::{ApiError, Client, ClientId, ClientSpec, ProblemKind, SegmentId};

use super::news::News;
use super::plan::{Answer, Question};
use super::{FarError, PoolOptions};

/// A message to the thread.
#[derive(Debug)]
pub enum ToRack {
    Ask(Question),
    /// Give everything back, then answer [`News::Left`].
    Leave,
}

/// Why a request for memory failed.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Random(#[from] farpool_pool::PoolError),
}

/// This server as a tenant of the pool. Sends nothing yet.
pub fn tenant(options: &PoolOptions) -> Result<Tenant, FarError> {
    let client = Client::with(&options.controllers, &options.access)?;
    let id = ClientId::from_u128(farpool_pool::fresh_client()?.0);
    let node_name = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let spec = ClientSpec {
        host: options.host.clone().unwrap_or_else(node_name),
        name: "farpool kv".into(),
        pid: std::process::id(),
        lease_ms: farpool_api::DEFAULT_LEASE_MS,
        tenant: None,
    };
    Ok(Tenant::new(client, id, spec))
}

/// Puts questions to the pool, one after the other, until the sender is gone.
pub fn talk(
    mut tenant: Tenant,
    rate_bytes_per_s: Option<u64>,
    questions: &Receiver<ToRack>,
    answers: &Sender<News>,
) {
    while let Ok(question) = questions.recv() {
        let news = match question {
            ToRack::Ask(question) => News::Answer(answer(&mut tenant, rate_bytes_per_s, question)),
            ToRack::Leave => {
                // If the pool cannot be reached, it finds out when the lease expires.
                let _ = tenant.leave();
                News::Left
            }
        };
        if answers.send(news).is_err() {
            return;
        }
    }
}

fn answer(tenant: &mut Tenant, rate_bytes_per_s: Option<u64>, question: Question) -> Answer {
    let text = |error: ApiError| error.to_string();
    match question {
        Question::Join => Answer::Joined(tenant.join().map_err(text)),
        Question::Report { uses, wait } => Answer::Heard(tenant.report(uses, wait).map_err(text)),
        Question::Ask { bytes, avoid } => {
            // A cache is of use with whatever there is now.
            let wish = Wish { bytes, rate_bytes_per_s, avoid: &avoid, ..Wish::default() };
            let fresh_id =
                || Ok::<_, AskError>(SegmentId::from_u128(farpool_pool::fresh_client()?.0));
            let granted = tenant.ask(wish, fresh_id).map(|it| it.place.bytes);
            Answer::Granted(granted.map_err(|error| error.to_string()))
        }
        Question::Release(id) => Answer::Released(match tenant.release(id) {
            Ok(_) => Ok(true),
            // A collaborating node takes nothing back before it wants to; an unknown segment counts
            // as released.
            Err(error) if is_final(&error) => Ok(false),
            Err(error) => Err(error.to_string()),
        }),
    }
}

/// Whether asking again would change nothing.
fn is_final(error: &ApiError) -> bool {
    error.is(ProblemKind::NotFound) || error.is(ProblemKind::MethodNotAllowed)
}

/// How long the server's shutdown waits for the pool to be told.
pub const LEAVE_WAIT: Duration = Duration::from_secs(3);
