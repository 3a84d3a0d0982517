//! Times of a file's rows in any unit, turned into seconds since the file's first row.
//!
//! The unit is the column type's own (a Parquet timestamp, ISO 8601 text), or the one that the user
//! or the column's name gives. Plain numbers without either are taken only if they can be nothing
//! but the time since 1970 in one unit; a guess could be wrong by a thousand.

use chrono::{DateTime, NaiveDateTime};

use super::columns::TimeUnit;

/// Units of a second, with their name and number per second.
const SINCE_1970: [(&str, f64); 4] = [("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)];
/// Times since 1970 that can be told from other numbers: 1990 to 2100, in seconds. In each unit
/// the range is far from that of the others.
const EPOCH_S: std::ops::RangeInclusive<f64> = 631_152_000.0..=4_102_444_800.0;

/// Text without a zone; it is read as UTC.
const ISO_8601: [&str; 4] =
    ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M"];

/// The times read so far.
#[derive(Debug)]
pub(super) struct Times {
    unit: TimeUnit,
    /// What one unit of the column's numbers is written as: 100 for decimals with two digits after
    /// the point, else 1.
    scale: f64,
    /// What whole numbers are relative to: the first one. Nanoseconds since 1970 would lose digits
    /// as f64.
    base: Option<i64>,
    values: Vec<f64>,
    least: f64,
    most: f64,
    /// True once a row held text that is a time.
    is_text: bool,
}

impl Times {
    pub(super) fn new(unit: TimeUnit) -> Times {
        Times {
            unit,
            scale: 1.0,
            base: None,
            values: Vec::new(),
            least: f64::INFINITY,
            most: f64::NEG_INFINITY,
            is_text: false,
        }
    }

    /// The same for whole numbers whose last `decimals` digits are after the point.
    pub(super) fn decimals(unit: TimeUnit, decimals: i32) -> Times {
        Times { scale: 10_f64.powi(decimals), ..Times::new(unit) }
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    // Absolute values only tell the unit; differences are exact up to 2^53.
    #[allow(clippy::cast_precision_loss)]
    pub(super) fn whole(&mut self, value: i64) {
        let base = *self.base.get_or_insert(value);
        self.note(value as f64);
        self.values.push((i128::from(value) - i128::from(base)) as f64);
    }

    #[allow(clippy::cast_precision_loss)] // as above
    pub(super) fn real(&mut self, value: f64) {
        let base = *self.base.get_or_insert(0);
        self.note(value);
        self.values.push(value - base as f64);
    }

    fn note(&mut self, value: f64) {
        self.least = self.least.min(value);
        self.most = self.most.max(value);
    }

    /// Adds a number or an ISO 8601 time. Returns why it is neither.
    pub(super) fn text(&mut self, text: &str) -> Result<(), String> {
        let is_first = self.values.is_empty();
        if let Some(ns) = nanoseconds(text) {
            if !is_first && !self.is_text {
                return Err(format!("{text:?} is a date, and the rows before hold numbers"));
            }
            self.is_text = true;
            self.whole(ns);
            return Ok(());
        }
        if self.is_text {
            return Err(format!("{text:?} is not a time such as 2026-01-31T23:59:00Z"));
        }
        match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(whole), _) => self.whole(whole),
            (_, Ok(real)) => self.real(real),
            _ => return Err(format!("{text:?} is neither a number nor an ISO 8601 time")),
        }
        Ok(())
    }

    /// Returns steps, or seconds since the first row; or why the unit is not known.
    pub(super) fn finish(mut self) -> Result<(TimeUnit, Vec<f64>), String> {
        if self.is_text {
            self.unit = TimeUnit::PerSecond(1e9);
        }
        let (unit, per_unit) = match self.unit {
            TimeUnit::Steps => (TimeUnit::Steps, 1.0),
            TimeUnit::PerSecond(per_second) => (TimeUnit::PerSecond(1.0), per_second),
            TimeUnit::Unknown => (TimeUnit::PerSecond(1.0), self.since_1970()?),
        };
        // Divided, not multiplied by 0.001: whole seconds stay whole.
        let divisor = per_unit * self.scale;
        self.values.iter_mut().for_each(|value| *value /= divisor);
        Ok((unit, self.values))
    }

    fn since_1970(&self) -> Result<f64, String> {
        if self.values.is_empty() {
            return Ok(1.0);
        }
        let (least, most) = (self.least / self.scale, self.most / self.scale);
        let is_all = |per: f64| EPOCH_S.contains(&(least / per)) && EPOCH_S.contains(&(most / per));
        let found = SINCE_1970.iter().find(|(_, per_second)| is_all(*per_second));
        found.map(|(_, per_second)| *per_second).ok_or_else(|| {
            format!("numbers from {least} to {most} may be seconds or parts of a second")
        })
    }
}

/// Nanoseconds since 1970 of an ISO 8601 time; without a zone it is UTC.
fn nanoseconds(text: &str) -> Option<i64> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return time.timestamp_nanos_opt();
    }
    if let Ok(time) = DateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S%.f%z") {
        return time.timestamp_nanos_opt();
    }
    let plain = text.strip_suffix(" UTC").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let parsed = ISO_8601.iter().find_map(|form| NaiveDateTime::parse_from_str(plain, form).ok());
    parsed.and_then(|time| time.and_utc().timestamp_nanos_opt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(unit: TimeUnit, texts: &[&str]) -> Result<Vec<f64>, String> {
        let mut times = Times::new(unit);
        texts.iter().try_for_each(|text| times.text(text))?;
        times.finish().map(|(_, values)| values)
    }

    #[test]
    fn numbers_since_1970_tell_their_unit_and_others_are_refused() {
        for zeros in ["", "000", "000000", "000000000"] {
            let texts = [format!("1700000000{zeros}"), format!("1700000300{zeros}")];
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            assert_eq!(read(TimeUnit::Unknown, &texts), Ok(vec![0.0, 300.0]), "{texts:?}");
        }
        let error = read(TimeUnit::Unknown, &["0", "300"]).expect_err("seconds or what?");
        assert!(error.contains("from 0 to 300"), "{error}");
        assert!(read(TimeUnit::Unknown, &["1700000000", "1700000300000"]).is_err());
        assert_eq!(read(TimeUnit::PerSecond(1e3), &["0", "900000"]), Ok(vec![0.0, 900.0]));
    }

    #[test]
    fn iso_8601_is_read_with_and_without_a_zone() {
        for text in [
            "2024-01-01T00:05:00Z",
            "2024-01-01 00:05:00",
            "2024-01-01T01:05:00.000+01:00",
            "2024-01-01T01:05:00+0100",
            "2024-01-01 00:05",
            "2024-01-01 00:05:00 UTC",
        ] {
            let times = read(TimeUnit::Unknown, &["2024-01-01T00:00:00Z", text]);
            assert_eq!(times, Ok(vec![0.0, 300.0]), "{text}");
        }
        for texts in [["2024-01-01T00:00:00Z", "300"], ["0", "2024-01-01T00:00:00Z"]] {
            assert!(read(TimeUnit::Unknown, &texts).is_err(), "{texts:?}");
        }
        let american = read(TimeUnit::Unknown, &["01/02/2024 10:00"]).expect_err("January?");
        assert!(american.contains("ISO 8601"), "{american}");
    }

    #[test]
    fn a_century_of_nanoseconds_keeps_its_seconds() {
        let texts = ["1700000000000000001", "1700000300000000001"];
        assert_eq!(read(TimeUnit::PerSecond(1e9), &texts), Ok(vec![0.0, 300.0]));
    }
}
