//! Lim 2010: what chapters 4 and 6 say of programs, tried on a trace.

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
    let small = little_local(name, trace, threads)?;
    let mut claims = vec![
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
    ];
    claims.extend(small);
    Ok(claims)
}

/// Table 6(a) and the text beside it: a quarter and an eighth of the memory local, victims at random.
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
            "his programs referred to little memory outside their processor's caches; this one was chosen because it does"
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
