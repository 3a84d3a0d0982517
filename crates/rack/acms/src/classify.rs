//! Client, neutral or server, from a node's own memory use (ACMS, Samih 2011, section 4.2 and
//! Figure 3).
//!
//! Invariants:
//! - Use that stays within a guard band (LOW..=HIGH of one threshold) never changes the class.
//! - One observation moves the class by one step: neutral lies between client and server.

use std::fmt;
use std::str::FromStr;

use farpool_units::at_most;
use thiserror::Error;

/// At this memory pressure a node stops lending, whatever its use: its programs already wait for
/// memory 5 % of the time.
pub const PRESSURE_STOP_PERMILLE: u16 = 50;
/// Below this pressure a node may lend again; the gap is the guard band of the pressure.
pub const PRESSURE_RESUME_PERMILLE: u16 = 10;

/// What a node is to the others (section 4.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Much free memory: lends.
    Server,
    /// Enough for itself, neither lends nor borrows.
    Neutral,
    /// Needs more than it has: borrows.
    Client,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Neutral => "neutral",
            Self::Client => "client",
        })
    }
}

/// One observation of a node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryUse {
    /// What the node's own programs need: local memory plus their memory on other nodes, without
    /// what the node lends. It may exceed the total. Counting far pages keeps a client a client
    /// once its pages have moved out; leaving lent memory out keeps a server a server.
    pub used_bytes: u64,
    /// The node's memory.
    pub total_bytes: u64,
    /// Share of time in which programs waited for memory, thousandths (PSI "some"), if known.
    pub pressure_permille: Option<u16>,
}

impl MemoryUse {
    /// Use as a share of the total in thousandths; a node without memory is full.
    fn permille(&self) -> u64 {
        if self.total_bytes == 0 {
            return u64::MAX;
        }
        let scaled = u128::from(self.used_bytes) * 1000 / u128::from(self.total_bytes);
        at_most(scaled)
    }
}

/// A guard band: LOW and HIGH of one threshold, in percent of the node's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Band {
    /// Lower edge.
    pub low_percent: u8,
    /// Upper edge.
    pub high_percent: u8,
}

/// Why thresholds were refused.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ThresholdError {
    /// Not LOW%:HIGH%.
    #[error("threshold \"{0}\" is not LOW%:HIGH%, for example 40%:50%")]
    Form(String),
    /// Over 100.
    #[error("threshold {0}% is above 100%: give a share of the node's memory")]
    AboveAll(u8),
    /// LOW not under HIGH.
    #[error("guard band {low}%:{high}% is empty or reversed: LOW must be below HIGH")]
    Reversed {
        /// As given.
        low: u8,
        /// As given.
        high: u8,
    },
    /// The bands touch or cross.
    #[error(
        "--min ends at {min_high}% and --max begins at {max_low}%: there must be room for neutral \
         nodes between them"
    )]
    Crossed {
        /// MEM_MIN_HIGH.
        min_high: u8,
        /// MEM_MAX_LOW.
        max_low: u8,
    },
    /// Nothing can be below 0 %.
    #[error("--min begins at 0%: no node would ever lend; begin above 0%")]
    NeverServer,
}

impl FromStr for Band {
    type Err = ThresholdError;

    fn from_str(text: &str) -> Result<Self, ThresholdError> {
        let form = || ThresholdError::Form(text.to_owned());
        let (low, high) = text.split_once(':').ok_or_else(form)?;
        let percent = |part: &str| {
            let digits = part.trim().strip_suffix('%').ok_or_else(form)?;
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            if plain { digits.parse::<u8>().map_err(|_| form()) } else { Err(form()) }
        };
        Self::new(percent(low)?, percent(high)?)
    }
}

impl Band {
    /// A band from `low` to `high`.
    ///
    /// # Errors
    /// Says which edge is wrong.
    pub fn new(low: u8, high: u8) -> Result<Self, ThresholdError> {
        if let Some(over) = [low, high].into_iter().find(|percent| *percent > 100) {
            return Err(ThresholdError::AboveAll(over));
        }
        if low >= high {
            return Err(ThresholdError::Reversed { low, high });
        }
        Ok(Self { low_percent: low, high_percent: high })
    }
}

impl fmt::Display for Band {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%:{}%", self.low_percent, self.high_percent)
    }
}

/// The four thresholds (section 4.2): MEM_MIN_LOW < MEM_MIN_HIGH < MEM_MAX_LOW < MEM_MAX_HIGH.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thresholds {
    min: Band,
    max: Band,
}

impl Default for Thresholds {
    /// `--min 40%:50% --max 80%:90%`.
    fn default() -> Self {
        Self {
            min: Band { low_percent: 40, high_percent: 50 },
            max: Band { low_percent: 80, high_percent: 90 },
        }
    }
}

impl Thresholds {
    /// Both bands, checked against each other.
    ///
    /// # Errors
    /// Says which edge is wrong.
    pub fn new(min: Band, max: Band) -> Result<Self, ThresholdError> {
        let min = Band::new(min.low_percent, min.high_percent)?;
        let max = Band::new(max.low_percent, max.high_percent)?;
        if min.low_percent == 0 {
            return Err(ThresholdError::NeverServer);
        }
        if min.high_percent >= max.low_percent {
            return Err(ThresholdError::Crossed {
                min_high: min.high_percent,
                max_low: max.low_percent,
            });
        }
        Ok(Self { min, max })
    }

    /// The lower guard band.
    #[must_use]
    pub fn min(&self) -> Band {
        self.min
    }

    /// The upper guard band.
    #[must_use]
    pub fn max(&self) -> Band {
        self.max
    }

    /// Bytes at MEM_MAX_LOW of `total_bytes`: a node's memory may be filled up to here, and a
    /// client wants from others what it needs beyond.
    #[must_use]
    pub fn max_low_bytes(&self, total_bytes: u64) -> u64 {
        total_bytes / 100 * u64::from(self.max.low_percent)
    }

    /// Returns the class after one observation (Figure 3).
    #[must_use]
    pub fn next(&self, class: Class, usage: &MemoryUse) -> Class {
        let used = usage.permille();
        let at = |percent: u8| u64::from(percent) * 10;
        let pressure = usage.pressure_permille.unwrap_or(0);
        match class {
            Class::Server
                if used > at(self.min.high_percent) || pressure >= PRESSURE_STOP_PERMILLE =>
            {
                Class::Neutral
            }
            Class::Neutral if used > at(self.max.high_percent) => Class::Client,
            Class::Neutral
                if used < at(self.min.low_percent) && pressure < PRESSURE_RESUME_PERMILLE =>
            {
                Class::Server
            }
            Class::Client if used < at(self.max.low_percent) => Class::Neutral,
            same => same,
        }
    }
}
