//! Times of the clock as text.

/// Returns a time since 1970 as RFC 3339 in UTC, with milliseconds: `2026-11-27T20:12:00.000Z`.
#[must_use]
pub fn utc_text(unix_ms: u64) -> String {
    let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date_of(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Returns year, month and day, `days` after 1970-01-01 (Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`): years begin in March, so that a leap day is the last of its
/// year.
fn date_of(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // since 0000-03-01
    let (era, of_era) = (days / 146_097, days % 146_097);
    let of_era_years = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * of_era_years + of_era_years / 4 - of_era_years / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + of_era_years + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc_text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(utc_text(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(utc_text(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(utc_text(1_000_000_000_000), "2001-09-09T01:46:40.000Z");
        assert_eq!(utc_text(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
        assert_eq!(utc_text(1_735_689_599_000), "2024-12-31T23:59:59.000Z");
    }
}
