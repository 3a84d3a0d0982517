//! How large everything in the scenario is, and how long its parts take; pure.
//!
//! Invariants, held by a test: A can lend what B's program asks for; B cannot lend; C can lend what
//! the programs of A and B ask for together, but only once its own program has ended.

use std::time::Duration;

use farpool_units::MIB;

/// Far memory is given out in pieces of this size.
const SUPERPAGE_MIB: u64 = 16;
/// A program's memory begins and ends within a superpage, and so do its heap and its stacks.
const QUOTA_EXTRA_MIB: u64 = 48;

/// A program whose memory is partly far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Program {
    /// Its whole memory.
    pub bytes: u64,
    /// The part that may be in local memory.
    pub local_bytes: u64,
    /// What it asks the rack for. A far page takes up a whole superpage, so this is as much as it
    /// has.
    pub quota_bytes: u64,
}

/// Sizes and times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Each host's memory.
    pub host_bytes: u64,
    /// The most that A and C lend.
    pub donate_bytes: u64,
    /// The most that D and E lend: room for one program, not for two.
    pub small_donate_bytes: u64,
    /// B's program, before its demand shrinks.
    pub of_b: Program,
    /// Memory of B's other programs, all local.
    pub own_of_b_bytes: u64,
    /// B's demand after it has shrunk, in steps: the last fits its local memory.
    pub shrunk_bytes: Vec<u64>,
    /// The far part of the big program on A.
    pub of_a: Program,
    /// What the big program keeps local.
    pub own_of_a_bytes: u64,
    /// What C's own program takes until it ends.
    pub own_of_c_bytes: u64,
    /// What each far program reads in a second.
    pub pace_bytes_per_s: u64,
    /// Bandwidth asked for.
    pub rate_bytes_per_s: u64,
    /// When the big program starts, at the earliest.
    pub moment: Duration,
    /// How long the rack is watched after A has become a client.
    pub after: Duration,
    /// How long there is no controller.
    pub outage: Duration,
    /// How long a short cut lasts: less than the 10 s in which a page must come.
    pub short_cut: Duration,
    /// How long the whole scenario of a rack takes, about.
    pub expected: Duration,
}

impl Program {
    /// Makes a program with room in the rack for all of its memory.
    pub fn of_mib(mib: u64, local_mib: u64) -> Program {
        let quota_mib = (mib + QUOTA_EXTRA_MIB).next_multiple_of(SUPERPAGE_MIB);
        Program { bytes: mib * MIB, local_bytes: local_mib * MIB, quota_bytes: quota_mib * MIB }
    }
}

impl Plan {
    /// The whole scenario: the moment comes at the 30th second, as in the paper.
    pub fn full() -> Plan {
        Plan {
            host_bytes: 1024 * MIB,
            donate_bytes: 768 * MIB,
            small_donate_bytes: 336 * MIB,
            of_b: Program::of_mib(200, 64),
            own_of_b_bytes: 730 * MIB,
            shrunk_bytes: [150, 100, 48].map(|mib| mib * MIB).into(),
            of_a: Program::of_mib(280, 64),
            own_of_a_bytes: 670 * MIB,
            own_of_c_bytes: 780 * MIB,
            pace_bytes_per_s: 32 * MIB,
            rate_bytes_per_s: 256 * MIB,
            moment: Duration::from_secs(30),
            after: Duration::from_secs(20),
            outage: Duration::from_secs(6),
            short_cut: Duration::from_secs(4),
            expected: Duration::from_secs(97),
        }
    }

    /// The whole scenario with shorter waits.
    pub fn quick() -> Plan {
        Plan {
            moment: Duration::from_secs(12),
            after: Duration::from_secs(6),
            outage: Duration::from_secs(4),
            short_cut: Duration::from_secs(3),
            expected: Duration::from_secs(72),
            ..Plan::full()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUPERPAGE: u64 = 16 * MIB;
    /// Daemons and pages of files that a host has besides its programs.
    const OVERHEAD: u64 = 40 * MIB;

    /// What a host with this much of its own lends: below 80 %, less a margin of 5 %.
    fn lendable(plan: &Plan, own_bytes: u64) -> u64 {
        let level = plan.host_bytes / 100 * 75;
        level.saturating_sub(own_bytes + OVERHEAD).min(plan.donate_bytes) / SUPERPAGE * SUPERPAGE
    }

    #[test]
    fn who_can_lend_what_makes_the_story_go_as_it_shall() {
        for plan in [Plan::full(), Plan::quick()] {
            let quotas = plan.of_a.quota_bytes + plan.of_b.quota_bytes;
            assert!(lendable(&plan, 0) >= quotas, "C takes both: {plan:?}");
            let room_of_b = lendable(&plan, plan.own_of_b_bytes + plan.of_b.local_bytes);
            assert!(room_of_b < plan.of_a.quota_bytes, "B lends to nobody: {plan:?}");
            assert_eq!(lendable(&plan, plan.own_of_c_bytes), 0, "C is busy: {plan:?}");
            let of_a = plan.own_of_a_bytes + plan.of_a.local_bytes;
            assert!(lendable(&plan, of_a) < plan.of_b.quota_bytes, "A reclaims: {plan:?}");
            let all = of_a + plan.of_b.bytes + OVERHEAD;
            assert!(all < plan.host_bytes, "A holds both for a while: {plan:?}");
            assert!(plan.small_donate_bytes < quotas, "one each: {plan:?}");
            assert!(lendable(&plan, 0) >= plan.small_donate_bytes, "{plan:?}");
            for program in [plan.of_a, plan.of_b] {
                assert!(program.quota_bytes <= plan.small_donate_bytes, "{plan:?}");
            }
            let shrunk = plan.shrunk_bytes.last().expect("steps");
            assert!(*shrunk < plan.of_b.local_bytes, "{plan:?}");
        }
    }

    #[test]
    fn classes_without_a_controller_go_as_the_paper_says() {
        for plan in [Plan::full(), Plan::quick()] {
            let percent = |bytes: u64| (bytes + OVERHEAD / 2) * 100 / plan.host_bytes;
            let of_b = plan.own_of_b_bytes + plan.of_b.bytes;
            assert!(percent(of_b) > 90, "B is a client: {plan:?}");
            let shrunk = plan.own_of_b_bytes + plan.shrunk_bytes.last().expect("steps");
            assert!((50..80).contains(&percent(shrunk)), "then neutral: {plan:?}");
            let of_a = plan.own_of_a_bytes + plan.of_a.bytes;
            assert!(percent(of_a) > 92, "A becomes a client: {plan:?}");
            assert!((50..80).contains(&percent(plan.own_of_c_bytes)), "C is neutral: {plan:?}");
        }
    }
}
