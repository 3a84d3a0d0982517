//! Sizes given as options, and rounding to whole numbers.

/// Parses `4096`, `64KiB`, `1.5GiB`, `512M` (units are binary in either spelling), with the
/// signature of a clap value parser.
///
/// # Errors
/// The text is no size; the message quotes it and shows an example.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("\"{text}\" is no size; write for example 256MiB or 1GiB");
    farpool_units::parse_bytes(text).ok_or_else(wrong)
}

/// Rounds to the nearest whole number a value that is known to fit. Returns 0 if it is negative.
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
}
