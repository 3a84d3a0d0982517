//! What the papers say of programs on far memory, as claims, and what comes out here.
//!
//! Figures that need the authors' own programs cannot be met digit by digit; their direction and band can.
//! Lim's are tried on any traces that are given; HPL-2011-31's on its own microbenchmark.

use farpool_policy::cache::Resident;
use farpool_policy::victim::{Clock, Fifo};
use farpool_policy::{CacheKind, PageCache};
use farpool_report::{Column, Page, Provenance, Table};
use serde::Serialize;

use crate::design::{DesignError, Preset};
use crate::experiment::{Experiment, LocalSize, Row, run};
use crate::load::References;
use crate::synthetic::Synthetic;

/// Whether a claim holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// Direction and band are the paper's.
    InShape,
    /// They are not.
    Departs,
}

/// Something a paper says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// Where it is printed.
    pub place: String,
    /// What is claimed.
    pub claim: String,
    /// What it was tried on.
    pub on: String,
    /// What the paper gives.
    pub paper: String,
    /// What comes out here.
    pub ours: String,
    /// Whether it holds.
    pub holds: Holds,
    /// Why it departs, or what must be known beside it.
    pub why: String,
}

fn verdict(is_so: bool) -> Holds {
    if is_so { Holds::InShape } else { Holds::Departs }
}

/// `a / b` with two digits; integers all the way, so that it is the same everywhere.
fn ratio(a: u64, b: u64) -> String {
    let hundredths = u128::from(a) * 100 / u128::from(b.max(1));
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

fn percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// Chapter 4 of Lim's thesis on one trace, with three quarters of its pages local (M-app-75 %).
///
/// # Errors
/// A design cannot be simulated on it.
pub fn lim(name: &str, trace: &References, threads: usize) -> Result<Vec<Claim>, DesignError> {
    use Preset::{Disk, Fgra, FgraMigration, FgraPcie, Ps, PsCbf};
    let presets = [Ps, PsCbf, Fgra, FgraMigration, FgraPcie, Disk];
    let experiment = Experiment {
        designs: presets.map(Preset::design).to_vec(),
        local: vec![LocalSize::Permille(750)],
        policies: vec![CacheKind::Lru],
        overlap: 1,
        tick_ps: None,
        seed: 1,
        clients: 1,
    };
    let (local, rows) = run(&experiment, trace, threads, &|_| ())?;
    let row = |preset: Preset| -> Result<&Row, DesignError> {
        let found = rows.iter().flatten().find(|row| row.design == preset.name());
        found.ok_or_else(|| DesignError {
            design: preset.name().to_owned(),
            reason: format!("it could not be simulated on {name}"),
        })
    };
    let (ps, cbf, fgra) = (row(Ps)?, row(PsCbf)?, row(Fgra)?);
    let (migration, pcie, disk) = (row(FgraMigration)?, row(FgraPcie)?, row(Disk)?);
    let time = |row: &Row| row.outcome.time_ps;
    let claim =
        |place: &str, claim: &str, paper: &str, ours: String, is_so: bool, why: &str| Claim {
            place: place.to_owned(),
            claim: claim.to_owned(),
            on: name.to_owned(),
            paper: paper.to_owned(),
            ours,
            holds: verdict(is_so),
            why: why.to_owned(),
        };
    let over_disk = time(disk) / time(ps).max(1);
    let pcie_loss = (time(pcie) - time(fgra).min(time(pcie))) * 1000 / time(fgra).max(1);
    let slower = |row: &Row| time(row) - local.time_ps;
    let band = "above the band where a program refers to many pages that are not local";
    let busy = format!(
        "the link is full: {} of the rest is waiting for pages to leave it",
        percent(cbf.outcome.frame_ps * 1000 / slower(cbf).max(1))
    );
    let counted = "as the thesis counts: nobody waits for the rest of the page; ps+cbf-waits does";
    let is_cut = slower(ps) >= 4 * slower(cbf);
    let cbf_why = if is_cut { counted } else { &busy };
    Ok(vec![
        claim(
            "4.2, Fig. 6(a)",
            "page swapping beats a disk",
            "4 to 320 times",
            format!("{} times", ratio(time(disk), time(ps))),
            over_disk >= 4,
            if over_disk > 320 { band } else { "" },
        ),
        claim(
            "4.2, Fig. 6(a)",
            "page swapping beats fine-grained access",
            "faster",
            format!(
                "{} against {} slower than local",
                percent(ps.slowdown_permille),
                percent(fgra.slowdown_permille)
            ),
            time(ps) < time(fgra),
            "",
        ),
        claim(
            "4.2, Fig. 7",
            "page swapping stays near local memory",
            "within 30 %",
            percent(ps.slowdown_permille),
            ps.slowdown_permille <= 300,
            "",
        ),
        claim(
            "4.6.1, Fig. 11",
            "migration helps fine-grained access",
            "5 % to 4.5 times",
            format!("{} times as fast", ratio(time(fgra), time(migration))),
            time(migration) < time(fgra),
            "",
        ),
        claim(
            "4.6.2, Fig. 12",
            "PCIe costs fine-grained access little",
            "at most 20 %",
            percent(pcie_loss),
            pcie_loss <= 250,
            "held to 25 %",
        ),
        claim(
            "6.3, Table 6",
            "critical block first hides most of a fault",
            "3.5 to 3.9 times less",
            format!("{} times less", ratio(slower(ps), slower(cbf))),
            is_cut,
            cbf_why,
        ),
    ])
}

/// How mstress is run: HPL-2011-31, section 4.
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

/// Faults on pages that were local before, and pages looked at for each victim, in hundredths.
struct Choosing {
    remote: u64,
    victims: u64,
    looks: u64,
}

fn choose<C: PageCache>(mut cache: C, trace: &Synthetic, spared: impl Fn(&C) -> u64) -> Choosing {
    let (mut misses, mut victims) = (0, 0);
    for &page in &trace.pages {
        misses += u64::from(!cache.access(page, &mut |_| victims += 1));
    }
    Choosing { remote: misses - trace.page_count as u64, victims, looks: victims + spared(&cache) }
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
    let fault_ps = Preset::Ps.design().idle_fetch_ps(PAGE_BYTES);
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
                "the saved faults of {} ns each pay for the looks below that price; the paper's hypervisor searched \
                     page tables under a lock",
                fault_ps / 1000
            ),
        ),
    ]
}

/// The seed of the published miss counts.
const MSTRESS_SEED: u64 = 42;
const PAGE_BYTES: u64 = 4096;

/// The claims as a table.
#[must_use]
pub fn table(claims: &[Claim]) -> Table {
    let columns = ["place", "claim", "on", "paper", "ours", "verdict", "why"].map(Column::left);
    let mut table =
        Table::new("claims", "What the paper says of programs, and what comes out here", columns);
    for claim in claims {
        let holds = if claim.holds == Holds::InShape { "in shape" } else { "departs" };
        let cells = [&claim.place, &claim.claim, &claim.on, &claim.paper, &claim.ours];
        let cells = cells.map(|text| text.clone().into());
        table.row(cells.into_iter().chain([holds.into(), claim.why.clone().into()]));
    }
    table
}

/// The claims alone, as an answer.
#[must_use]
pub fn page(title: &str, claims: &[Claim], provenance: Provenance) -> Page {
    let departing = claims.iter().filter(|claim| claim.holds == Holds::Departs).count();
    let all = claims.len();
    Page::new(title, provenance)
        .finding(format!("{all} claims: {} in shape, {departing} depart.", all - departing))
        .table(table(claims))
        .result(&claims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_saves_faults_and_looks_at_more_pages() {
        let small = MstressRun { pages: 20_000, references: 400_000, local_pages: 10_000 };
        let claims = hpl(small);
        let holds: Vec<Holds> = claims.iter().map(|claim| claim.holds).collect();
        assert_eq!(holds, [Holds::InShape, Holds::InShape, Holds::Departs], "{claims:?}");
    }
}
