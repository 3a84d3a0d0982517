//! How much a server may lend: harvest slowly, give back fast.
//!
//! Memtrade takes 64 MiB of *used* memory every 5 minutes and gives back 256 MiB, doubling. Here
//! only memory that the node's programs do not use at all is lent, so the steps are larger, and
//! memory is given back at once.
//!
//! Invariants: the offer never exceeds the ceiling; it rises by at most one step per interval.

use std::time::Duration;

use farpool_units::SUPERPAGE_BYTES;

use crate::classify::{Class, MemoryUse, Thresholds};

/// Share of the node's memory, thousandths, by which the offer may rise in one interval. 16 steps
/// take it from nothing to everything, so a burst of the node's own programs finds most of it free.
pub const HARVEST_STEP_PERMILLE: u64 = 62;
/// Time between two steps up, milliseconds.
pub const HARVEST_INTERVAL_MS: u64 = 1_000;
/// Time for which the offer does not rise after it had to fall, milliseconds: a program that grew
/// once tends to grow again.
pub const HARVEST_HOLD_MS: u64 = 10_000;
/// A node looks at its memory a tenth of the time at most. How much of what is lent was written
/// takes the kernel 10 µs for each superpage of 16 MiB, 0.7 s for a TiB: then a look is due every
/// 7 s, in which a program of such a machine does not outrun what is never lent of it.
const LOOK_REST_FACTOR: u32 = 10;
/// Share of the memory, thousandths, left between what is offered and the level at which grants
/// are reclaimed: small changes of the node's own use must not take memory from a client.
pub const HARVEST_MARGIN_PERMILLE: u64 = 50;

/// What a server offers, and when that last moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Harvest {
    /// Memory that may be lent in all, including what is already lent.
    pub offered_bytes: u64,
    /// Time before which the offer does not rise.
    pub rise_after: Duration,
}

/// The level above which grants are reclaimed: what `usage` leaves below MEM_MAX_LOW, or 0 if the
/// node is not a server (section 4.3, RECLAIM_MEM).
#[must_use]
pub fn lend_limit_bytes(thresholds: &Thresholds, class: Class, usage: &MemoryUse) -> u64 {
    match class {
        Class::Server => {
            thresholds.max_low_bytes(usage.total_bytes).saturating_sub(usage.used_bytes)
        }
        Class::Neutral | Class::Client => 0,
    }
}

/// The most that is offered when no more than `limit_bytes` may be lent; see [`lend_limit_bytes`].
pub(crate) fn ceiling_bytes(limit_bytes: u64, total_bytes: u64) -> u64 {
    let margin = total_bytes / 1000 * HARVEST_MARGIN_PERMILLE;
    limit_bytes.saturating_sub(margin) / SUPERPAGE_BYTES * SUPERPAGE_BYTES
}

/// Returns the offer after one observation of `limit_bytes` (see [`lend_limit_bytes`]) at `now`.
#[must_use]
pub fn next_harvest(old: Harvest, limit_bytes: u64, total_bytes: u64, now: Duration) -> Harvest {
    let ceiling = ceiling_bytes(limit_bytes, total_bytes);
    if ceiling < old.offered_bytes {
        return Harvest {
            offered_bytes: ceiling,
            rise_after: now + Duration::from_millis(HARVEST_HOLD_MS),
        };
    }
    if now < old.rise_after || ceiling == old.offered_bytes {
        return old;
    }
    let step = (total_bytes / 1000 * HARVEST_STEP_PERMILLE).max(SUPERPAGE_BYTES);
    let step = step / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
    Harvest {
        offered_bytes: ceiling.min(old.offered_bytes.saturating_add(step)),
        rise_after: now + Duration::from_millis(HARVEST_INTERVAL_MS),
    }
}
/// Returns the time from one look at the memory to the next, if the last one took so long.
#[must_use]
pub fn look_interval(usual: Duration, took: Duration) -> Duration {
    usual.max(took * LOOK_REST_FACTOR)
}
