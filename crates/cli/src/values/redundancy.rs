//! What is stored beside what is far.

use std::fmt;
use std::str::FromStr;

/// What is stored beside what is far, written as `none`, `2`, `3` or `parity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redundancy(pub farpool_run::Redundancy);

impl FromStr for Redundancy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Redundancy)
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}
