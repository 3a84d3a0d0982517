//! Values of `farpool plan`.

use std::fmt;
use std::str::FromStr;

/// A share of a whole, written as `75%` or `12.5%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percent(pub f64);

impl Percent {
    /// From 0 to 1.
    pub fn share(self) -> f64 {
        self.0 / 100.0
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
        match number.filter(|percent| (0.0..=100.0).contains(percent)) {
            Some(percent) => Ok(Percent(percent)),
            None => Err(format!("{text:?} is not a share; write it as 75% or 12.5%")),
        }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}%", self.0)
    }
}

/// A price, with or without a `$` before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dollars(pub f64);

impl FromStr for Dollars {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix('$').unwrap_or(text).parse::<f64>();
        match number.ok().filter(|dollars| dollars.is_finite() && *dollars >= 0.0) {
            Some(dollars) => Ok(Dollars(dollars)),
            None => Err(format!("{text:?} is not a price; write it as 7.03")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_prices_are_what_they_say() {
        assert_eq!("75%".parse::<Percent>().map(Percent::share), Ok(0.75));
        assert_eq!("12.5%".parse(), Ok(Percent(12.5)));
        assert_eq!("$7.03".parse(), Ok(Dollars(7.03)));
        for text in ["75", "101%", "-1%", "%", "NaN%"] {
            assert!(text.parse::<Percent>().is_err_and(|error| error.contains(text)), "{text}");
        }
        for text in ["-1", "free", "inf", ""] {
            assert!(text.parse::<Dollars>().is_err(), "{text}");
        }
    }
}
