//! When to say that files cannot be read anew.

use crate::credentials::Reloaded;
use std::fmt::Display;

/// Looks that must find the same in a row: between two files that are replaced one after the other
/// the first look does.
const LOOKS: u32 = 2;

/// Why files could not be read anew at the last look, so that it is said once. Pure.
#[derive(Debug, Default)]
pub struct Stale {
    why: Option<String>,
    /// How many looks in a row have found that.
    looks: u32,
}

impl Stale {
    /// Notes what a look has found. Returns the reason when it is to be said.
    pub fn note<E: Display>(&mut self, found: &Result<Reloaded, E>) -> Option<&str> {
        let why = found.as_ref().err().map(ToString::to_string);
        self.looks = if why == self.why { self.looks.saturating_add(1) } else { 1 };
        self.why = why;
        self.why.as_deref().filter(|_| self.looks == LOOKS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_said_once_and_only_if_it_stays() {
        let mut stale = Stale::default();
        let unchanged: Result<_, &str> = Ok(Reloaded::Unchanged);
        assert_eq!(stale.note(&Err("half")), None, "the other file may be on its way");
        assert_eq!(stale.note(&unchanged), None);
        for _ in 0..2 {
            assert_eq!(stale.note(&Err("half")), None);
            assert_eq!(stale.note(&Err("half")), Some("half"));
            assert_eq!(stale.note(&Err("half")), None);
            assert_eq!(stale.note(&unchanged), None);
        }
        assert_eq!(stale.note(&Err("half")), None);
        assert_eq!(stale.note(&Err("other")), None);
        assert_eq!(stale.note(&Err("other")), Some("other"));
    }
}
