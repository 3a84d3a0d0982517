//! The empty trays, and the trays whose pages are on the blade. Pure.

use std::collections::VecDeque;
use std::ops::Range;

use farpool_units::exactly;

use crate::space::frames::zones::Zone;

/// Trays that are currently neither filled nor written.
#[derive(Debug)]
pub struct Queues {
    /// The empty trays of each zone.
    pub vacant: [Vacant; Zone::ALL.len()],
    /// Trays whose pages are on the blade, oldest first.
    pub clean: VecDeque<u16>,
}

/// Empty trays of a zone.
#[derive(Debug, Default)]
pub struct Vacant {
    /// Trays that have been used, the longest empty first, so that trays filled one after another
    /// are neighbours.
    pub used: VecDeque<u16>,
    /// Trays that were never used. A process that needs few trays takes little memory, for the
    /// table of trays and for page tables.
    fresh: Range<usize>,
}

impl Queues {
    /// The queues of an empty buffer with these zones.
    pub fn new(zones: &[Zone]) -> Queues {
        let vacant = Zone::ALL.map(|zone| {
            let trays = if zones.contains(&zone) { zone.trays() } else { 0 };
            let fresh = zone.first_tray()..zone.first_tray() + trays;
            Vacant { used: VecDeque::with_capacity(trays), fresh }
        });
        let count = zones.iter().map(|zone| zone.trays()).sum();
        Queues { vacant, clean: VecDeque::with_capacity(count) }
    }

    /// How many trays are empty.
    pub fn empties(&self) -> usize {
        self.vacant.iter().map(|vacant| vacant.used.len() + vacant.fresh.len()).sum()
    }

    /// The queue for a used tray of this zone once it is empty.
    pub fn vacant_of(&mut self, tray: u16) -> &mut VecDeque<u16> {
        &mut self.vacant[Zone::of_tray(tray) as usize].used
    }
}

impl Vacant {
    /// Takes an empty tray, used ones first.
    pub fn take(&mut self) -> Option<u16> {
        // A tray's number: there are fewer than 2^16.
        self.used.pop_front().or_else(|| self.fresh.next().map(exactly))
    }
}
