//! When a blade slows down for the programs of its own host, and how far.
//!
//! A blade uses the processor time that its clients' pages cost. As long as the host has time to
//! spare, its own programs lose nothing by that. Once they use all of it, they lose exactly what
//! the blade uses; then it serves at most at a rate that costs them less than 2 %.

use crate::RateLimit;

/// Bytes that a blade serves per second and processor of its host while all processors are in use:
/// it costs less than 2 % of a processor (`donor_cost`, the blade and a program that never rests on
/// one processor: 8 MiB/s cost 1.3 to 1.9 %).
pub const BUSY_BYTES_PER_S_PER_PROCESSOR: u64 = 5 << 20;

/// Below this no processor time is left: it is one timer tick of 10 ms in a second, on eight
/// processors.
const FULL_IDLE_PERMILLE: u16 = 50;
/// Above this there is time to spare again.
const SPARE_IDLE_PERMILLE: u16 = 100;
/// Above this programs wait for each other, not only for their own work. A blade that has a
/// processor to itself delays no program, however busy it is.
const WAITING_PERMILLE: u16 = 100;

/// A sample of the host's processors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessorSight {
    /// Number of processors.
    pub processors: u32,
    /// Idle share of their time, in thousandths.
    pub idle_permille: u16,
    /// Share of the time in which some program waited for a processor, in thousandths, if known.
    pub waiting_permille: Option<u16>,
}

/// Decides whether the host's own programs need all of its processors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DonorProtection {
    is_full: bool,
}

impl DonorProtection {
    /// Takes a sample. Returns the blade's rate until the next one: `bytes_per_s` per processor
    /// while all are in use, else unlimited.
    pub fn look(&mut self, sight: &ProcessorSight, bytes_per_s: u64) -> RateLimit {
        let is_waited = sight.waiting_permille.is_none_or(|waiting| waiting >= WAITING_PERMILLE);
        self.is_full = if self.is_full {
            sight.idle_permille < SPARE_IDLE_PERMILLE
        } else {
            sight.idle_permille < FULL_IDLE_PERMILLE && is_waited
        };
        if !self.is_full {
            return RateLimit::UNLIMITED;
        }
        RateLimit::paced(bytes_per_s.saturating_mul(u64::from(sight.processors)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(idle_permille: u16, waiting_permille: Option<u16>) -> ProcessorSight {
        ProcessorSight { processors: 4, idle_permille, waiting_permille }
    }

    #[test]
    fn a_host_with_time_to_spare_serves_all_it_can() {
        let mut donor_protection = DonorProtection::default();
        for seen in [sight(1000, Some(0)), sight(50, Some(900)), sight(0, Some(99))] {
            assert!(donor_protection.look(&seen, 1 << 20).is_unlimited(), "{seen:?}");
        }
    }

    #[test]
    fn a_full_one_holds_back_until_there_is_time_again() {
        let mut donor_protection = DonorProtection::default();
        let limit = donor_protection.look(&sight(10, Some(500)), 1 << 20);
        assert_eq!(limit, RateLimit::paced(4 << 20), "for each processor");
        // Slowing down leaves fewer programs waiting, but only time to spare ends it.
        assert!(!donor_protection.look(&sight(99, Some(0)), 1 << 20).is_unlimited());
        assert!(donor_protection.look(&sight(100, Some(0)), 1 << 20).is_unlimited());
    }

    #[test]
    fn without_pressure_in_the_kernel_idle_time_alone_decides() {
        assert!(!DonorProtection::default().look(&sight(0, None), 1 << 20).is_unlimited());
        let no_bound = RateLimit::UNLIMITED_BYTES_PER_S;
        assert!(DonorProtection::default().look(&sight(0, None), no_bound).is_unlimited());
    }
}
