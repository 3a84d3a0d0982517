//! Words and numbers of a command line, parsed as memcached 1.6 does: only spaces separate words.
//!
//! Numbers follow C's `strtoul` with memcached's own checks, including silent truncation; those
//! called strict are digits only, as 1.6.45 reads them nearly everywhere.

/// The most words that one pass over a line yields; memcached makes further passes over `get`
/// lines.
pub const WORDS_MAX: usize = 23;

/// The words of a line.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    words: [&'a [u8]; WORDS_MAX],
    len: usize,
}

impl<'a> Words<'a> {
    /// The first [`WORDS_MAX`] words.
    #[must_use]
    pub fn of(line: &'a [u8]) -> Self {
        let mut words = Self { words: [b""; WORDS_MAX], len: 0 };
        for word in split(line).take(WORDS_MAX) {
            words.words[words.len] = word;
            words.len += 1;
        }
        words
    }

    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A word, empty if there are fewer.
    #[must_use]
    pub fn get(&self, number: usize) -> &'a [u8] {
        if number < self.len { self.words[number] } else { b"" }
    }

    /// All words from `number` on.
    #[must_use]
    pub fn from(&self, number: usize) -> &[&'a [u8]] {
        &self.words[number.min(self.len)..self.len]
    }

    /// Whether the last word is `noreply`; the first word never counts.
    #[must_use]
    pub fn asks_no_reply(&self) -> bool {
        self.len > 1 && self.get(self.len - 1) == b"noreply"
    }
}

/// All words of a line.
pub fn split(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|&byte| byte == b' ').filter(|word| !word.is_empty())
}

/// The text as C sees it: strings end at a zero byte.
#[must_use]
pub fn until_zero(text: &[u8]) -> &[u8] {
    memchr::memchr(0, text).map_or(text, |zero| &text[..zero])
}

/// C's `isspace`.
const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r')
}

/// Sign and magnitude at the start of `text`, and the rest. None without a digit, or beyond 64
/// bits.
fn number(text: &[u8]) -> Option<(bool, u64, &[u8])> {
    let start = text.iter().position(|&byte| !is_space(byte))?;
    let (negative, digits) = match text[start] {
        b'-' => (true, &text[start + 1..]),
        b'+' => (false, &text[start + 1..]),
        _ => (false, &text[start..]),
    };
    let len = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    if len == 0 {
        return None;
    }
    let magnitude = digits[..len]
        .iter()
        .try_fold(0u64, |sum, &digit| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')))?;
    Some((negative, magnitude, &digits[len..]))
}

/// Whether a number may end here: at the end of the word or at whitespace of any kind.
fn ends(rest: &[u8]) -> bool {
    rest.first().is_none_or(|&byte| is_space(byte))
}

/// memcached's `safe_strtoull`.
#[must_use]
pub fn unsigned_64(text: &[u8]) -> Option<u64> {
    let (negative, magnitude, rest) = number(text)?;
    let value = if negative { magnitude.wrapping_neg() } else { magnitude };
    let looks_negative = value > u64::MAX / 2 && text.contains(&b'-');
    (ends(rest) && !looks_negative).then_some(value)
}

/// memcached's `safe_strtoul`: truncates to 32 bits.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "as memcached does")]
pub fn unsigned_32(text: &[u8]) -> Option<u32> {
    unsigned_64(text).map(|value| value as u32)
}

/// memcached's `safe_strtol`: truncates to 32 bits.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "as memcached does")]
pub fn signed_32(text: &[u8]) -> Option<i32> {
    let (negative, magnitude, rest) = number(text)?;
    let limit = if negative { 1 << 63 } else { i64::MAX as u64 };
    let value = if negative { magnitude.wrapping_neg() } else { magnitude };
    (ends(rest) && magnitude <= limit).then_some(value as i32)
}

/// 1.6.45 reads no longer words as numbers of 32 and of 64 bits: leading zeros count.
const STRICT_BYTES_MAX_32: usize = 11;
const STRICT_BYTES_MAX_64: usize = 22;

/// memcached's `mcmc_toktou64`.
#[must_use]
pub fn strict_unsigned_64(text: &[u8]) -> Option<u64> {
    (1..=STRICT_BYTES_MAX_64).contains(&text.len()).then_some(())?;
    text.iter().try_fold(0u64, |sum, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        sum.checked_mul(10)?.checked_add(digit)
    })
}

/// memcached's `mcmc_toktou32`.
#[must_use]
pub fn strict_unsigned_32(text: &[u8]) -> Option<u32> {
    (text.len() <= STRICT_BYTES_MAX_32).then_some(())?;
    strict_unsigned_64(text).and_then(|value| u32::try_from(value).ok())
}

/// memcached's `mcmc_tokto32`, which takes a sign without digits for 0.
#[must_use]
pub fn strict_signed_32(text: &[u8]) -> Option<i32> {
    (text.len() <= STRICT_BYTES_MAX_32).then_some(())?;
    let value = match text {
        b"-" => 0,
        [b'-', digits @ ..] => -i64::try_from(strict_unsigned_64(digits)?).ok()?,
        digits => i64::try_from(strict_unsigned_64(digits)?).ok()?,
    };
    i32::try_from(value).ok()
}

/// memcached's `safe_strtod`, without C's hexadecimal fractions.
#[must_use]
pub fn decimal(text: &[u8]) -> Option<f64> {
    let start = text.iter().position(|&byte| !is_space(byte))?;
    let end = text[start..].iter().position(|&byte| is_space(byte));
    let digits = &text[start..end.map_or(text.len(), |end| start + end)];
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_parted_by_spaces_only() {
        let words = Words::of(b"  set  a\tb 0 ");
        assert_eq!(words.from(0), [&b"set"[..], b"a\tb", b"0"]);
        assert_eq!(words.get(7), b"");
        assert!(!words.asks_no_reply());
        assert!(Words::of(b"touch k 0 noreply").asks_no_reply());
        assert!(!Words::of(b"noreply").asks_no_reply());
    }

    #[test]
    fn numbers_follow_memcached() {
        assert_eq!(unsigned_64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(unsigned_64(b"18446744073709551616"), None);
        assert_eq!(unsigned_64(b"-1"), None);
        assert_eq!(unsigned_64(b" \t+12 x"), Some(12));
        assert_eq!(unsigned_64(b"12x"), None);
        assert_eq!(unsigned_64(b""), None);
        assert_eq!(unsigned_64(b"-"), None);
        assert_eq!(unsigned_64(b"-0"), Some(0));
        assert_eq!(unsigned_32(b"4294967297"), Some(1), "cut off silently");
        assert_eq!(signed_32(b"-5"), Some(-5));
        assert_eq!(signed_32(b"4294967295"), Some(-1), "cut off silently");
        assert_eq!(signed_32(b"9223372036854775808"), None);
        assert_eq!(signed_32(b"-9223372036854775808"), Some(0));
        assert_eq!(signed_32(b"noreply"), None);
        assert_eq!(strict_signed_32(b"-2147483648"), Some(i32::MIN));
        assert_eq!(strict_signed_32(b"-2147483649"), None);
        assert_eq!(strict_signed_32(b"-"), Some(0), "as 1.6.45 does");
        assert_eq!(strict_signed_32(b"+1"), None);
        assert_eq!(strict_signed_32(b"000000000001"), None, "12 bytes");
        assert_eq!(strict_unsigned_32(b"4294967295"), Some(u32::MAX));
        assert_eq!(strict_unsigned_32(b"4294967296"), None);
        assert_eq!(strict_unsigned_64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(strict_unsigned_64(b"18446744073709551616"), None);
        assert_eq!(strict_unsigned_64(b""), None);
        assert_eq!(strict_unsigned_64(b"1 "), None);
        assert_eq!(decimal(b"\t-1.5\tx"), Some(-1.5));
        assert_eq!(decimal(b"1.5x"), None);
        assert_eq!(decimal(b""), None);
    }
}
