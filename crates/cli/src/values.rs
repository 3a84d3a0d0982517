//! Values people write on the command line, in variables and in the configuration file.
//!
//! There is one parser per kind, so a size means the same in all three places. Sizes are binary
//! with any suffix, as memory is (`2G` and `2GiB` are both 2^31 bytes); a bare number is bytes.

mod persist;
mod plan;
mod rack;
mod redundancy;
mod seal;
mod trace;
mod verify_every;

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use farpool_blade::{BackingKind, BackingKindError};
use farpool_policy::{PrefetchKind, RateLimit, UnknownPolicy, VictimKind};
use farpool_wire::{Address, AddressError};
use serde::{Deserialize, Deserializer, de};

pub use persist::*;
pub use plan::*;
pub use rack::*;
pub use redundancy::*;
pub use seal::*;
pub use trace::*;
pub use verify_every::*;

/// A number of bytes, written as `4096`, `512KiB`, `256MiB`, `2G`, `1.5GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match farpool_units::parse_bytes(text) {
            None => Err(format!("{text:?} is not a size; write it as 256MiB, 2G or 4096")),
            Some(0) => Err(format!("{text:?} is no memory; give a size above zero")),
            Some(bytes) => Ok(Size(bytes)),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&farpool_units::format_bytes(self.0))
    }
}

/// A file or device and how much of it, written as `PATH:SIZE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlashPart {
    pub path: PathBuf,
    pub size: Size,
}

impl FromStr for FlashPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(':').filter(|(path, _)| !path.is_empty());
        let (path, size) = parts.ok_or_else(|| {
            format!("{text:?} is not a file and a size; write it as /data/flash:200GiB")
        })?;
        Ok(Self { path: PathBuf::from(path), size: size.parse()? })
    }
}

impl fmt::Display for FlashPart {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}:{}", self.path.display(), self.size)
    }
}

/// Parses a process id.
pub fn process_number(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| {
        format!("{text:?} is not a process; give its number, as ps or pgrep -f NAME shows it")
    })
}

/// How much memory the items of a prefix may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaPart {
    pub prefix: String,
    pub size: Size,
}

impl FromStr for QuotaPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once('=').filter(|(prefix, _)| !prefix.is_empty());
        let (prefix, size) = parts.ok_or_else(|| {
            format!("{text:?} is not a prefix and a size; write it as user:=1GiB")
        })?;
        Ok(Self { prefix: prefix.to_owned(), size: size.parse()? })
    }
}

/// Bytes a second, written as a [`Size`], or `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyRate(pub u64);

const UNLIMITED: &str = "unlimited";

impl FromStr for BusyRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == UNLIMITED {
            return Ok(BusyRate(RateLimit::UNLIMITED_BYTES_PER_S));
        }
        text.parse()
            .map(|Size(bytes)| BusyRate(bytes))
            .map_err(|error| format!("{error}; `{UNLIMITED}` means no limit"))
    }
}

impl fmt::Display for BusyRate {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            RateLimit::UNLIMITED_BYTES_PER_S => to.write_str(UNLIMITED),
            bytes => Size(bytes).fmt(to),
        }
    }
}

/// Control requests a second, or `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlRate(pub u64);

/// With less, a hello that waits for others of its host could exceed a client's patience.
const CONTROL_RATE_LEAST: u64 = 1_000;

impl FromStr for ControlRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == UNLIMITED {
            return Ok(ControlRate(u64::MAX));
        }
        let rate: u64 = text.parse().map_err(|_| format!("{text:?} is no number of requests"))?;
        if rate < CONTROL_RATE_LEAST {
            return Err(format!("{rate} is too few: at least {CONTROL_RATE_LEAST}"));
        }
        Ok(ControlRate(rate))
    }
}

impl fmt::Display for ControlRate {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            u64::MAX => to.write_str(UNLIMITED),
            rate => rate.fmt(to),
        }
    }
}

/// How much local memory a program may have: a size, or a share of what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalLimit {
    /// At most this many bytes.
    Bytes(u64),
    /// At most this share of the far-eligible memory the program has asked for, 1 to 100.
    Percent(u8),
}

impl From<LocalLimit> for farpool_run::LocalLimit {
    fn from(local: LocalLimit) -> farpool_run::LocalLimit {
        match local {
            LocalLimit::Bytes(bytes) => farpool_run::LocalLimit::Bytes(bytes),
            LocalLimit::Percent(percent) => farpool_run::LocalLimit::Percent(percent.into()),
        }
    }
}

/// The largest memory of a program, of which `--local PCT` is then a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeakMemory {
    Bytes(u64),
    /// A trace, or the statistics of an earlier run.
    File(PathBuf),
}

impl FromStr for PeakMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(Size(bytes)) => Ok(PeakMemory::Bytes(bytes)),
            Err(_) if text.contains(['.', '/']) => Ok(PeakMemory::File(text.into())),
            Err(error) => Err(format!("{error}, nor a trace or file of --stats")),
        }
    }
}

impl fmt::Display for PeakMemory {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeakMemory::Bytes(bytes) => write!(to, "{}", Size(*bytes)),
            PeakMemory::File(path) => write!(to, "{}", path.display()),
        }
    }
}

impl FromStr for LocalLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(number) = text.strip_suffix('%') else {
            return text.parse().map(|Size(bytes)| LocalLimit::Bytes(bytes));
        };
        match number.trim().parse() {
            Ok(percent @ 1..=100) => Ok(LocalLimit::Percent(percent)),
            _ => Err(format!("{text:?} is not a share; write a whole number from 1% to 100%")),
        }
    }
}

impl fmt::Display for LocalLimit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LocalLimit::Bytes(bytes) => Size(*bytes).fmt(to),
            LocalLimit::Percent(percent) => write!(to, "{percent}%"),
        }
    }
}

/// A span of time, written as `500ms`, `10s`, `2m`, `24h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
        units
            .iter()
            .find_map(|(suffix, ms)| Some((text.strip_suffix(suffix)?, *ms)))
            .and_then(|(number, ms)| number.parse::<u64>().ok()?.checked_mul(ms))
            .filter(|ms| *ms > 0)
            .map(|ms| Span(Duration::from_millis(ms)))
            .ok_or_else(|| {
                format!("{text:?} is not a span of time; write it as 500ms, 10s, 2m or 24h")
            })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            ms if ms % 3_600_000 == 0 => write!(to, "{}h", ms / 3_600_000),
            ms if ms % 60_000 == 0 => write!(to, "{}m", ms / 60_000),
            ms if ms % 1_000 == 0 => write!(to, "{}s", ms / 1_000),
            ms => write!(to, "{ms}ms"),
        }
    }
}

/// What a blade's memory is made of, by the name that [`farpool_blade`] knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing(pub BackingKind);

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Backing).map_err(|error: BackingKindError| error.to_string())
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            BackingKind::Automatic => write!(to, "auto"),
            BackingKind::Memfd => write!(to, "memfd"),
            BackingKind::Anonymous => write!(to, "anonymous"),
            BackingKind::Hugetlb => write!(to, "hugetlb"),
            BackingKind::File(path) => write!(to, "file:{}", path.display()),
        }
    }
}

/// Where a blade is, as [`farpool_wire::Address`] reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BladeAddress(pub Address);

impl FromStr for BladeAddress {
    type Err = String;

    /// Host names are resolved here, once. Programs and blades use numbers only, because resolving
    /// would run C library code inside the program that uses far memory.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Err(AddressError::Host(_)) => resolve(text),
            parsed => parsed.map(BladeAddress).map_err(|error| error.to_string()),
        }
    }
}

/// Resolves `tcp://NAME:PORT`. Prefers the first IPv4 address, as blades listen on IPv4 by default.
fn resolve(text: &str) -> Result<BladeAddress, String> {
    let named = text.strip_prefix("tcp://").unwrap_or(text);
    let error = match named.to_socket_addrs() {
        Ok(found) => {
            let found: Vec<SocketAddr> = found.collect();
            let best = found.iter().find(|at| at.is_ipv4()).or(found.first());
            if let Some(best) = best {
                return Ok(BladeAddress(Address::Tcp(*best)));
            }
            "no address".to_owned()
        }
        Err(error) => error.to_string(),
    };
    Err(format!(
        "{text:?} needs a host that can be resolved and a port, as in tcp://192.0.2.1:7070 or \
         tcp://localhost:7070: {error}"
    ))
}

impl fmt::Display for BladeAddress {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// What happens when neither local memory nor the pool has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WhenFull {
    /// The program's next allocation fails.
    Fail,
    /// The program continues slowly, with what local memory holds.
    Slow,
}

impl FromStr for WhenFull {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        clap::ValueEnum::from_str(text, false)
            .map_err(|_| format!("{text:?} is neither fail nor slow"))
    }
}

impl fmt::Display for WhenFull {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            WhenFull::Fail => "fail",
            WhenFull::Slow => "slow",
        })
    }
}

/// What is done about a process of the tree that cannot be held to the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WhenOutside {
    /// The process is named once, and runs.
    Warn,
    /// The whole tree ends with code 120.
    Fail,
    /// The process runs, and nothing is printed.
    Allow,
}

impl FromStr for WhenOutside {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        clap::ValueEnum::from_str(text, false)
            .map_err(|_| format!("{text:?} is neither warn nor fail nor allow"))
    }
}

impl fmt::Display for WhenOutside {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            WhenOutside::Warn => "warn",
            WhenOutside::Fail => "fail",
            WhenOutside::Allow => "allow",
        })
    }
}

/// How the pager gets into the program's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Door {
    /// The sidecar where it works, else the preloaded library.
    Auto,
    /// A preloaded library that intercepts the C library's memory calls.
    Preload,
    /// A separate process that shares the program's address space.
    Sidecar,
}

impl FromStr for Door {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        clap::ValueEnum::from_str(text, false)
            .map_err(|_| format!("{text:?} is none of auto, preload and sidecar"))
    }
}

impl fmt::Display for Door {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Door::Auto => "auto",
            Door::Preload => "preload",
            Door::Sidecar => "sidecar",
        })
    }
}

/// How victims are chosen, by the name that [`farpool_policy`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim(pub VictimKind);

/// What is fetched ahead, by the name that [`farpool_policy`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch(pub PrefetchKind);

/// Parses and prints as the type inside does.
macro_rules! named_by {
    ($($kind:ident),*) => {$(
        impl FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                text.parse().map($kind).map_err(|error: UnknownPolicy| error.to_string())
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(to)
            }
        }
    )*};
}

named_by!(Victim, Prefetch);

/// Reads a value from the configuration file with the parser of the command line.
macro_rules! written_as_text {
    ($($kind:ty),*) => {$(
        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                String::deserialize(from)?.parse().map_err(de::Error::custom)
            }
        }

        impl serde::Serialize for $kind {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
    )*};
}

written_as_text!(
    Size,
    LocalLimit,
    PeakMemory,
    Span,
    Backing,
    BladeAddress,
    Door,
    Persist,
    Redundancy,
    Seal,
    VerifyEvery,
    WhenFull,
    WhenOutside,
    Victim,
    Prefetch
);
written_as_text!(BusyRate, ControlRate, FlashPart, Patience, StoreAt, SwitchAt);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_with_any_suffix() {
        let bytes = |text: &str| text.parse::<Size>().map(|Size(bytes)| bytes);
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("2G"), Ok(2 << 30));
        assert_eq!(bytes("2gb"), Ok(2 << 30));
        assert_eq!(bytes("256MiB"), Ok(256 << 20));
        assert_eq!(bytes("256 MiB"), Ok(256 << 20));
        assert_eq!(bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(bytes("0.25KiB"), Ok(256));
    }

    #[test]
    fn what_is_no_size_is_refused_with_an_example() {
        for text in ["", "G", "12parsecs", "-1", "1e9", "0", "1.2345G", ".5G", "99999999999P", "3%"]
        {
            let error = text.parse::<Size>().expect_err(text);
            assert!(error.contains(text), "{error} does not name {text}");
        }
    }

    #[test]
    fn sizes_print_as_the_largest_whole_unit() {
        for text in ["1PiB", "2GiB", "1536MiB", "4KiB", "4097"] {
            assert_eq!(text.parse::<Size>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn a_local_limit_is_a_size_or_a_share() {
        assert_eq!("25%".parse(), Ok(LocalLimit::Percent(25)));
        assert_eq!("1GiB".parse(), Ok(LocalLimit::Bytes(1 << 30)));
        for text in ["0%", "101%", "%", "12.5%", "-5%"] {
            assert!(text.parse::<LocalLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_of_a_host_is_looked_up_and_kept_as_a_number() {
        let address = "tcp://localhost:7070".parse::<BladeAddress>().expect("localhost");
        assert!(["tcp://127.0.0.1:7070", "tcp://[::1]:7070"].contains(&&*address.to_string()));
        let error = "tcp://localhost".parse::<BladeAddress>().expect_err("no port");
        assert!(error.contains("a port") && error.contains("tcp://localhost:7070"), "{error}");
        assert!("http://localhost:1".parse::<BladeAddress>().is_err());
    }

    #[test]
    fn spans_and_backings_read_back_what_they_print() {
        for text in ["500ms", "10s", "2m"] {
            assert_eq!(text.parse::<Span>().expect(text).to_string(), text);
        }
        for text in ["auto", "memfd", "anonymous", "hugetlb", "file:/dev/dax0.0"] {
            assert_eq!(text.parse::<Backing>().expect(text).to_string(), text);
        }
        for text in ["8MiB", "unlimited"] {
            assert_eq!(text.parse::<BusyRate>().expect(text).to_string(), text);
        }
        assert!("fast".parse::<BusyRate>().is_err_and(|text| text.contains("unlimited")));
        for text in ["1000", "20000", "unlimited"] {
            assert_eq!(text.parse::<ControlRate>().expect(text).to_string(), text);
        }
        for text in ["0", "999", "-1", "1MiB", "fast"] {
            assert!(text.parse::<ControlRate>().is_err_and(|error| error.contains(text)));
        }
        assert!("10".parse::<Span>().is_err());
        assert!("0s".parse::<Span>().is_err());
        assert!("file:".parse::<Backing>().is_err());
    }
}
