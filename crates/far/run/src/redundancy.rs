//! How many copies a run has of what is far.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use farpool_board::COPIES_LIMIT;
use farpool_wire::Address;

use crate::RunError;

/// How many copies there are of what is far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Redundancy {
    /// One: what a blade has is lost with it.
    #[default]
    None,
    /// Several, each on another failure domain.
    Copies(u8),
}

impl Redundancy {
    /// The number of copies.
    pub fn copies(self) -> u8 {
        match self {
            Redundancy::None => 1,
            Redundancy::Copies(copies) => copies,
        }
    }

    /// Checks that the blades can hold as many copies.
    ///
    /// # Errors
    /// There are fewer failure domains than copies.
    pub(crate) fn check(self, blades: &[String]) -> Result<(), RunError> {
        let copies = self.copies();
        let addresses = blades.iter().filter_map(|blade| blade.parse::<Address>().ok());
        let domains: HashSet<_> = addresses.map(|address| address.failure_domain()).collect();
        match domains.len() < usize::from(copies) && copies > 1 {
            true => Err(RunError::TooFewDomains { copies, domains: domains.len() }),
            false => Ok(()),
        }
    }
}

impl FromStr for Redundancy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u8>() {
            _ if text == "none" => Ok(Redundancy::None),
            Ok(copies) if (2..=COPIES_LIMIT).contains(&copies) => Ok(Redundancy::Copies(copies)),
            _ => Err(format!("{text:?} is none of none, 2 and {COPIES_LIMIT}")),
        }
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Redundancy::None => to.write_str("none"),
            Redundancy::Copies(copies) => copies.fmt(to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for text in ["none", "2", "3"] {
            assert_eq!(text.parse::<Redundancy>().expect("known").to_string(), text);
        }
        for text in ["", "0", "1", "4", "parity", "-2"] {
            assert!(text.parse::<Redundancy>().is_err(), "{text}");
        }
    }

    #[test]
    fn copies_need_as_many_failure_domains() {
        let blades = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let one_host = blades(&["tcp://192.0.2.1:1", "tcp://192.0.2.1:2"]);
        let two = blades(&["tcp://192.0.2.1:1", "tcp://192.0.2.2:1"]);
        let here = blades(&["unix:///a", "tcp://127.0.0.1:1"]);
        assert!(Redundancy::None.check(&[]).is_ok());
        assert!(Redundancy::None.check(&one_host).is_ok());
        let error = Redundancy::Copies(2).check(&one_host).expect_err("one domain");
        assert!(error.to_string().contains("1 failure domain"), "{error}");
        assert!(Redundancy::Copies(2).check(&two).is_ok());
        assert!(Redundancy::Copies(2).check(&here).is_ok());
        assert!(Redundancy::Copies(3).check(&two).is_err());
    }
}
