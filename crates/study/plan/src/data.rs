//! Data files in TOML: parsed as a whole, then every figure is checked by key.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::PlanError;

/// Parses a file's text; errors, such as unknown and missing keys, name the line.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, PlanError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
        let line = line.map_or_else(String::new, |line| format!("line {line}: "));
        PlanError::foreign(path, format!("{line}{}", error.message()))
    })
}

/// Checks figures and names the file that they are from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check<'a> {
    path: &'a Path,
}

impl<'a> Check<'a> {
    pub(crate) fn new(path: &'a Path) -> Check<'a> {
        Check { path }
    }

    pub(crate) fn wrong(self, key: &str, reason: impl Into<String>) -> PlanError {
        PlanError::Key { path: self.path.to_owned(), key: key.into(), reason: reason.into() }
    }

    /// For sizes and counts that must not be zero.
    pub(crate) fn positive(self, key: &str, value: f64) -> Result<(), PlanError> {
        match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(self.wrong(key, format!("{value} is not above zero"))),
        }
    }

    /// For prices and powers.
    pub(crate) fn not_negative(self, key: &str, value: f64) -> Result<(), PlanError> {
        match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(self.wrong(key, format!("{value} is below zero or not a number"))),
        }
    }

    pub(crate) fn not_negative_if(self, key: &str, value: Option<f64>) -> Result<(), PlanError> {
        value.map_or(Ok(()), |value| self.not_negative(key, value))
    }

    /// For shares of a whole.
    pub(crate) fn share(self, key: &str, value: f64) -> Result<(), PlanError> {
        match (0.0..=1.0).contains(&value) {
            true => Ok(()),
            false => Err(self.wrong(key, format!("{value} is not between 0 and 1"))),
        }
    }
}
