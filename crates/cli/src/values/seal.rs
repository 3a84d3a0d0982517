//! When pages are sealed.

use std::fmt;
use std::str::FromStr;

/// When pages are sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Seal {
    /// Also on blades of this host.
    Always,
    /// If they may pass a network.
    Remote,
    /// Blades and network are trusted with the pages.
    Never,
}

impl From<Seal> for farpool_run::SealPolicy {
    fn from(seal: Seal) -> Self {
        match seal {
            Seal::Always => Self::Always,
            Seal::Remote => Self::Remote,
            Seal::Never => Self::Never,
        }
    }
}

impl FromStr for Seal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        clap::ValueEnum::from_str(text, false)
            .map_err(|_| format!("{text:?} is none of always, remote and never"))
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Seal::Always => "always",
            Seal::Remote => "remote",
            Seal::Never => "never",
        })
    }
}
