//! The rows: where a program's memory can be, and how much of it may be local.

use std::fmt;

use farpool_bench::stage;

/// Local limits of the rows, in percent of what the program has resident when all is local.
pub const LIMIT_PERCENTS: [u8; 2] = [50, 25];

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Local,
    FarShm(u8),
    FarTcp(u8),
    SwapDisk(u8),
    SwapZram(u8),
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Local => to.write_str("all-local"),
            Place::FarShm(percent) => write!(to, "farpool shm {percent}%"),
            Place::FarTcp(percent) => write!(to, "farpool tcp {percent}%"),
            Place::SwapDisk(percent) => write!(to, "kernel disk swap {percent}%"),
            Place::SwapZram(percent) => write!(to, "kernel zram {percent}%"),
        }
    }
}

impl Place {
    /// Every place but all-local whose name contains `only`.
    pub fn all(only: Option<&str>) -> Vec<Place> {
        let kinds = [Place::FarShm, Place::FarTcp, Place::SwapDisk, Place::SwapZram];
        let places = LIMIT_PERCENTS.iter().flat_map(|&percent| kinds.map(|kind| kind(percent)));
        places.filter(|place| place.to_string().contains(only.unwrap_or(""))).collect()
    }

    /// The share of memory that may be local, in percent. None if all is local.
    pub fn percent(self) -> Option<u8> {
        match self {
            Place::Local => None,
            Place::FarShm(percent)
            | Place::FarTcp(percent)
            | Place::SwapDisk(percent)
            | Place::SwapZram(percent) => Some(percent),
        }
    }

    /// Whether the kernel swaps there: a job that does not finish there is a result, not a failure.
    pub fn is_swap(self) -> bool {
        matches!(self, Place::SwapDisk(_) | Place::SwapZram(_))
    }

    /// Its name in a group of places with the same share.
    pub fn kind(self) -> &'static str {
        match self {
            Place::Local => "all-local",
            Place::FarShm(_) => "  farpool, shm blade",
            Place::FarTcp(_) => "  farpool, TCP blade",
            Place::SwapDisk(_) => "  kernel, swap to disk",
            Place::SwapZram(_) => "  kernel, swap to zram",
        }
    }

    /// The stage's place for a program that would hold `bytes` if all were local.
    pub fn of_bytes(self, bytes: u64) -> stage::Place {
        let share = |percent: u8| bytes / 100 * u64::from(percent);
        match self {
            Place::Local => stage::Place::Local,
            Place::FarShm(percent) => stage::Place::Shm(share(percent)),
            Place::FarTcp(percent) => stage::Place::Tcp(share(percent)),
            Place::SwapDisk(percent) => stage::Place::Disk(share(percent)),
            Place::SwapZram(percent) => stage::Place::Zram(share(percent)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_chosen_by_a_part_of_their_name() {
        assert_eq!(Place::all(None).len(), 8);
        assert_eq!(Place::all(Some("zram")), [Place::SwapZram(50), Place::SwapZram(25)]);
        assert_eq!(Place::all(Some("shm 25")), [Place::FarShm(25)]);
        assert!(Place::all(Some("all-local")).is_empty());
    }
}
