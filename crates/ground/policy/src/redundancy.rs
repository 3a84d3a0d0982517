//! What a program stores beside what is far, so that a blade's death costs nothing.

use std::fmt;
use std::str::FromStr;

/// Most copies of a superpage.
pub const COPIES_LIMIT: u8 = 3;
/// Failure domains that a group of superpages with its parity is on.
pub const PARITY_DOMAINS: u8 = 5;

/// What is stored beside what is far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redundancy {
    /// So many copies in all, each on another failure domain; of one, what a blade has is lost with
    /// it.
    Copies(u8),
    /// One superpage of parity for each group of four, all on different failure domains.
    Parity,
}

impl Redundancy {
    /// Nothing.
    pub const NONE: Redundancy = Redundancy::Copies(1);
    /// The texts of all kinds.
    pub const TEXTS: [&str; 4] = ["none", "2", "3", "parity"];

    /// True if nothing is lost with one blade.
    #[must_use]
    pub fn survives_a_blade(self) -> bool {
        self != Redundancy::NONE
    }

    /// Failure domains that there have to be.
    #[must_use]
    pub fn domains(self) -> u8 {
        match self {
            Redundancy::Copies(copies) => copies,
            Redundancy::Parity => PARITY_DOMAINS,
        }
    }
}

impl FromStr for Redundancy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u8>() {
            _ if text == "none" => Ok(Redundancy::NONE),
            _ if text == "parity" => Ok(Redundancy::Parity),
            Ok(copies) if (2..=COPIES_LIMIT).contains(&copies) => Ok(Redundancy::Copies(copies)),
            _ => Err(format!("{text:?} is none of none, 2, {COPIES_LIMIT} and parity")),
        }
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            &Redundancy::NONE => to.write_str("none"),
            Redundancy::Copies(copies) => copies.fmt(to),
            Redundancy::Parity => to.write_str("parity"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for text in Redundancy::TEXTS {
            let redundancy = text.parse::<Redundancy>().expect("known");
            assert_eq!(redundancy.to_string(), text);
        }
        for text in ["", "0", "1", "4", "Parity", "-2"] {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
    }
}
