//! Sizes and bandwidths as people write them. Always binary (`2G` and `2GiB` are both 2^31 bytes):
//! on the command line, in configuration files and topologies.

/// Suffixes, each with its power of two.
const SUFFIXES: [(&str, u32); 6] = [("", 0), ("k", 10), ("m", 20), ("g", 30), ("t", 40), ("p", 50)];

/// Parses `4096`, `512KiB`, `1.5GiB`, `2G`. None if it is not a size or does not fit 64 bits; zero
/// is a size.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, suffix) = text.split_at(split);
    let suffix = suffix.trim().to_ascii_lowercase();
    let unit = suffix.strip_suffix("ib").or(suffix.strip_suffix('b')).unwrap_or(&suffix);
    let (_, shift) = SUFFIXES.iter().find(|(name, _)| *name == unit)?;
    let (whole, decimals) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || decimals.len() > 3 {
        return None;
    }
    let thousandths: u128 = format!("{whole}{decimals:0<3}").parse().ok()?;
    u64::try_from(thousandths.checked_mul(1 << shift)? / 1000).ok()
}

/// Formats `bytes` with the largest suffix that is exact; [`parse_bytes`] reads it back.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let named = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match named.iter().find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift) {
        Some((name, shift)) => format!("{}{name}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Formats as `1.50 GiB` and the like: three digits with the largest suffix not above the value.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "powers of two are exact")]
pub fn about_bytes(bytes: f64) -> String {
    let steps = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let step = steps.iter().find(|(shift, _)| bytes >= (1_u64 << shift) as f64);
    match step {
        Some((shift, unit)) => format!("{} {unit}", three_digits(bytes / (1_u64 << shift) as f64)),
        None => format!("{bytes:.0} B"),
    }
}

/// Formats three significant digits, at most three decimals, without an exponent.
#[must_use]
pub fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_back() {
        assert_eq!(parse_bytes("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_bytes("2G"), Some(1 << 31));
        assert_eq!(parse_bytes("0"), Some(0));
        for bytes in [0, 1, 4096, 16 << 20, 3 << 29, u64::MAX] {
            assert_eq!(parse_bytes(&format_bytes(bytes)), Some(bytes));
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "GiB", "-1", "1.2345G", "12 parsecs", "1..5G", ".5G", "99999999PiB"] {
            assert_eq!(parse_bytes(text), None, "{text:?}");
        }
    }

    #[test]
    fn about_so_many_bytes_have_three_digits() {
        assert_eq!(about_bytes(1536.0), "1.50 KiB");
        assert_eq!(about_bytes(f64::from(1 << 30)), "1.00 GiB");
        assert_eq!(about_bytes(17.0), "17 B");
    }
}
