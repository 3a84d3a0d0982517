//! Lim 2010: the claims of chapters 4 and 6 about programs, tested on a trace.

use farpool_policy::CacheKind;

use super::{Claim, percent, ratio, verdict};
use crate::design::{DesignError, Preset};
use crate::experiment::{Experiment, LocalSize, Row, run};
use crate::load::References;

/// Chapter 4 of Lim's thesis on one trace, with three quarters of its pages local (M-app-75 %).
///
/// # Errors
/// A design cannot be simulated on it.
pub fn lim(name: &str, trace: &References, threads: usize) -> Result<Vec<Claim>, DesignError> {
    let runs = Runs::of(name, trace, threads)?;
    let mut claims: Vec<Claim> = CLAIMS.iter().map(|spec| spec.judge(name, &runs)).collect();
    claims.extend(little_local(name, trace, threads)?);
    Ok(claims)
}

/// The result of a claim on a trace.
struct Finding {
    ours: String,
    is_so: bool,
    why: String,
}

impl Finding {
    fn of(ours: String, is_so: bool) -> Finding {
        Finding { ours, is_so, why: String::new() }
    }
}

/// One claim of the thesis, and how it is judged.
struct ClaimSpec {
    place: &'static str,
    claim: &'static str,
    paper: &'static str,
    find: fn(&Runs) -> Finding,
}

impl ClaimSpec {
    fn judge(&self, name: &str, runs: &Runs) -> Claim {
        let Finding { ours, is_so, why } = (self.find)(runs);
        Claim {
            place: self.place.to_owned(),
            claim: self.claim.to_owned(),
            on: name.to_owned(),
            paper: self.paper.to_owned(),
            ours,
            holds: verdict(is_so),
            why,
        }
    }
}

const CLAIMS: &[ClaimSpec] = &[
    ClaimSpec {
        place: "4.2, Fig. 6(a)",
        claim: "page swapping beats a disk",
        paper: "4 to 320 times",
        find: beats_a_disk,
    },
    ClaimSpec {
        place: "4.2, Fig. 6(a)",
        claim: "page swapping beats fine-grained access",
        paper: "faster",
        find: beats_fine_grained_access,
    },
    ClaimSpec {
        place: "4.2, Fig. 7",
        claim: "page swapping stays near local memory",
        paper: "within 30 %",
        find: stays_near_local,
    },
    ClaimSpec {
        place: "4.6.1, Fig. 11",
        claim: "migration helps fine-grained access",
        paper: "5 % to 4.5 times",
        find: migration_helps,
    },
    ClaimSpec {
        place: "4.6.2, Fig. 12",
        claim: "PCIe costs fine-grained access little",
        paper: "at most 20 %",
        find: pcie_costs_little,
    },
    ClaimSpec {
        place: "6.3, Table 6",
        claim: "critical block first hides most of a fault",
        paper: "3.5 to 3.9 times less",
        find: critical_block_first_hides,
    },
];

/// The runs that the claims compare.
struct Runs {
    local_ps: u64,
    ps: Row,
    ps_cbf: Row,
    fgra: Row,
    fgra_migration: Row,
    fgra_pcie: Row,
    disk: Row,
}

impl Runs {
    fn of(name: &str, trace: &References, threads: usize) -> Result<Runs, DesignError> {
        use Preset::{Disk, Fgra, FgraMigration, FgraPcie, Ps, PsCbf};
        let experiment = Experiment {
            designs: [Ps, PsCbf, Fgra, FgraMigration, FgraPcie, Disk].map(Preset::design).to_vec(),
            local: vec![LocalSize::Permille(750)],
            policies: vec![CacheKind::Lru],
            overlap: 1,
            tick_ps: None,
            seed: 1,
            clients: 1,
        };
        let (local, rows) = run(&experiment, trace, threads, &|_| ())?;
        let row = |preset: Preset| -> Result<Row, DesignError> {
            let found = rows.iter().flatten().find(|row| row.design == preset.name());
            found.cloned().ok_or_else(|| DesignError {
                design: preset.name().to_owned(),
                reason: format!("it could not be simulated on {name}"),
            })
        };
        Ok(Runs {
            local_ps: local.time_ps,
            ps: row(Ps)?,
            ps_cbf: row(PsCbf)?,
            fgra: row(Fgra)?,
            fgra_migration: row(FgraMigration)?,
            fgra_pcie: row(FgraPcie)?,
            disk: row(Disk)?,
        })
    }

    /// Returns the time that a design's run took beyond all-local memory.
    fn slower_ps(&self, row: &Row) -> u64 {
        time_ps(row) - self.local_ps
    }
}

fn time_ps(row: &Row) -> u64 {
    row.outcome.time_ps
}

fn beats_a_disk(runs: &Runs) -> Finding {
    let (ps, disk) = (time_ps(&runs.ps), time_ps(&runs.disk));
    let over_disk = disk / ps.max(1);
    let above = "above the band where a program refers to many pages that are not local";
    let why = if over_disk > 320 { above } else { "" }.to_owned();
    Finding { ours: format!("{} times", ratio(disk, ps)), is_so: over_disk >= 4, why }
}

fn beats_fine_grained_access(runs: &Runs) -> Finding {
    let (ps, fgra) = (percent(runs.ps.slowdown_permille), percent(runs.fgra.slowdown_permille));
    let ours = format!("{ps} against {fgra} slower than local");
    Finding::of(ours, time_ps(&runs.ps) < time_ps(&runs.fgra))
}

fn stays_near_local(runs: &Runs) -> Finding {
    let slowdown_permille = runs.ps.slowdown_permille;
    Finding::of(percent(slowdown_permille), slowdown_permille <= 300)
}

fn migration_helps(runs: &Runs) -> Finding {
    let (fgra, migration) = (time_ps(&runs.fgra), time_ps(&runs.fgra_migration));
    Finding::of(format!("{} times as fast", ratio(fgra, migration)), migration < fgra)
}

fn pcie_costs_little(runs: &Runs) -> Finding {
    let (fgra, pcie) = (time_ps(&runs.fgra), time_ps(&runs.fgra_pcie));
    let loss_permille = (pcie - fgra.min(pcie)) * 1000 / fgra.max(1);
    let why = "held to 25 %".to_owned();
    Finding { ours: percent(loss_permille), is_so: loss_permille <= 250, why }
}

fn critical_block_first_hides(runs: &Runs) -> Finding {
    let (ps, cbf) = (runs.slower_ps(&runs.ps), runs.slower_ps(&runs.ps_cbf));
    let is_so = ps >= 4 * cbf;
    let why = if is_so {
        "as the thesis counts: nobody waits for the rest of the page; ps+cbf-waits does".to_owned()
    } else {
        let waits = percent(runs.ps_cbf.outcome.frame_ps * 1000 / cbf.max(1));
        format!("the link is full: {waits} of the rest is waiting for pages to leave it")
    };
    Finding { ours: format!("{} times less", ratio(ps, cbf)), is_so, why }
}

/// Table 6(a) and the text beside it: a quarter and an eighth of the memory local, random victims.
fn little_local(name: &str, trace: &References, threads: usize) -> Result<Vec<Claim>, DesignError> {
    let experiment = Experiment {
        designs: [Preset::Ps, Preset::PsCbf].map(Preset::design).to_vec(),
        local: vec![LocalSize::Permille(250), LocalSize::Permille(125)],
        policies: vec![CacheKind::Random],
        overlap: 1,
        tick_ps: None,
        seed: 1,
        clients: 1,
    };
    let (_, rows) = run(&experiment, trace, threads, &|_| ())?;
    let slowdown = |preset: Preset, local: u32| {
        let is_it =
            |row: &&Row| row.design == preset.name() && row.local == LocalSize::Permille(local);
        rows.iter().flatten().find(is_it).map(|row| row.slowdown_permille)
    };
    let claim = |local: u32, most: u64, paper: &str| -> Option<Claim> {
        let (ps, cbf) = (slowdown(Preset::Ps, local)?, slowdown(Preset::PsCbf, local)?);
        let is_so = ps <= most;
        let why = if is_so {
            ""
        } else {
            "his programs referred to little memory outside their processor's caches; this one was \
             chosen because it does"
        };
        Some(Claim {
            place: "6.4.3, Table 6(a)".to_owned(),
            claim: format!("little is lost with {}.{} % local", local / 10, local % 10),
            on: name.to_owned(),
            paper: paper.to_owned(),
            ours: format!("{}, with critical block first {}", percent(ps), percent(cbf)),
            holds: verdict(is_so),
            why: why.to_owned(),
        })
    };
    let quarter = claim(250, 50, "0.2 to 4.7 %, with critical block first 0.1 to 1.2 %");
    let eighth = claim(125, 100, "at most 10 %, with critical block first 2.5 %");
    Ok(quarter.into_iter().chain(eighth).collect())
}
