//! Observes the machine's memory periodically and sets what the blade lends, in a thread of its
//! own, because the donor's programs come first even while a controller does not answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_acms::{Harvest, Thresholds, look_interval};
use farpool_blade::Blade;
use farpool_units::SUPERPAGE_BYTES;

use crate::pressure::{Lending, next_offer};
use crate::shared::{Shared, Wish};
use farpool_host::MemoryFiles;

/// Time between two observations: a program that allocates 1 GiB/s takes 200 MiB meanwhile, which
/// the share of a machine of 1 GiB that is never lent covers. One observation reads a few small
/// files, and asks about each superpage that is lent ([`look_interval`]).
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Lender {
    blade: Arc<Blade>,
    shared: Arc<Shared>,
    files: MemoryFiles,
    thresholds: Thresholds,
    donate_bytes: u64,
    harvest: Harvest,
    started: Instant,
    /// The last observation failed, and that was logged.
    is_blind: bool,
}

impl Lender {
    /// Creates the lender and observes memory once, so that the node's first report has its offer:
    /// what an earlier process has lent is not asked back because this one offers slowly.
    pub(crate) fn new(
        blade: Arc<Blade>,
        shared: Arc<Shared>,
        files: MemoryFiles,
        thresholds: Thresholds,
        donate_bytes: u64,
    ) -> Self {
        let donate_bytes = donate_bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
        let granted_bytes: u64 = blade.grant_specs().iter().map(|spec| spec.bytes).sum();
        let offered_bytes = granted_bytes.min(donate_bytes);
        let mut lender = Self {
            blade,
            shared,
            files,
            thresholds,
            donate_bytes,
            harvest: Harvest { offered_bytes, rise_after: Duration::ZERO },
            started: Instant::now(),
            is_blind: false,
        };
        lender.look();
        lender
    }

    pub(crate) fn run(mut self) {
        while self.shared.wish() != Wish::Stop {
            let begun = Instant::now();
            self.look();
            let interval = look_interval(LOOK_INTERVAL, begun.elapsed());
            self.shared.pause(interval, self.shared.wish());
        }
    }

    fn look(&mut self) {
        let seen = self.files.look().and_then(|sight| Ok((sight, self.blade.lent()?)));
        let (sight, lent) = match seen {
            Ok(seen) => seen,
            Err(error) => {
                if !std::mem::replace(&mut self.is_blind, true) {
                    tracing::error!(%error, "memory use cannot be seen; the offer stays as it is");
                }
                return;
            }
        };
        self.is_blind = false;
        let lending = Lending {
            thresholds: self.thresholds,
            donate_bytes: self.donate_bytes.min(lent.limit_bytes),
            lent_bytes: lent.used_bytes,
            backed_bytes: lent.backed_bytes,
        };
        let next = next_offer(self.harvest, &sight, &lending, self.started.elapsed());
        if next.offered_bytes < self.harvest.offered_bytes {
            tracing::info!(
                from_bytes = self.harvest.offered_bytes,
                to_bytes = next.offered_bytes,
                "this machine's programs need memory: the node lends less"
            );
        }
        self.harvest = next;
        if let Err(error) = self.blade.set_capacity(next.offered_bytes) {
            // Cannot happen: the offer never exceeds the size with which the blade was set up.
            tracing::error!(%error, "the blade does not take its new size");
        }
        self.shared.set_lendable_bytes(next.offered_bytes);
    }
}
