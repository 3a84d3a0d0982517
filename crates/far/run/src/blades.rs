//! The blades of a run under way: adds some, has others drained, and knows when a blade is no
//! longer used.

use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

use farpool_api::placements::Reach;
use farpool_board::{
    BLADE_ENTRIES, BladeOffer, BladeRole, Board, GROUPS_CROWDED, Sealing, address_fits,
};
use farpool_wire::Address;

use crate::keeper::may_pass_a_network;
use crate::{RunError, dialing};

/// One blade of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BladeUse {
    /// Its entry on the board.
    pub entry: usize,
    /// Tells it from earlier and later blades in the same entry.
    pub generation: u32,
    pub address: String,
    /// Its pages are being moved to the other blades.
    pub is_leaving: bool,
    /// Processes that may still have pages there.
    pub processes: usize,
    /// Processes that follow the table and have none there: they have left the blade, or could not
    /// connect to it.
    pub without: usize,
    /// Some of them find no room elsewhere.
    pub is_stuck: bool,
}

impl BladeUse {
    /// Which processes use it, as placements see it.
    pub(crate) fn reach(&self) -> Reach {
        match (self.processes, self.without) {
            (_, 0) => Reach::All,
            (0, _) => Reach::Nobody,
            _ => Reach::Some,
        }
    }
}

/// Why the blades of a run cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum BladeChangeError {
    #[error("the run has {BLADE_ENTRIES} blades, as many as it can have; let it leave one first")]
    TooMany,
    #[error("the run does not use the blade {address}")]
    Unknown { address: String },
    #[error("the blade {address} is the only one left; add another one first")]
    Last { address: String },
    #[error(
        "the blade {address} would be reached by TCP, and the run began without sealing pages; \
         start it with --seal always to add such a blade later"
    )]
    Unsealed { address: String },
}

/// Reads and changes the blades of a run through its board.
#[derive(Debug)]
pub struct RunBlades<'a> {
    board: &'a Board,
}

impl<'a> RunBlades<'a> {
    pub fn new(board: &'a Board) -> Self {
        RunBlades { board }
    }

    /// All blades, by entry.
    pub fn list(&self) -> Vec<BladeUse> {
        let blades = self.board.header().blades.load();
        let used = blades.entries.into_iter().enumerate();
        let used = used.filter_map(|(entry, blade)| Some((entry, blade?)));
        used.map(|(entry, blade)| {
            let is_leaving = blade.role == BladeRole::Leaving;
            let (mut processes, mut without, mut is_stuck) = (0, 0, false);
            for slot in self.board.processes() {
                let followed = slot.blades_version.load(SeqCst);
                let has_left =
                    followed >= blades.version && slot.blades_left.load(Acquire) & 1 << entry != 0;
                processes += usize::from(followed != 0 && !has_left);
                without += usize::from(followed != 0 && has_left);
                is_stuck |= is_leaving && slot.blades_stuck.load(Acquire) & 1 << entry != 0;
            }
            let (generation, address) = (blade.generation, blade.address);
            BladeUse { entry, generation, address, is_leaving, processes, without, is_stuck }
        })
        .collect()
    }

    /// True if a process has groups with parity of which some lie together, or lack a part, for
    /// want of room where they would be apart.
    pub(crate) fn are_groups_crowded(&self) -> bool {
        self.board.processes().any(|slot| slot.blades_stuck.load(Acquire) & GROUPS_CROWDED != 0)
    }

    /// Adds a blade; from now on memory is taken from it. `folder` is the run's.
    pub fn add(&self, offer: &BladeOffer, folder: &Path) -> Result<(usize, u32), RunError> {
        let address = &offer.address;
        let refused = |reason: String| RunError::Address { address: address.clone(), reason };
        if let Err(error) = address.parse::<Address>() {
            return Err(refused(error.to_string()));
        }
        let sealing = self.board.header().settings().sealing;
        if sealing == Sealing::PlainOnThisHost && may_pass_a_network(address) {
            return Err(BladeChangeError::Unsealed { address: address.clone() }.into());
        }
        if !address_fits(address) {
            return Err(refused("it is too long for the board".into()));
        }
        // Before sidecars read its entry and ask to be connected.
        dialing::name(folder, address)?;
        self.board.header().blades.add(offer).ok_or(BladeChangeError::TooMany.into())
    }

    /// Has everything moved off a blade, by the address as it was given.
    pub fn leave(&self, address: &str) -> Result<BladeUse, RunError> {
        let all = self.list();
        let blade = all.iter().find(|blade| blade.address == address && !blade.is_leaving);
        let address = address.to_owned();
        let Some(blade) = blade else {
            return Err(BladeChangeError::Unknown { address }.into());
        };
        if !all.iter().any(|it| !it.is_leaving && it.entry != blade.entry) {
            return Err(BladeChangeError::Last { address }.into());
        }
        let blades = &self.board.header().blades;
        blades.set_role(blade.entry, blade.generation, BladeRole::Leaving);
        Ok(BladeUse { is_leaving: true, ..blade.clone() })
    }

    /// Frees the entries of leaving blades that no process uses any more. Returns them.
    pub fn forget_left(&self) -> Vec<BladeUse> {
        let mut all = self.list();
        all.retain(|blade| blade.is_leaving && blade.processes == 0);
        all.retain(|it| self.board.header().blades.remove(it.entry, it.generation));
        all.iter().for_each(|blade| self.board.copies().forget_blade(blade.entry));
        all
    }
}

/// Opens the board of a run to change its blades.
pub fn open_board(board_path: &Path) -> Result<Board, RunError> {
    Ok(Board::open_settings(board_path)?)
}
