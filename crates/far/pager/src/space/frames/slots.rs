//! Names of frames: single ones, runs, and frames by tray. Pure.

use crate::space::units::CHUNK_PAGES;

/// Place of one frame in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameSlot {
    pub tray: u16,
    pub index: u8,
}

impl FrameSlot {
    pub fn bit(self) -> u64 {
        1 << self.index
    }
}

/// A run of neighbouring frames that were handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRun {
    pub first: FrameSlot,
    pub count: usize,
}

impl FrameRun {
    /// The run's frame at `offset`, counted from the first; or the place after the run, which a
    /// tray does not have after its last frame.
    pub fn slot(&self, offset: usize) -> FrameSlot {
        let index = usize::from(self.first.index) + offset;
        assert!(index <= CHUNK_PAGES, "frame {index} of a tray of {CHUNK_PAGES}");
        #[allow(clippy::cast_possible_truncation)] // At most 64, as was just asserted.
        let index = index as u8;
        FrameSlot { index, ..self.first }
    }
}

/// Frames of one tray that were taken to be released.
#[derive(Clone, Copy, Debug)]
pub struct TakenTray {
    pub(super) tray: u16,
    pub(super) frames: u64,
    /// The tray has no other frame, and gets none: its addresses can be released as a whole.
    pub(super) whole: bool,
}

impl TakenTray {
    /// How many frames were taken.
    pub fn pages(&self) -> i64 {
        i64::from(self.frames.count_ones())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behind_the_last_frame_of_a_tray_is_none() {
        let run = FrameRun { first: FrameSlot { tray: 3, index: 60 }, count: 4 };
        assert_eq!(run.slot(3), FrameSlot { tray: 3, index: 63 });
        assert_eq!(usize::from(run.slot(run.count).index), CHUNK_PAGES);
    }
}
