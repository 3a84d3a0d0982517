//! Lim 2010: the claims of chapters 4 and 6 about programs, tested on a trace.

use farpool_policy::CacheKind;

use super::{Claim, percent, ratio, verdict};
use crate::design::{Design, DesignError, Preset};
use crate::engine::Outcome;
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
    claims.extend(median_local(name, trace, threads)?);
    claims.extend(prototype(name, trace, threads)?);
    claims.push(SENSITIVITY.judge(name, &runs));
    Ok(claims)
}

/// What is compared: designs at sizes of local memory, in thousandths, with one policy.
fn simulated(
    trace: &References,
    threads: usize,
    designs: Vec<Design>,
    local_permille: &[u32],
    policy: CacheKind,
) -> Result<(Outcome, Vec<Row>), DesignError> {
    let experiment = Experiment {
        designs,
        local: local_permille.iter().copied().map(LocalSize::Permille).collect(),
        policies: vec![policy],
        overlap: 1,
        tick_ps: None,
        seed: 1,
        clients: 1,
    };
    let (local, rows) = run(&experiment, trace, threads, &|_| ())?;
    Ok((local, rows.into_iter().flatten().collect()))
}

/// M-median over M-max, 1.5 of 4 GB, in thousandths.
const MEDIAN_PERMILLE: u32 = 375;

/// Figure 6(b): a program as large as the largest, on a server that is provisioned for the median.
fn median_local(name: &str, trace: &References, threads: usize) -> Result<Vec<Claim>, DesignError> {
    let designs = [Preset::Ps, Preset::Fgra, Preset::Disk].map(Preset::design).to_vec();
    let (_, rows) = simulated(trace, threads, designs, &[MEDIAN_PERMILLE], CacheKind::Lru)?;
    let [ps, fgra, disk] = rows.as_slice() else { return Ok(Vec::new()) };
    let (ps, fgra, disk) = (time_ps(ps), time_ps(fgra), time_ps(disk));
    let is_so = ps < disk && fgra < disk;
    let why = "as if the trace's program had his largest footprint, 4 GB, of which 1.5 are local; \
               his programs' footprints are not printed, and smaller ones are as before";
    Ok(vec![Claim {
        place: "4.2, Fig. 6(b)".to_owned(),
        claim: "with the median's memory local, large programs gain".to_owned(),
        on: name.to_owned(),
        paper: "faster".to_owned(),
        ours: format!(
            "{} times as fast as a disk by page swapping, {} by fine-grained access",
            ratio(disk, ps),
            ratio(disk, fgra)
        ),
        holds: verdict(is_so),
        why: why.to_owned(),
    }])
}

/// Local memory of Figure 14, in thousandths: 0 to 95 % are remote.
const FIGURE_14: [u32; 6] = [1000, 750, 600, 400, 200, 50];
/// Slowdown that all but one of its programs stay below with 80 % remote, in thousandths.
const FIGURE_14_PERMILLE: u64 = 200;

/// Chapter 5, Figure 14: page swapping with the prototype's trap, and from none to nearly all of
/// the
/// memory remote.
fn prototype(name: &str, trace: &References, threads: usize) -> Result<Vec<Claim>, DesignError> {
    let designs = vec![Preset::PsXen.design()];
    let (_, rows) = simulated(trace, threads, designs, &FIGURE_14, CacheKind::Clock)?;
    let told: Vec<String> = rows
        .iter()
        .map(|row| format!("{} with {} local", percent(row.slowdown_permille), row.local))
        .collect();
    let Some(fifth) = rows.iter().find(|row| row.local == LocalSize::Permille(200)) else {
        return Ok(Vec::new());
    };
    let is_so = fifth.slowdown_permille < FIGURE_14_PERMILLE;
    let why = match is_so {
        true => "",
        false => {
            "mcf, too, was above it in the thesis; this program uses much of its memory outside its \
             processor's caches, and a trap of 12 us is paid for each page of it"
        }
    };
    Ok(vec![Claim {
        place: "5.4, Fig. 14".to_owned(),
        claim: "80 % of the memory can be remote, with the prototype's trap of 12 us".to_owned(),
        on: name.to_owned(),
        paper: "less than 20 % slower".to_owned(),
        ours: told.join(", "),
        holds: verdict(is_so),
        why: why.to_owned(),
    }])
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

/// Section 4.6.3.
const SENSITIVITY: ClaimSpec = ClaimSpec {
    place: "4.6.3",
    claim: "the trap and the latency of memory matter little",
    paper: "less than 2 %",
    find: latencies_matter_little,
};

/// Page swapping with the trap and the blade's memory half as slow again.
fn slower_ps_design() -> Design {
    let mut slower = Preset::Ps.design();
    slower.name = "ps, slower".to_owned();
    slower.far.software_ps += slower.far.software_ps / 2;
    slower.far.device_ps += slower.far.device_ps / 2;
    slower
}

/// The runs that the claims compare.
struct Runs {
    local_ps: u64,
    ps: Row,
    ps_slower: Row,
    ps_cbf: Row,
    fgra: Row,
    fgra_migration: Row,
    fgra_pcie: Row,
    disk: Row,
}

impl Runs {
    fn of(name: &str, trace: &References, threads: usize) -> Result<Runs, DesignError> {
        use Preset::{Disk, Fgra, FgraMigration, FgraPcie, Ps, PsCbf};
        let slower = slower_ps_design();
        let presets = [Ps, PsCbf, Fgra, FgraMigration, FgraPcie, Disk].map(Preset::design);
        let designs = presets.into_iter().chain([slower.clone()]).collect();
        let (local, rows) = simulated(trace, threads, designs, &[750], CacheKind::Lru)?;
        let row = |design: &str| -> Result<Row, DesignError> {
            let found = rows.iter().find(|row| row.design == design);
            found.cloned().ok_or_else(|| DesignError {
                design: design.to_owned(),
                reason: format!("it could not be simulated on {name}"),
            })
        };
        let preset = |preset: Preset| row(preset.name());
        Ok(Runs {
            local_ps: local.time_ps,
            ps: preset(Ps)?,
            ps_slower: row(&slower.name)?,
            ps_cbf: preset(PsCbf)?,
            fgra: preset(Fgra)?,
            fgra_migration: preset(FgraMigration)?,
            fgra_pcie: preset(FgraPcie)?,
            disk: preset(Disk)?,
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

fn latencies_matter_little(runs: &Runs) -> Finding {
    let (usual, slower) = (time_ps(&runs.ps), time_ps(&runs.ps_slower));
    let more_permille = slower.saturating_sub(usual) * 1000 / usual.max(1);
    Finding {
        ours: format!("{} more with both half as slow again", percent(more_permille)),
        is_so: more_permille < 20,
        why: "his range of values is not printed; 330 ns and 120 ns became 495 and 180".to_owned(),
    }
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
    let designs = [Preset::Ps, Preset::PsCbf].map(Preset::design).to_vec();
    let (_, rows) = simulated(trace, threads, designs, &[250, 125], CacheKind::Random)?;
    let slowdown = |preset: Preset, local: u32| {
        let is_it =
            |row: &&Row| row.design == preset.name() && row.local == LocalSize::Permille(local);
        rows.iter().find(is_it).map(|row| row.slowdown_permille)
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
