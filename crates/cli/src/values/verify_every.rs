//! In which time all that is far is verified.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::Span;

/// In which time all that is far is verified, written as a [`Span`] or `never`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyEvery(pub Option<Duration>);

impl FromStr for VerifyEvery {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(VerifyEvery(None)),
            text => match text.parse() {
                Ok(Span(every)) => Ok(VerifyEvery(Some(every))),
                Err(error) => Err(format!("{error}, or never")),
            },
        }
    }
}

impl fmt::Display for VerifyEvery {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(every) => Span(every).fmt(to),
            None => to.write_str("never"),
        }
    }
}
