//! Parts of the victim buffer whose frames have different rights: UFFDIO_MOVE requires source and
//! destination to have the same rights, including the right to write.

use farpool_units::PAGE_BYTES;

use crate::space::units::CHUNK_PAGES;
use crate::sys::{self, Protection};

/// Trays for memory that may be read and written, which is nearly all memory: 512 MiB of addresses.
const READ_WRITE_TRAYS: usize = 2048;
/// For memory that may be executed, too (code generated at run time): 128 MiB.
const READ_WRITE_EXECUTE_TRAYS: usize = 512;
/// For memory that may be written and not read, which hardly any program has: 16 MiB.
const WRITE_TRAYS: usize = 64;

/// A part of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Zone {
    ReadWrite,
    Write,
    /// From here on: only where this process may have executable memory.
    ReadWriteExecute,
    WriteExecute,
}

impl Zone {
    pub const ALL: [Zone; 4] =
        [Zone::ReadWrite, Zone::Write, Zone::ReadWriteExecute, Zone::WriteExecute];

    /// The number of its trays.
    pub const fn trays(self) -> usize {
        match self {
            Zone::ReadWrite => READ_WRITE_TRAYS,
            Zone::ReadWriteExecute => READ_WRITE_EXECUTE_TRAYS,
            Zone::Write | Zone::WriteExecute => WRITE_TRAYS,
        }
    }

    /// The first of its trays.
    pub const fn first_tray(self) -> usize {
        let (mut first, mut before) = (0, 0);
        while before < self as usize {
            first += Zone::ALL[before].trays();
            before += 1;
        }
        first
    }

    /// The rights of its frames.
    pub fn protection(self) -> Protection {
        let can_read = matches!(self, Zone::ReadWrite | Zone::ReadWriteExecute);
        let can_execute = matches!(self, Zone::ReadWriteExecute | Zone::WriteExecute);
        Protection { can_read, can_write: true, can_execute }
    }

    /// The zone that a tray belongs to.
    pub fn of_tray(tray: u16) -> Zone {
        let is_past = |zone: &&Zone| zone.first_tray() + zone.trays() <= usize::from(tray);
        let index = Zone::ALL.iter().take_while(is_past).count();
        assert!(index < Zone::ALL.len(), "tray {tray} of {}", TRAYS);
        Zone::ALL[index]
    }
}

/// Maps the buffer. Returns its address and its zones.
pub fn map(recycles: bool, executes: bool) -> Result<(usize, &'static [Zone]), std::io::Error> {
    let all: &[Zone] = &Zone::ALL;
    let zones = match (recycles, executes) {
        (true, _) => &all[..=Zone::ReadWrite as usize],
        (false, false) => &all[..Zone::ReadWriteExecute as usize],
        (false, true) => all,
    };
    let count = zones.iter().map(|zone| zone.trays()).sum::<usize>();
    let base = sys::map_uncounted(count * TRAY_BYTES)?;
    for zone in zones.iter().filter(|zone| **zone != Zone::ReadWrite) {
        let (start, bytes) = (base + zone.first_tray() * TRAY_BYTES, zone.trays() * TRAY_BYTES);
        if sys::protect(start, bytes, zone.protection()).is_err() {
            // A system policy forbids executable memory.
            sys::unmap(start, (count - zone.first_tray()) * TRAY_BYTES);
            return Ok((base, &all[..*zone as usize]));
        }
    }
    Ok((base, zones))
}

/// Trays of a process: 672 MiB of addresses. When all trays of a zone hold something, evicting such
/// memory waits for the blade.
pub const TRAYS: usize = Zone::WriteExecute.first_tray() + Zone::WriteExecute.trays();

pub const TRAY_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tray_is_of_one_zone() {
        let mut trays = 0;
        for zone in Zone::ALL {
            assert_eq!(zone.first_tray(), trays);
            trays += zone.trays();
            for tray in [zone.first_tray(), trays - 1] {
                assert_eq!(Zone::of_tray(u16::try_from(tray).expect("a number")), zone);
            }
        }
        assert_eq!(trays, TRAYS);
    }
}
