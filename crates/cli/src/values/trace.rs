//! Values of `farpool trace` and of the commands that read traces.

use std::fmt;
use std::str::FromStr;

use super::Size;

/// A cache in front of a trace, written as `64KiB:8` (size and ways) or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLevel {
    /// 0 = none.
    pub bytes: u64,
    pub ways: u32,
}

/// Bytes of a cache line, as in the capture plugin.
const LINE_BYTES: u64 = farpool_trace::capture::LINE_BYTES;

impl CacheLevel {
    pub const NONE: Self = Self { bytes: 0, ways: 0 };
}

impl FromStr for CacheLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        let form = || format!("{text:?} is not a cache; write 64KiB:8 (size and ways) or none");
        let (size, ways) = text.split_once(':').ok_or_else(form)?;
        let (Size(bytes), ways) = (size.parse()?, ways.parse::<u32>().map_err(|_| form())?);
        let set_bytes = u64::from(ways) * LINE_BYTES;
        let is_whole = set_bytes > 0 && bytes.is_multiple_of(set_bytes);
        if !is_whole || !(bytes / set_bytes).is_power_of_two() {
            let rule = "the sets of lines of 64 bytes must be a power of two";
            return Err(format!("a cache of {size} cannot have {ways} ways: {rule}"));
        }
        Ok(Self { bytes, ways })
    }
}

impl fmt::Display for CacheLevel {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            0 => to.write_str("none"),
            bytes => write!(to, "{}:{}", Size(bytes), self.ways),
        }
    }
}

/// Parses the name of a program as `farpool trace --process` compares it, without its folder.
pub fn process_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(['/', ',']) {
        return Err(format!(
            "{text:?} is not a program's name; write it without its folder, such as cc1"
        ));
    }
    Ok(text.to_owned())
}

/// How much slower a program may be, written as `3%` or `2.5%`; in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slowdown(pub u64);

impl FromStr for Slowdown {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refusal = || format!("{text:?} is not a slowdown; write it as 3% or 2.5%");
        let share = text.strip_suffix('%').ok_or_else(refusal)?;
        let (whole, tenth) = share.split_once('.').unwrap_or((share, "0"));
        let digits = |part: &str| part.parse::<u32>().map(u64::from).map_err(|_| refusal());
        if tenth.len() != 1 {
            return Err(refusal());
        }
        Ok(Self(digits(whole)? * 10 + digits(tenth)?))
    }
}

impl fmt::Display for Slowdown {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}.{}%", self.0 / 10, self.0 % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowdowns_are_percents_with_a_digit_at_most() {
        assert_eq!("3%".parse(), Ok(Slowdown(30)));
        assert_eq!("2.5%".parse::<Slowdown>().unwrap().to_string(), "2.5%");
        for text in ["3", "-1%", "2.55%", "NaN%", "%"] {
            assert!(text.parse::<Slowdown>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_process_is_named_without_its_folder() {
        assert_eq!(process_name("cc1").as_deref(), Ok("cc1"));
        for text in ["", "/usr/bin/sort", "a,b"] {
            assert!(process_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn caches_read_back_and_impossible_ones_are_refused() {
        for text in ["64KiB:8", "2MiB:16", "none"] {
            assert_eq!(text.parse::<CacheLevel>().unwrap().to_string(), text);
        }
        for text in ["64KiB", "64KiB:0", "64KiB:7", "100:1", "x:1"] {
            assert!(text.parse::<CacheLevel>().is_err(), "{text}");
        }
    }
}
