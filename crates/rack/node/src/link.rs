//! The state of the contact with the controller: what an error means, when to try again, and which
//! trouble has been logged already. Pure.

use std::time::Duration;

use farpool_api::{ApiError, ProblemKind};

/// First pause after the controller did not answer.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Longest pause: well under the 5 s after which a node without reports counts as late, so that a
/// controller that is back receives every node's report in time.
const BACKOFF_LIMIT: Duration = Duration::from_secs(2);

/// What an error of the controller means to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It is unreachable or does not lead: try again.
    Lost,
    /// It does not know this node: register.
    Unknown,
    /// Another daemon has registered under this name.
    Superseded,
    /// The token is missing or wrong.
    Unauthorized,
    /// It understood the request and refuses it.
    Refused,
}

/// Returns what this error means.
pub(crate) fn verdict(error: &ApiError) -> Verdict {
    let ApiError::Problem(problem) = error else { return Verdict::Lost };
    match problem.status {
        401 => Verdict::Unauthorized,
        _ if problem.is(ProblemKind::NotFound) => Verdict::Unknown,
        _ if problem.is(ProblemKind::NameInUse) => Verdict::Superseded,
        // Controllers before 0.3 said so.
        _ if problem.is(ProblemKind::Conflict) => Verdict::Superseded,
        503 => Verdict::Lost,
        _ => Verdict::Refused,
    }
}

/// The contact with the controller.
#[derive(Debug, Default)]
pub(crate) struct Link {
    /// The verdict of the last attempt, if it failed.
    trouble: Option<Verdict>,
    pause: Option<Duration>,
}

impl Link {
    /// Notes that an attempt failed. Returns how long to pause, and whether this trouble is new and
    /// has to be logged.
    pub(crate) fn failed(&mut self, verdict: Verdict) -> (Duration, bool) {
        let is_new = self.trouble.replace(verdict) != Some(verdict);
        let pause = self.pause.map_or(BACKOFF_FIRST, |pause| (pause * 2).min(BACKOFF_LIMIT));
        self.pause = Some(pause);
        (pause, is_new)
    }

    /// Notes that an attempt succeeded. Returns true if that ends a trouble and has to be logged.
    pub(crate) fn answered(&mut self) -> bool {
        self.pause = None;
        self.trouble.take().is_some()
    }

    /// Whether the last attempt failed.
    pub(crate) fn is_troubled(&self) -> bool {
        self.trouble.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_api::Problem;

    #[test]
    fn pauses_grow_to_their_limit_and_each_trouble_is_told_once() {
        let mut link = Link::default();
        let (first, is_new) = link.failed(Verdict::Lost);
        assert!(is_new);
        let mut last = first;
        for _ in 0..100 {
            let (pause, is_new) = link.failed(Verdict::Lost);
            assert!(!is_new && pause >= last && pause <= BACKOFF_LIMIT);
            last = pause;
        }
        assert_eq!(last, BACKOFF_LIMIT);
        assert!(link.failed(Verdict::Refused).1);
        assert!(link.answered());
        assert!(!link.answered());
        assert_eq!(link.failed(Verdict::Lost), (BACKOFF_FIRST, true));
    }

    #[test]
    fn errors_mean_what_they_say() {
        let of = |kind| verdict(&ApiError::Problem(Box::new(Problem::new(kind, ""))));
        assert_eq!(of(ProblemKind::NotFound), Verdict::Unknown);
        assert_eq!(of(ProblemKind::NameInUse), Verdict::Superseded);
        assert_eq!(of(ProblemKind::Conflict), Verdict::Superseded);
        assert_eq!(of(ProblemKind::Unauthorized), Verdict::Unauthorized);
        assert_eq!(of(ProblemKind::Invalid), Verdict::Refused);
        assert_eq!(of(ProblemKind::NoRoom), Verdict::Refused);
        for kind in [ProblemKind::NotLeader, ProblemKind::Ending, ProblemKind::StoreFailed] {
            assert_eq!(of(kind), Verdict::Lost);
        }
        let unreachable = ApiError::Unreachable { url: String::new(), reason: String::new() };
        assert_eq!(verdict(&unreachable), Verdict::Lost);
    }
}
