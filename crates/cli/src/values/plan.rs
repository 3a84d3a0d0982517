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

/// A price, or a span of prices written as `5..9`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    pub low: f64,
    pub high: f64,
}

impl Prices {
    /// The middle: the price where one is needed.
    pub fn middle(self) -> f64 {
        self.low.midpoint(self.high)
    }

    /// The ends, if they differ.
    pub fn span(self) -> Option<(f64, f64)> {
        (self.low < self.high).then_some((self.low, self.high))
    }
}

impl FromStr for Prices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (low, high) = text.split_once("..").unwrap_or((text, text));
        let (Dollars(low), Dollars(high)) = (low.parse()?, high.parse()?);
        match low <= high {
            true => Ok(Prices { low, high }),
            false => Err(format!("{text:?} is not a span of prices; write it as 5..9")),
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
        assert_eq!("5..9".parse::<Prices>().unwrap().span(), Some((5.0, 9.0)));
        assert_eq!("7".parse::<Prices>().map(|it| (it.middle(), it.span())), Ok((7.0, None)));
        assert!("9..5".parse::<Prices>().is_err() && "5..".parse::<Prices>().is_err());
        for text in ["-1", "free", "inf", ""] {
            assert!(text.parse::<Dollars>().is_err(), "{text}");
        }
    }
}
