//! Frames and allowance for pages that are about to arrive, and how long a fault waits for them.

use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_units::exactly;

use crate::fault::thread::FaultThread;
use crate::space::frames::{FrameRun, FrameSlot};

/// A fault waits at most this long, in total, for the evictor to free a frame.
const FRAME_WAIT: Duration = Duration::from_millis(50);
/// A fault waits at most this long for new allowance before it takes from the victim buffer.
const ROOM_WAIT: Duration = Duration::from_millis(5);
/// The same with a full pool, or with all memory pinned, when hardly anything can be freed: the
/// program is slowed, and goes over the limit.
const FRAME_WAIT_VAIN: Duration = Duration::from_millis(1);
/// The frames are checked at least this often during the wait.
const FRAME_WAIT_STEP: Duration = Duration::from_millis(1);
/// The same during another process's turn, which lasts longer and needs the processor.
const TURN_WAIT_STEP: Duration = Duration::from_millis(10);

impl FaultThread {
    /// Takes free frames, without waiting.
    pub(super) fn frame_run(&self, wanted: usize) -> Option<FrameRun> {
        let (run, _) = self.core.frames.take(wanted)?;
        Some(run)
    }

    /// Takes new pages from the allowance. `waits`: gives the evictor, which in Solo works on this
    /// CPU when this thread does not, the time to free memory.
    pub(super) fn spend(&mut self, pages: usize, waits: bool) -> bool {
        let pages = exactly(pages);
        let core = self.core;
        if core.budget.try_spend(pages) {
            return true;
        }
        let is_vain = core.is_vain() || core.leaving.load(std::sync::atomic::Ordering::Relaxed);
        if !waits || !core.crew.is_solo() || core.gate.is_shut() || is_vain {
            return false;
        }
        let deadline = Instant::now() + ROOM_WAIT;
        loop {
            let version = core.frames.version();
            if core.budget.try_spend(pages) {
                return true;
            }
            if Instant::now() >= deadline || core.gate.is_shut() {
                return false;
            }
            core.budget.kick();
            core.frames.wait(version, FRAME_WAIT_STEP);
        }
    }

    /// How long to wait for a frame, and how long between two checks.
    fn patience(&self) -> (Duration, Duration) {
        use std::sync::atomic::Ordering::Relaxed;
        let core = self.core;
        if core.leaving.load(Relaxed) {
            // Nothing is moved out any more.
            (Duration::ZERO, FRAME_WAIT_STEP)
        } else if core.out_of_turn.load(Relaxed) {
            (FRAME_WAIT, TURN_WAIT_STEP)
        } else if core.least.load(Relaxed)
            || core.refused.load(Relaxed)
            || core.is_vain() && core.is_unmovable.load(Relaxed)
        {
            (Duration::ZERO, FRAME_WAIT_STEP)
        } else if core.is_vain() {
            (FRAME_WAIT_VAIN, FRAME_WAIT_STEP)
        } else {
            (FRAME_WAIT, FRAME_WAIT_STEP)
        }
    }

    /// A free frame; waits for the evictor if need be. None: take new memory, which is paid for or
    /// cannot be avoided.
    pub(super) fn frame(&mut self, may_overrun: bool) -> Option<FrameSlot> {
        let (wait, step) = self.patience();
        let deadline = Instant::now() + wait;
        loop {
            let version = self.core.frames.version();
            if let Some((run, _)) = self.core.frames.take(1) {
                return Some(run.first);
            }
            if self.core.budget.try_spend(1) {
                return None;
            }
            if Instant::now() >= deadline || self.core.gate.is_shut() {
                if may_overrun {
                    self.core.count(Counter::Overruns, 1);
                    self.core.budget.overdraw(1);
                }
                return None;
            }
            self.core.budget.kick();
            self.core.frames.wait(version, step);
        }
    }
}
