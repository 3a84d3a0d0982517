//! How a run gets more of a rack's memory.
//!
//! With parity a group is on five failure domains, of which a run can have few more. So its
//! segments grow where they are, the smallest first; where one cannot, a further domain is asked
//! for.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_api::SegmentId;
use farpool_api::placements::Need;
use farpool_board::Redundancy;
use farpool_units::plain;

use super::{Agent, BUSY_WAIT, GROW_RETRY, pause_after};
use crate::blades::RunBlades;
use crate::say::say;

/// How long a node takes to serve what was granted, and a process to use it, at most. What they
/// lacked before says nothing meanwhile.
const SETTLING: Duration = Duration::from_secs(2);
/// Most requests at once: each segment grows once, or by halves of that.
const STEPS_LIMIT: usize = 32;

impl Agent {
    /// Asks for more before the granted memory runs out.
    pub(super) fn grow(&mut self) {
        if self.redundancy == Redundancy::Parity {
            return self.grow_groups();
        }
        let is_full = self.board.header().full_reported.load(Relaxed) != 0;
        let wanted = self.placements.wanted(self.far_bytes(), is_full, self.quota_bytes);
        let Some(piece) = wanted.filter(|_| self.may_grow) else {
            return self.forget_need();
        };
        if self.grow_after.is_some_and(|after| Instant::now() < after) {
            return;
        }
        match self.ask_for(&piece, !is_full) {
            Ok(_) => {
                self.board.header().full_reported.store(0, Relaxed);
                self.grow_after = Some(Instant::now() + BUSY_WAIT);
            }
            Err(error) => {
                let pause = pause_after(&error).unwrap_or(GROW_RETRY);
                self.grow_after = Some(Instant::now() + pause);
                self.say_short(&error.to_string());
            }
        }
    }

    /// The same with parity; also when a group finds no room where it would be apart.
    fn grow_groups(&mut self) {
        let (now, board) = (Instant::now(), Arc::clone(&self.board));
        let full_reported = &board.header().full_reported;
        if self.settles_until.is_some_and(|until| now >= until) {
            self.settles_until = None;
            full_reported.store(0, Relaxed);
        }
        let is_full = full_reported.load(Relaxed) != 0;
        let is_crowded = || RunBlades::new(&board).are_groups_crowded();
        let lacks_room = self.settles_until.is_none() && (is_full || is_crowded());
        let goal = self.placements.goal(self.far_bytes(), lacks_room, self.quota_bytes);
        let Some(goal) = goal.filter(|_| self.may_grow) else {
            return self.forget_need();
        };
        if self.grow_after.is_some_and(|after| now < after) {
            return;
        }
        if let Err((why, pause)) = self.grow_to(goal, !is_full) {
            self.grow_after = Some(Instant::now() + pause);
            self.say_short(&why);
        }
    }

    /// The next need waits anew, and is told.
    fn forget_need(&mut self) {
        (self.refused_since, self.said_short) = (None, None);
    }

    fn say_short(&mut self, why: &str) {
        if self.said_short.as_deref() != Some(why) {
            say!("farpool: no more far memory for now: {}", plain(why));
            self.said_short = Some(why.to_owned());
        }
    }

    /// Asks for all that is missing of `goal`. Returns what is refused, and when to ask again.
    fn grow_to(&mut self, goal: u64, may_wait: bool) -> Result<(), (String, Duration)> {
        let mut refused: BTreeSet<SegmentId> = BTreeSet::new();
        for _ in 0..STEPS_LIMIT {
            match self.placements.need_for(goal, &refused) {
                None => return Ok(()),
                Some(Need::Larger { id, more_bytes }) => {
                    match self.tenant.enlarge(id, more_bytes) {
                        Ok(1..) => self.settles_until = Some(Instant::now() + SETTLING),
                        Ok(0) | Err(_) => _ = refused.insert(id),
                    }
                }
                Some(Need::Piece(_)) if !self.placements.has_entry() => {
                    let why = "its segments cannot grow where they are, and it has as many as it \
                               can use";
                    return Err((why.to_owned(), GROW_RETRY));
                }
                Some(Need::Piece(piece)) => match self.ask_for(&piece, may_wait) {
                    Ok(_) => self.settles_until = Some(Instant::now() + SETTLING),
                    Err(error) => {
                        let why = format!("a further failure domain is needed, and {error}");
                        return Err((why, pause_after(&error).unwrap_or(GROW_RETRY)));
                    }
                },
            }
            // What was granted is heard of without waiting.
            let heard = self.exchange(Duration::ZERO);
            heard.map_err(|error| (error.to_string(), GROW_RETRY))?;
        }
        Ok(())
    }
}
