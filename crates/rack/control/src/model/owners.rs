//! Whose a client or a segment is: a program speaks only for its tenant. Pure.
//!
//! What is not there is nobody's, and passes: the operation itself says that it is not there.

use farpool_api::{ClientId, DEFAULT_TENANT, Problem, ProblemKind, SegmentId, SegmentSpec};

use super::{Command, State, refuse};

fn foreign(tenant: &str, what: impl std::fmt::Display) -> Problem {
    let detail = format!("a program of tenant {tenant} may not ask about {what}: it is another's");
    Problem::new(ProblemKind::Forbidden, detail)
}

impl State {
    /// Refuses a command in which a program of `tenant` speaks for others.
    ///
    /// # Errors
    /// [`ProblemKind::Forbidden`], with what it spoke for.
    pub fn check_owns(&self, tenant: &str, command: &Command) -> Result<(), Problem> {
        match command {
            Command::PutClient { id, spec } => {
                let named = spec.tenant.as_deref().unwrap_or(DEFAULT_TENANT);
                if named != tenant {
                    return Err(foreign(tenant, format_args!("tenant {named}")));
                }
                self.check_owns_client(tenant, *id)
            }
            Command::DeleteClient { id } | Command::ClientReport { id, .. } => {
                self.check_owns_client(tenant, *id)
            }
            Command::PutSegment { id, spec, .. } | Command::MakeRoom { id, spec } => {
                self.check_owns_segment(tenant, *id)?;
                self.check_owns_spec(tenant, spec)
            }
            Command::DeleteSegment { id, .. } => self.check_owns_segment(tenant, *id),
            _ => Err(foreign(tenant, "the rack")),
        }
    }

    /// Refuses if a client is another tenant's.
    ///
    /// # Errors
    /// [`ProblemKind::Forbidden`].
    pub fn check_owns_client(&self, tenant: &str, id: ClientId) -> Result<(), Problem> {
        match self.clients.get(&id) {
            Some(_) if self.tenant_of(Some(id)) != tenant => {
                Err(foreign(tenant, format_args!("client {id}")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses if a segment is another tenant's, or a host's. Once its client is gone nobody may
    /// ask about it.
    ///
    /// # Errors
    /// [`ProblemKind::Forbidden`], or [`ProblemKind::NotFound`].
    pub fn check_owns_segment(&self, tenant: &str, id: SegmentId) -> Result<(), Problem> {
        let Some(segment) = self.segments.get(&id) else { return Ok(()) };
        match segment.spec.client {
            Some(client) if !self.clients.contains_key(&client) => {
                refuse(ProblemKind::NotFound, format!("there is no segment {id} of a client"))
            }
            Some(client) if self.tenant_of(Some(client)) == tenant => Ok(()),
            _ => Err(foreign(tenant, format_args!("segment {id}"))),
        }
    }

    fn check_owns_spec(&self, tenant: &str, spec: &SegmentSpec) -> Result<(), Problem> {
        match (spec.client, &spec.host) {
            (Some(client), _) => self.check_owns_client(tenant, client),
            (None, Some(host)) => Err(foreign(tenant, format_args!("a segment of host {host}"))),
            // The operation refuses it.
            (None, None) => Ok(()),
        }
    }
}
