//! Takes free frames, for other pages or to be released. Their pages, if they still were victims,
//! are only far then.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use farpool_units::exactly;

use crate::space::frames::buffer::Frames;
use crate::space::frames::slots::{FrameRun, FrameSlot, TakenTray};
use crate::space::frames::trays::Tray;
use crate::space::page::{PageState, Phase};
use crate::space::superpage::Superpage;
use crate::space::units::{CHUNK_PAGES, NO_TRAY, bits};

impl Frames {
    /// Hands out up to `most` neighbouring free frames, the oldest first. Their pages, if they
    /// still were victims, are only far from now on. Also returns how many pages those were.
    pub fn take(&self, most: usize) -> Option<(FrameRun, u64)> {
        if !self.recycles() {
            return None;
        }
        let mut queues = self.queues.lock().ok()?;
        for _ in 0..queues.clean.len() {
            let tray = *queues.clean.front()?;
            if let Some((run, far)) = self.take_from(tray, most) {
                self.free.fetch_sub(exactly(run.count), Relaxed);
                return Some((run, far));
            }
            queues.clean.pop_front();
            if !self.retire(&mut queues, tray) {
                queues.clean.push_back(tray);
            }
        }
        None
    }

    /// Takes all free frames of the oldest trays, at least `least` in all if there are as many.
    /// Their pages are only far from now on. Appends the taken frames to `taken`.
    pub fn take_trays(&self, least: usize, taken: &mut Vec<TakenTray>) {
        let Ok(mut queues) = self.queues.lock() else { return };
        let mut count = 0;
        for _ in 0..queues.clean.len() {
            if count >= least {
                break;
            }
            let Some(tray) = queues.clean.pop_front() else { break };
            if !self.retire(&mut queues, tray) {
                count += self.take_tray(tray, taken);
                queues.clean.push_back(tray);
            }
        }
        self.free.fetch_sub(exactly(count), Relaxed);
    }

    /// As [`Frames::take_trays`], for the tray of one chunk. Frames that are being written are left
    /// out.
    pub fn take_tray_of(&self, superpage: &Superpage, chunk: usize, taken: &mut Vec<TakenTray>) {
        let Ok(_queues) = self.queues.lock() else { return };
        let tray = superpage.trays[chunk].load(Acquire);
        if tray != NO_TRAY {
            let count = self.take_tray(tray, taken);
            self.free.fetch_sub(exactly(count), Relaxed);
        }
    }

    fn take_tray(&self, tray: u16, taken: &mut Vec<TakenTray>) -> usize {
        let entry = &self.trays[usize::from(tray)];
        let mut frames = 0;
        while let Some((run, _)) = self.take_from(tray, CHUNK_PAGES) {
            (0..run.count).for_each(|offset| frames |= run.slot(offset).bit());
        }
        if frames != 0 {
            let whole = entry.filled.load(SeqCst) == frames;
            taken.push(TakenTray { tray, frames, whole });
        }
        frames.count_ones() as usize
    }

    fn take_from(&self, tray: u16, most: usize) -> Option<(FrameRun, u64)> {
        let entry = &self.trays[usize::from(tray)];
        let free = entry.filled.load(SeqCst)
            & !entry.busy.load(SeqCst)
            & !entry.writing.load(SeqCst)
            & !entry.kept.load(SeqCst);
        let mut run: Option<FrameRun> = None;
        let mut far = 0;
        for index in bits(free) {
            let end = run.map(|run| usize::from(run.first.index) + run.count);
            if end.is_some_and(|end| end != index) || run.is_some_and(|run| run.count >= most) {
                break;
            }
            let valid = entry.valid.load(SeqCst) & (1 << index) != 0;
            let available = if valid { self.let_go(entry, index) } else { entry.is_free(index) };
            if !available {
                if run.is_some() {
                    break;
                }
                continue;
            }
            far += u64::from(valid);
            entry.busy.fetch_or(1 << index, SeqCst);
            let first = FrameSlot { tray, index: exactly(index) };
            run = Some(run.map_or(FrameRun { first, count: 1 }, |run| FrameRun {
                count: run.count + 1,
                ..run
            }));
        }
        run.map(|run| (run, far))
    }

    /// Makes a victim that is on the blade only far, unless it is being taken back.
    fn let_go(&self, entry: &Tray, index: usize) -> bool {
        let Some(page) = self.page_of(entry, index) else {
            return true;
        };
        let state = page.cell().load();
        let far = PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(state.layer());
        if state.phase() != Phase::Victim {
            // Taken back or discarded; the thread that did it clears the valid bit.
            return false;
        }
        // Counted before any thread can see the page as far and count it down again.
        page.superpage.far_pages.fetch_add(1, SeqCst);
        if !page.cell().change(state, far) {
            page.superpage.leave_blade();
            return false;
        }
        page.superpage.give_up_copy(state);
        entry.valid.fetch_and(!(1 << index), SeqCst);
        true
    }

    /// Returns a frame that was handed out and not used.
    pub fn give_back(&self, slot: FrameSlot) {
        let before = self.trays[usize::from(slot.tray)].busy.fetch_and(!slot.bit(), SeqCst);
        assert_ne!(before & slot.bit(), 0, "only what was handed out is given back");
        self.free.fetch_add(1, Relaxed);
        self.announce();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::frames::zones::Zone;
    use crate::space::superpage::Page;
    use crate::space::table::Space;
    use std::sync::atomic::AtomicU64;

    fn victims(space: &Space, frames: &Frames, base: usize, mask: u64) -> (Page, u16) {
        let page = space.page_or_new(base).expect("page");
        let tray = frames.take_empty(Zone::ReadWrite).expect("tray");
        frames.fill(tray, page.superpage, page.chunk(), mask);
        for index in bits(mask) {
            let cell = &page.superpage.pages[page.chunk() * CHUNK_PAGES + index];
            cell.store(PageState::UNTOUCHED.with_phase(Phase::Victim).with_layer(5));
        }
        (page, tray)
    }

    #[test]
    fn frames_are_handed_out_once_and_their_pages_become_far() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b1011_0111);
        assert!(frames.take(1).is_none(), "nothing is free before it is on the blade");
        assert_eq!(frames.begin_write(tray), 0b1011_0111);
        for index in [0, 1, 2, 4, 5, 7] {
            frames.end_write(FrameSlot { tray, index });
        }
        frames.push_clean(tray);
        assert_eq!(frames.free(), 6);
        let (run, far) = frames.take(2).expect("frames");
        assert_eq!((run.first.index, run.count, far), (0, 2, 2));
        let (run, _) = frames.take(9).expect("frames");
        assert_eq!((run.first.index, run.count), (2, 1), "a run has no holes");
        let state = page.cell().load();
        assert_eq!((state.phase(), state.layer()), (Phase::Far, 5));
        assert_eq!(page.superpage.far_pages.load(Relaxed), 3);
    }

    #[test]
    fn a_page_that_is_taken_back_keeps_its_frame_from_others() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b11);
        frames.begin_write(tray);
        frames.end_write(FrameSlot { tray, index: 0 });
        frames.end_write(FrameSlot { tray, index: 1 });
        frames.push_clean(tray);
        page.cell().claim(Phase::Victim, Phase::Fetching).expect("claim");
        let (run, _) = frames.take(4).expect("the other frame");
        assert_eq!((run.first.index, run.count), (1, 1));
        let (slot, stays) = frames.locate(page).expect("located");
        assert_eq!((slot.index, stays), (0, false));
        frames.moved_away(slot);
        frames.moved_away(run.first);
        assert!(frames.take(1).is_none());
        assert_eq!(page.superpage.trays[0].load(Acquire), NO_TRAY, "the drained tray is retired");
    }

    /// One thread takes pages back while another hands out frames: no frame may go to both.
    #[test]
    fn a_frame_that_was_taken_back_is_not_handed_out() {
        const ROUNDS: u64 = 20_000;
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let page = space.page_or_new(0x1000_0000).expect("page");
        // Both threads poll until a turn begins: a sleeping barrier would let one finish before the
        // other wakes.
        let turn = AtomicU64::new(0);
        let wait_for = |number: u64| {
            while turn.load(SeqCst) < number {
                std::thread::yield_now();
            }
        };
        let take_back = || {
            let mut back = 0_u64;
            for index in (0..CHUNK_PAGES).rev() {
                let page = Page { index, ..page };
                if page.cell().claim(Phase::Victim, Phase::Fetching).is_some() {
                    let (slot, _) = frames.locate(page).expect("located");
                    frames.moved_away(slot);
                    back |= slot.bit();
                }
            }
            back
        };
        let hand_out = || {
            let (_, tray) = victims(&space, &frames, 0x1000_0000, u64::MAX);
            frames.begin_write(tray);
            (0..64).for_each(|index| frames.end_write(FrameSlot { tray, index }));
            frames.push_clean(tray);
            turn.fetch_add(1, SeqCst);
            let mut handed_out = Vec::new();
            while let Some((run, _)) = frames.take(usize::MAX) {
                handed_out.extend((0..run.count).map(|offset| run.slot(offset)));
            }
            handed_out
        };
        let taken_back = AtomicU64::new(0);
        let rounds = std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    wait_for(round * 2 + 1);
                    taken_back.store(take_back(), SeqCst);
                    turn.fetch_add(1, SeqCst);
                }
            });
            (0..ROUNDS).find(|round| {
                let handed_out = hand_out();
                wait_for(round * 2 + 2);
                handed_out.iter().for_each(|slot| frames.moved_away(*slot));
                let mask = handed_out.iter().fold(0, |mask, slot| mask | slot.bit());
                let right = mask ^ taken_back.load(SeqCst) == u64::MAX && frames.is_empty();
                if !right {
                    turn.store(u64::MAX / 2, SeqCst);
                }
                !right
            })
        });
        assert_eq!(rounds, None, "a frame went to both, or to nobody, in this round");
    }

    #[test]
    fn a_page_taken_back_before_the_write_is_not_written() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b1);
        page.cell().claim(Phase::Victim, Phase::Fetching).expect("claim");
        assert_eq!(frames.begin_write(tray), 0);
    }
}
