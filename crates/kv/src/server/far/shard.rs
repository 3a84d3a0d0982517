//! A shard's part in coming and going far memory: it takes shares, empties and drops them, and has its index forget.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::server::lower::Lower;
use crate::server::worker::Worker;
use crate::store::Store;
use crate::tier::far::{Far, GrantNumber, Share};

/// What a shard is told about far memory.
#[derive(Debug)]
pub enum FarOrder {
    /// Use this, too.
    Take { share: Box<Share>, held: Arc<Held> },
    /// Empty it: after `until` whatever is left is dropped. What is worth it moves or goes to flash.
    Empty { grant: GrantNumber, until: Instant },
    /// Its memory is gone, or has to be at once.
    Drop { grant: GrantNumber, is_lost: bool },
}

/// How many shards hold a way to a piece of far memory.
#[derive(Debug, Default)]
pub struct Held(AtomicUsize);

impl Held {
    pub(super) fn by(shards: usize) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(shards)))
    }

    /// Whether no shard has anything to do with it any more.
    pub(super) fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    fn give_up(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What became of items whose far memory had to be given back, or was lost.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimCounts {
    pub dropped: u64,
    /// They are on flash.
    pub spilled: u64,
    /// Their memory went without notice.
    pub lost: u64,
}

/// Shares that have to be given back, and zones that the index is to forget.
#[derive(Debug, Default)]
pub struct Reclaim {
    pub(in crate::server) counts: ReclaimCounts,
    held: Vec<(GrantNumber, Arc<Held>)>,
    /// When the rest of each is dropped; None once it was.
    leaving: Vec<(GrantNumber, Option<Instant>)>,
    forgetting: Option<Forgetting>,
}

/// A walk over the index.
#[derive(Debug)]
struct Forgetting {
    zones: Vec<usize>,
    part: usize,
}

impl Reclaim {
    pub(in crate::server) fn is_busy(&self) -> bool {
        !self.leaving.is_empty() || self.is_forgetting()
    }

    pub(in crate::server) const fn is_forgetting(&self) -> bool {
        self.forgetting.is_some()
    }

    fn obey(&mut self, far: &mut Far, order: FarOrder, has_flash: bool) {
        match order {
            FarOrder::Take { share, held } => {
                self.held.push((share.grant, held));
                far.take_share(*share);
            }
            FarOrder::Empty { grant, until } => {
                far.leave_share(grant);
                // Nothing in it has anywhere to go: its donor need not wait.
                let is_pointless = !has_flash && !far.has_zones();
                if is_pointless {
                    far.drop_share(grant, false);
                }
                // What was dropped stays dropped, and the nearer deadline holds.
                let known = self.leaving.iter().find(|(it, _)| *it == grant).map(|it| it.1);
                let until = known.unwrap_or(Some(until)).map(|known| known.min(until));
                self.leaving.retain(|(it, _)| *it != grant);
                self.leaving.push((grant, until.filter(|_| !is_pointless)));
            }
            FarOrder::Drop { grant, is_lost } => {
                far.drop_share(grant, is_lost);
                self.leaving.retain(|(it, _)| *it != grant);
                self.leaving.push((grant, None));
            }
        }
    }

    /// Empties the next zone, drops what is late, gives up shares with nothing left, and forgets a part.
    /// `now` is given now and then.
    pub(in crate::server) fn go_on(
        &mut self,
        far: &mut Far,
        store: &mut Store,
        is_backed_up: bool,
        now: Option<Instant>,
    ) {
        if !self.leaving.is_empty() {
            if !is_backed_up {
                far.empty_next();
            }
            for (grant, until) in &mut self.leaving {
                if now.zip(*until).is_some_and(|(now, until)| now >= until) {
                    *until = None;
                    far.drop_share(*grant, false);
                }
            }
            let ended: Vec<GrantNumber> = self
                .leaving
                .extract_if(.., |(grant, _)| far.end_share(*grant))
                .map(|it| it.0)
                .collect();
            for (_, held) in self.held.extract_if(.., |(grant, _)| ended.contains(grant)) {
                held.give_up();
            }
        }
        self.forget(far, store);
    }

    fn forget(&mut self, far: &mut Far, store: &mut Store) {
        let Some(walk) = &mut self.forgetting else {
            let zones = far.to_forget();
            if !zones.is_empty() {
                self.forgetting = Some(Forgetting { zones, part: 0 });
            }
            return;
        };
        let counts = &mut self.counts;
        let goes_on = store.forget_far_in(walk.part, |place| {
            let gone = far.gone_at(place);
            counts.lost += u64::from(gone == Some(true));
            counts.dropped += u64::from(gone == Some(false));
            gone.is_some()
        });
        walk.part += 1;
        if !goes_on {
            far.forgotten(&walk.zones);
            self.forgetting = None;
        }
    }
}

impl Worker {
    pub(in crate::server) fn obey_far(&mut self, order: FarOrder) {
        if let Some(Lower { far: Some(far), flash, reclaim, .. }) = &mut self.lower {
            reclaim.obey(far, order, flash.is_some());
        }
        // Shares without anything in them end at once.
        self.poll_lower(None);
    }
}
