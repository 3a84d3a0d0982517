//! Sizes and times as people write and read them.

/// Reads `4096`, `64KiB`, `1.5GiB`, `512M` (binary either way); the form clap wants.
///
/// # Errors
/// Says what was not understood and shows an example.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("\"{text}\" is no size; write for example 256MiB or 1GiB");
    farpool_wire::parse_bytes(text).ok_or_else(wrong)
}

/// `1.5 GiB` and the like, three digits.
#[must_use]
pub fn format_bytes(bytes: f64) -> String {
    let steps = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let step = steps.iter().find(|(shift, _)| bytes >= (1u64 << shift) as f64);
    match step {
        Some((shift, unit)) => format!("{} {unit}", three_digits(bytes / (1u64 << shift) as f64)),
        None => format!("{bytes:.0} B"),
    }
}

/// Three digits that count, without an exponent.
pub(crate) fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The nearest whole number of a value that is known to be one that fits (0 below zero).
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, which is wanted
pub(crate) fn round(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_whatever_the_spelling() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64KiB", 65536),
            ("64k", 65536),
            ("1.5GiB", 3 << 29),
            ("2 MB", 2 << 20),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "1XiB", "-1", "1e9999"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_with_three_digits() {
        assert_eq!(format_bytes(1536.0), "1.50 KiB");
        assert_eq!(format_bytes(f64::from(1 << 30)), "1.00 GiB");
        assert_eq!(format_bytes(17.0), "17 B");
    }
}
