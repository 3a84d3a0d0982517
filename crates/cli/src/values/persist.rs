//! What the memory of a blade outlives.

use std::fmt;
use std::str::FromStr;

/// What the memory of a blade outlives, written as `restart` or `reboot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persist(pub farpool_blade::Persist);

impl FromStr for Persist {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "restart" => Ok(Persist(farpool_blade::Persist::Restart)),
            "reboot" => Ok(Persist(farpool_blade::Persist::Reboot)),
            _ => Err(format!("{text:?} is neither restart nor reboot")),
        }
    }
}

impl fmt::Display for Persist {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self.0 {
            farpool_blade::Persist::Restart => "restart",
            farpool_blade::Persist::Reboot => "reboot",
        })
    }
}
