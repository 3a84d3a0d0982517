//! HPL-2011-31, section 4.1: victim policies on the paper's microbenchmark, with one virtual
//! machine and with several.

use farpool_policy::PageCache;
use farpool_policy::cache::Resident;
use farpool_policy::victim::{Clock, Fifo};
use farpool_units::PAGE_BYTES_U64;

use super::sharing::{VmsRun, sharing};
use super::{Claim, ratio, verdict};
use crate::design::{DesignError, Preset};
use crate::synthetic::Synthetic;

/// The seed of the published miss counts.
const MSTRESS_SEED: u64 = 42;

/// Size of an mstress run: HPL-2011-31, section 4.
#[derive(Debug, Clone, Copy)]
pub struct MstressRun {
    /// Pages of memory; 7 GB in the paper.
    pub pages: u32,
    /// References; 10^8 in the paper.
    pub references: usize,
    /// Pages that are local; half of the memory.
    pub local_pages: usize,
}

impl MstressRun {
    /// The paper's own run.
    pub const PAPER: Self =
        Self { pages: 1_835_008, references: 100_000_000, local_pages: 917_504 };
}

/// Faults on pages that were used before, victims, and pages examined to find them.
struct Choosing {
    remote: u64,
    victims: u64,
    looks: u64,
}

fn choose<C: PageCache>(mut cache: C, trace: &Synthetic, spared: impl Fn(&C) -> u64) -> Choosing {
    // A page that was never used has no content: its first reference fetches nothing.
    let mut is_known = vec![false; trace.page_count];
    let (mut remote, mut victims) = (0, 0);
    for &page in &trace.pages {
        let was_known = std::mem::replace(&mut is_known[page as usize], true);
        let is_local = cache.access(page, &mut |_| victims += 1);
        remote += u64::from(was_known && !is_local);
    }
    Choosing { remote, victims, looks: victims + spared(&cache) }
}

/// Section 4.1 of HPL-2011-31: Round-Robin and Clock on mstress.
#[must_use]
pub fn hpl(run: MstressRun) -> Vec<Claim> {
    let trace = Synthetic::mstress(run.pages, run.references, MSTRESS_SEED);
    let page_count = trace.page_count;
    let round_robin = choose(Resident::new(Fifo::new(page_count), run.local_pages), &trace, |_| 0);
    let clock = Resident::new(Clock::new(page_count), run.local_pages);
    let clock = choose(clock, &trace, |cache| cache.policy().spared());
    let on = format!(
        "mstress, {} references to {page_count} pages, {} local",
        run.references, run.local_pages
    );
    let claim =
        |place: &str, claim: &str, paper: &str, ours: String, is_so: bool, why: String| Claim {
            place: place.to_owned(),
            claim: claim.to_owned(),
            on: on.clone(),
            paper: paper.to_owned(),
            ours,
            holds: verdict(is_so),
            why,
        };
    let looks = |choosing: &Choosing| ratio(choosing.looks, choosing.victims);
    let fault_ps = Preset::Ps.design().idle_fetch_ps(PAGE_BYTES_U64);
    let saved_ps =
        u128::from(round_robin.remote.saturating_sub(clock.remote)) * u128::from(fault_ps);
    let extra_looks = clock.looks.saturating_sub(round_robin.looks).max(1);
    let break_even_ns = saved_ps / u128::from(extra_looks) / 1000;
    vec![
        claim(
            "4.1, Fig. 6",
            "Clock causes fewer remote accesses than Round-Robin",
            "fewer",
            format!("{} against {}", clock.remote, round_robin.remote),
            clock.remote < round_robin.remote,
            String::new(),
        ),
        claim(
            "4.1, Fig. 7",
            "Clock costs more time choosing",
            "far more",
            format!(
                "{} pages looked at for a victim, against {}",
                looks(&clock),
                looks(&round_robin)
            ),
            clock.looks * round_robin.victims > round_robin.looks * clock.victims,
            String::new(),
        ),
        claim(
            "4.1, Fig. 8",
            "Round-Robin is faster in the end",
            "faster",
            format!("if a look costs more than {break_even_ns} ns"),
            false,
            format!(
                "the saved faults of {} ns each pay for the looks below that price; the paper's \
                     hypervisor searched page tables under a lock",
                fault_ps / 1000
            ),
        ),
    ]
}

/// Figures 6 and 9 of HPL-2011-31, with several virtual machines.
///
/// # Errors
/// A design cannot be simulated.
pub fn hpl_vms(run: VmsRun) -> Result<Vec<Claim>, DesignError> {
    let mut claims = vec![several_choose(run)];
    claims.extend(sharing(run)?);
    Ok(claims)
}

/// Figure 6: one to three machines whose references alternate, in one local memory of half of their
/// size.
fn several_choose(run: VmsRun) -> Claim {
    let counts: Vec<(u64, u64)> = (1..=3)
        .map(|vms| {
            let trace = interleaved(run, vms);
            let page_count = trace.page_count;
            let local = (page_count / 2).max(1);
            let clock = choose(Resident::new(Clock::new(page_count), local), &trace, |_| 0);
            let round_robin = choose(Resident::new(Fifo::new(page_count), local), &trace, |_| 0);
            (clock.remote, round_robin.remote)
        })
        .collect();
    let told: Vec<String> =
        counts.iter().map(|(clock, robin)| format!("{clock} against {robin}")).collect();
    Claim {
        place: "4.1, Fig. 6".to_owned(),
        claim: "Clock causes fewer remote accesses with 1, 2 and 3 VMs".to_owned(),
        on: format!("mstress, {} references to {} pages a VM", run.references, run.pages),
        paper: "fewer".to_owned(),
        ours: told.join("; "),
        holds: verdict(counts.iter().all(|(clock, robin)| clock < robin)),
        why: String::new(),
    }
}

/// The references of several machines, one of each in turn; each machine's pages follow those of
/// the one before it.
pub(super) fn interleaved(run: VmsRun, vms: u32) -> Synthetic {
    let traces: Vec<Synthetic> = (0..vms)
        .map(|vm| Synthetic::mstress(run.pages, run.references, MSTRESS_SEED + u64::from(vm)))
        .collect();
    let pages = (0..run.references)
        .flat_map(|at| (0..).zip(&traces).map(move |(vm, trace)| trace.pages[at] + vm * run.pages))
        .collect();
    Synthetic { pages, page_count: run.pages as usize * vms as usize }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::Holds;

    #[test]
    fn clock_saves_faults_and_looks_at_more_pages() {
        let small = MstressRun { pages: 20_000, references: 400_000, local_pages: 10_000 };
        let claims = hpl(small);
        let holds: Vec<Holds> = claims.iter().map(|claim| claim.holds).collect();
        assert_eq!(holds, [Holds::InShape, Holds::InShape, Holds::Departs], "{claims:?}");
        // Pages that are touched at most once are never fetched back, however many there are.
        let sparse = MstressRun { pages: 20_000, references: 2000, local_pages: 20_000 };
        assert_eq!(hpl(sparse)[0].ours, "0 against 0");
    }

    #[test]
    fn several_machines_choose_from_the_memory_of_all() {
        let run = VmsRun { pages: 2000, references: 40_000 };
        let two = interleaved(run, 2);
        assert_eq!((two.page_count, two.pages.len()), (4000, 80_000));
        assert!(two.pages.chunks(2).all(|turn| turn[0] < 2000 && turn[1] >= 2000));
        let claim = several_choose(run);
        assert_eq!(claim.holds, Holds::InShape, "{claim:?}");
        // Pages that are referenced only once leave neither policy anything to save.
        let sparse = several_choose(VmsRun { pages: 2000, references: 3 });
        assert_eq!(sparse.holds, Holds::Departs, "{sparse:?}");
    }
}
