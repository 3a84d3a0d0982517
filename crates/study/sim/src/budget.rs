//! How much local memory a program needs to stay within a slowdown: the ratio of local to far
//! memory.

use farpool_policy::CacheKind;
use farpool_report::{Axis, Column, Line, LinePlot, Page, Provenance, Table};
use serde::Serialize;

use crate::design::{Design, DesignError};
use crate::experiment::{Experiment, LocalSize, Refused, Row, all_local, cell};
use crate::load::References;

/// Local memory is searched in steps of a hundredth of the footprint.
const STEP_PERMILLE: u32 = 10;

/// The question: designs, policy and the slowdown allowed.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// The designs.
    pub designs: Vec<Design>,
    /// Which pages leave local memory.
    pub policy: CacheKind,
    /// The largest slowdown allowed against all-local memory, in thousandths.
    pub slowdown_permille: u64,
    /// References that may wait at the same time ([`crate::Program::overlap`]).
    pub overlap: u32,
    /// Length of a tick; by default the trace's own.
    pub tick_ps: Option<u64>,
}

/// One design's need for local memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Need {
    /// The design's name.
    pub design: String,
    /// The least local memory within the budget, with its simulated result.
    pub least: Option<Row>,
    /// Everything that was simulated on the way, the least local memory first.
    pub tried: Vec<Row>,
    /// Sizes that the design cannot work with.
    pub refused: Vec<Refused>,
}

/// Finds the least local memory of each design by bisection. More local memory is taken never to be
/// slower, which is exact for LRU's faults and nearly so for the others. `done` is called after
/// each simulation.
///
/// # Errors
/// Nothing could be simulated at all.
pub fn needs(
    budget: &Budget,
    trace: &References,
    done: &mut dyn FnMut(),
) -> Result<Vec<Need>, DesignError> {
    let experiment = Experiment {
        designs: Vec::new(),
        local: Vec::new(),
        policies: vec![budget.policy],
        overlap: budget.overlap,
        tick_ps: budget.tick_ps,
        seed: 1,
        clients: 1,
    };
    let local = all_local(&experiment, trace)?;
    let mut simulate = |design: &Design, step: u32| {
        let size = LocalSize::Permille(step * STEP_PERMILLE);
        let row = cell(&experiment, trace, &local, design, size, budget.policy);
        done();
        row
    };
    Ok(budget.designs.iter().map(|design| need(budget, design, &mut simulate)).collect())
}

fn need(
    budget: &Budget,
    design: &Design,
    simulate: &mut dyn FnMut(&Design, u32) -> Result<Row, Refused>,
) -> Need {
    let (mut tried, mut refused): (Vec<Row>, Vec<Refused>) = (Vec::new(), Vec::new());
    let mut is_enough = |step| match simulate(design, step) {
        Ok(row) => {
            let is_enough = row.slowdown_permille <= budget.slowdown_permille;
            tried.push(row);
            is_enough
        }
        Err(why) => {
            refused.push(why);
            false
        }
    };
    // Everything local is within any budget.
    let (mut too_little, mut enough) = (0, 1000 / STEP_PERMILLE);
    is_enough(enough);
    while too_little + 1 < enough {
        let step = too_little.midpoint(enough);
        if is_enough(step) { enough = step } else { too_little = step }
    }
    tried.sort_by_key(|row| row.local_pages);
    let least = LocalSize::Permille(enough * STEP_PERMILLE);
    let least = tried.iter().find(|row| row.local == least).cloned();
    Need { design: design.name.clone(), least, tried, refused }
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn number(value: u64) -> f64 {
    value as f64
}

/// Builds the page that `farpool plan local` answers with.
#[must_use]
pub fn page(budget: &Budget, trace: &References, needs: &[Need], provenance: Provenance) -> Page {
    let allowed = number(budget.slowdown_permille) / 10.0;
    let mib = |pages: u64| number(pages * trace.page_bytes) / f64::from(1 << 20);
    let footprint = trace.page_count() as u64;
    let mut table = Table::new(
        "needs",
        "Local memory that keeps within the slowdown",
        [
            Column::left("design"),
            Column::right("local").unit("%"),
            Column::right("local_mib").title("local").unit("MiB").decimals(1),
            Column::right("far_mib").title("far").unit("MiB").decimals(1),
            Column::right("slowdown").unit("%").decimals(1),
        ],
    );
    let mut plot = LinePlot::new(
        "Slowdown by local memory",
        Axis::linear("local memory (% of the footprint)").from_zero(),
        Axis::linear("slowdown (%)").from_zero(),
    )
    .describe("Every size that was simulated on the way")
    .level(allowed, "allowed");
    for need in needs {
        if let Some(row) = &need.least {
            table.row([
                need.design.clone().into(),
                row.local.to_string().trim_end_matches('%').into(),
                mib(row.local_pages).into(),
                mib(footprint.saturating_sub(row.local_pages)).into(),
                (number(row.slowdown_permille) / 10.0).into(),
            ]);
        }
        // Points far above the budget interest no reader and would flatten the plot.
        let shown =
            need.tried.iter().filter(|row| number(row.slowdown_permille) <= 100.0 * allowed);
        let points = shown.map(|row| {
            let local = number(row.local_pages * 1000 / footprint.max(1)) / 10.0;
            (local, number(row.slowdown_permille) / 10.0)
        });
        plot = plot.line(Line::new(need.design.clone(), points));
    }
    let best =
        needs.iter().filter_map(|need| need.least.as_ref()).min_by_key(|row| row.local_pages);
    let page = Page::new("Local memory for a slowdown", provenance);
    let page = match best {
        Some(row) => page.finding(format!(
            "{} needs the least local memory: {} of {:.1} MiB, for {:.1} % more time ({allowed} % \
             are allowed).",
            row.design,
            row.local,
            mib(footprint),
            number(row.slowdown_permille) / 10.0
        )),
        None => page.finding(format!("No design keeps within {allowed} %, with any local memory.")),
    };
    page.table(table.note("in steps of 1 % of the footprint")).plot(plot).result(&needs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::design::Preset;
    use crate::load::Reference;
    use farpool_trace::{Access, Clock, TraceInfo};

    /// Half of the pages are used once, the others repeatedly.
    fn trace() -> References {
        let reference =
            |page: u32, ticks| Reference { ticks, page, thread: 0, line: 0, access: Access::Read };
        let once = (0..200).map(|page| reference(page, 100_000));
        let often = (0..20_000).map(|n| reference(100 + n % 100, 1000));
        let info = TraceInfo::new("test", 64, Clock::Nanoseconds);
        References::new(once.chain(often).collect(), (0..200).collect(), 4096, info)
    }

    #[test]
    fn the_least_local_memory_is_what_is_used_again_and_again() {
        let budget = Budget {
            designs: vec![Preset::Ps.design(), Preset::Zram.design()],
            policy: CacheKind::Lru,
            slowdown_permille: 10,
            overlap: 1,
            tick_ps: None,
        };
        let needs = needs(&budget, &trace(), &mut || ()).unwrap();
        // 100 pages and the reserve of free frames, a 16th.
        let least = needs[0].least.as_ref().unwrap();
        assert!((106..=108).contains(&least.local_pages), "{least:?}");
        assert!(needs[0].tried.iter().all(|row| {
            (row.slowdown_permille <= 10) == (row.local_pages >= least.local_pages)
        }));
        // Compressed, the other hundred pages take 33, and small sizes do not fit at all.
        let zram = needs[1].least.as_ref().unwrap();
        assert!((134..=142).contains(&zram.local_pages), "{zram:?}");
    }

    #[test]
    fn no_slowdown_at_all_needs_everything_that_is_used_again() {
        let budget = Budget {
            designs: vec![Preset::Disk.design()],
            policy: CacheKind::Lru,
            slowdown_permille: 0,
            overlap: 1,
            tick_ps: None,
        };
        let need = needs(&budget, &trace(), &mut || ()).unwrap().swap_remove(0);
        assert_eq!(need.least.unwrap().slowdown_permille, 0);
    }
}
