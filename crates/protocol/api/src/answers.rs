//! A client's results besides plain answers: errors, and the stream of events.

use std::io::BufRead;

use crate::transport::explained_io;
use crate::{Event, Problem, ProblemKind};

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The controller refused the request.
    #[error("{0}")]
    Problem(Box<Problem>),
    /// No controller answered; with the last one's reason.
    #[error(
        "the controller at {url} cannot be reached: {reason}; check the address, and that \
         farpool control runs there"
    )]
    Unreachable {
        /// The controller's address.
        url: String,
        /// What failed.
        reason: String,
    },
    /// The answer is not one of a controller of this version.
    #[error("the answer of {url} is invalid: {reason}")]
    BadAnswer {
        /// The controller's address.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// An invalid address.
    #[error("\"{0}\" is not a controller's address; give https://host:port, several with commas")]
    BadUrl(String),
    /// An address that only a client with a certificate may ask.
    #[error(
        "{0} asks for a certificate; give the folder with yours: --pki DIR (farpool pki issue)"
    )]
    NoCertificate(String),
    /// An address beyond loopback in the clear.
    #[error(
        "{0} is beyond this machine, and http:// is not encrypted: whoever is on the way could \
         read and change what is asked; give https:// and --pki DIR, or --insecure if that is \
         what you want"
    )]
    Clear(String),
    /// The certificate cannot be used.
    #[error("the certificate cannot be used: {0}")]
    Credentials(String),
}

impl ApiError {
    /// True if the controller refused with this kind of problem.
    #[must_use]
    pub fn is(&self, kind: ProblemKind) -> bool {
        matches!(self, Self::Problem(problem) if problem.is(kind))
    }
}

/// Events as they arrive. Ends with the connection: then request those after the last id.
pub struct EventStream {
    lines: Box<dyn BufRead + Send>,
    url: String,
}

impl std::fmt::Debug for EventStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventStream").field("url", &self.url).finish_non_exhaustive()
    }
}

impl EventStream {
    pub(crate) fn new(lines: Box<dyn BufRead + Send>, url: String) -> Self {
        Self { lines, url }
    }
}

impl Iterator for EventStream {
    type Item = Result<Event, ApiError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = String::new();
            let unreachable = |reason| ApiError::Unreachable { url: self.url.clone(), reason };
            match self.lines.read_line(&mut line) {
                Ok(0) => return None,
                Err(error) => return Some(Err(unreachable(explained_io(&error)))),
                Ok(_) => {}
            }
            // Each event is one line of data, which repeats its id and kind.
            let Some(data) = line.strip_prefix("data:") else { continue };
            let bad = |error: serde_json::Error| ApiError::BadAnswer {
                url: self.url.clone(),
                reason: error.to_string(),
            };
            return Some(serde_json::from_str(data.trim()).map_err(bad));
        }
    }
}
