//! Lim 2010, sections 4.4 and 4.5, on a data centre's own utilisation: his traces were never
//! published, so his figures are bands that other data may fall into.

use super::Cell;
use crate::PlanError;
use crate::pack::{self, Demand, Server};
use crate::pool;
use crate::random::Random;
use crate::utilisation::{CpuUnit, Utilisation, peak};

/// Servers of an enclosure that share a blade.
const ENCLOSURE: usize = 16;
/// Enclosures that are drawn at random.
const DRAWN: usize = 60;
const SEED: u64 = 42;
/// Machines other than his are in shape if their percentage lies within this many points of the
/// nearest of his.
const POINTS_APART: f64 = 20.0;
/// Local share of each machine's memory at which page swapping costs less than 3 %: section 4.4
/// takes it from its simulations, which find little slowdown down to a quarter (Table 6(a)).
const LOCAL_SHARE: f64 = 0.25;
/// Packing over time uses steps of an hour: the question is how many servers, not which.
const PACKING_STEP_S: f64 = 3600.0;
/// Moves of the local search of a packing.
const MOVES: usize = 20_000;
/// The blade without its memory costs about as much as a low-end system, which section 4.3 puts
/// below half of its memory.
const BLADE_OVERHEAD: f64 = 0.5;
/// Figure 10(b): performance that web2.0 and VM consolidation retain.
const PERFORMANCE: f64 = 0.935;

/// Tests sections 4.4 and 4.5 on these machines, which messages call `name`.
///
/// # Errors
/// As of planning with them.
pub fn lim_ensemble(name: &str, of: &Utilisation) -> Result<Vec<Cell>, PlanError> {
    let mut cells = consolidation(name, of)?;
    cells.extend(sharing(name, of)?);
    Ok(cells)
}

/// Returns two sockets of eight cores at 2.6 GHz and 64 GiB, unless the series are shares of a
/// machine.
fn server(of: &Utilisation) -> Server {
    let server = Server {
        name: "16 cores of 2.6 GHz, 64 GiB".into(),
        cpu_ghz: Some(41.6),
        cpu_cores: Some(16.0),
        memory_gib: Some(64.0),
        ..Server::default()
    };
    match of.cpu_unit {
        CpuUnit::Machines => Server::machine(),
        CpuUnit::Mhz | CpuUnit::Cores => server,
    }
}

/// Section 4.4, Figure 9: servers that packing frees, over time alone and with memory on blades.
fn consolidation(name: &str, of: &Utilisation) -> Result<Vec<Cell>, PlanError> {
    let is_promised = of.vms.iter().all(|vm| vm.memory_provisioned.is_some());
    let question = pack::Question {
        server: server(of),
        demand: if is_promised { Demand::Provisioned } else { Demand::Used },
        local_shares: vec![LOCAL_SHARE],
        moves: MOVES,
        seed: SEED,
        worth: 0.1,
    };
    let answer = pack::plan(&of.with_steps_of(PACKING_STEP_S), &question, &mut |_| ())?;
    let [by_peaks, over_time, far, ..] = answer.rows.as_slice() else { return Ok(Vec::new()) };
    let freed = |from: usize, to: usize| percent(from.saturating_sub(to), from);
    let scarce = if over_time.is_cpu_bound { "processors are" } else { "memory is" };
    let current = freed(by_peaks.servers, over_time.servers);
    let further = freed(over_time.servers, far.servers);
    // If memory is scarce, a blade supplies it, as for web2.0; if processors are, it does not help,
    // as for Animation.
    let thesis = if over_time.is_cpu_bound { 0.0 } else { 68.0 };
    let note = format!(
        "{scarce} scarce here; {} machines, {} servers by peaks, {} over time, {} with a quarter \
         of memory local",
        answer.machines, by_peaks.servers, over_time.servers, far.servers
    );
    Ok(vec![
        Cell::near(
            "Figure 9",
            format!("{name}: servers freed by packing over time"),
            5.0,
            current,
            POINTS_APART,
        )
        .because("web2.0: 5 % of processors; how he packed before is not said"),
        Cell::near(
            "Figure 9",
            format!("{name}: servers freed further by memory on blades"),
            thesis,
            further,
            POINTS_APART,
        )
        .because(note),
    ])
}

/// Section 4.5, Figure 10: memory that an enclosure needs at one time, and its performance per
/// dollar.
fn sharing(name: &str, of: &Utilisation) -> Result<Vec<Cell>, PlanError> {
    let question =
        pool::Question { group: ENCLOSURE, groupings: DRAWN, ..pool::Question::default() };
    let answer = pool::plan(of, &question, &mut |_| ())?;
    let at_once = answer.sizes.iter().find(|size| size.vms == ENCLOSURE).map_or(1.0, |it| it.ratio);
    let gain = (gain(of) - 1.0) * 100.0;
    // The nearest of his three: VM consolidation, web2.0, and Animation, for which he prints no
    // figure.
    let (thesis, like) = match at_once * 100.0 {
        percent if percent > 92.5 => {
            (100.0, "as in Animation, which tracks its sum of peaks: little to share")
        }
        percent if percent > 77.5 => (85.0, "as in web2.0"),
        _ => (70.0, "VM consolidation is the nearest of his"),
    };
    Ok(vec![
        Cell::near(
            "Figure 10(a)",
            format!("{name}: memory that 16 machines need at once, of their sum of peaks"),
            thesis,
            at_once * 100.0,
            POINTS_APART,
        )
        .because(like),
        Cell::near(
            "Figure 10(a)",
            format!("{name}: performance for a dollar of memory gained by a shared blade"),
            87.0,
            gain,
            POINTS_APART,
        )
        .because(
            "over all servers as large as the largest (M-max); local: the median use; a blade for \
             what is beyond it at once, half as much again for its electronics; 6.5 % slower. It \
             depends on how much larger the largest is than the usual one; his are not known",
        ),
    ])
}

/// Returns performance per dollar of memory, relative to servers that are all as large as the
/// largest: the mean of enclosures drawn at random.
fn gain(of: &Utilisation) -> f64 {
    let mut random = Random::new(SEED);
    let mut order: Vec<usize> = (0..of.vms.len()).collect();
    let size = ENCLOSURE.min(order.len()).max(1);
    #[allow(clippy::cast_precision_loss)] // Sixteen, and sixty.
    let (servers, draws) = (size as f64, DRAWN as f64);
    let gains = (0..DRAWN).map(|_| {
        random.shuffle(&mut order);
        let members = &order[..size];
        let largest = members.iter().map(|vm| peak(of.memory(*vm))).fold(0.0, f64::max);
        let mut used: Vec<f64> = members.iter().flat_map(|vm| of.memory(*vm)).copied().collect();
        used.sort_by(f64::total_cmp);
        let local = used.get(used.len() / 2).copied().unwrap_or(0.0);
        let beyond = |step: usize| -> f64 {
            members.iter().map(|vm| (of.memory(*vm)[step] - local).max(0.0)).sum()
        };
        let blade = (0..of.steps).map(beyond).fold(0.0, f64::max);
        PERFORMANCE * servers * largest / (servers * local + blade * (1.0 + BLADE_OVERHEAD))
    });
    gains.sum::<f64>() / draws
}

#[allow(clippy::cast_precision_loss)] // Servers.
fn percent(part: usize, of: usize) -> f64 {
    part as f64 / of.max(1) as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::Verdict;

    /// 32 machines that need a fifth of a server's processors; memory peaks come one after the
    /// other, or all at once.
    fn machines(at_once: bool, cpu: f64) -> Utilisation {
        let series = |vm: usize| -> Vec<f64> {
            let is_peak = |step: usize| at_once && step == 3 || !at_once && step == vm % 32;
            (0..32).map(|step| if is_peak(step) { 0.9 } else { 0.1 }).collect()
        };
        let memory: Vec<Vec<f64>> = (0..32).map(series).collect();
        Utilisation::from_series(&vec![vec![cpu; 32]; 32], &memory, PACKING_STEP_S)
    }

    fn ours(cells: &[Cell], part: &str) -> (f64, Verdict) {
        let cell = cells.iter().find(|cell| cell.name.contains(part)).expect("the cell");
        (cell.ours, cell.verdict)
    }

    #[test]
    fn peaks_at_different_times_are_what_a_blade_saves() {
        let apart = lim_ensemble("apart", &machines(false, 0.05)).unwrap();
        let together = lim_ensemble("together", &machines(true, 0.05)).unwrap();
        let need = "need at once";
        assert!(ours(&apart, need).0 < 30.0 && ours(&together, need).0 > 99.0, "{apart:?}");
        assert_eq!(ours(&apart, need).1, Verdict::Departs, "no thesis figure is near");
        assert_eq!(ours(&together, need).1, Verdict::InShape, "as in Animation");
        let (gain, _) = ours(&apart, "dollar of memory");
        assert!(gain > ours(&together, "dollar of memory").0, "{gain}");
        let (freed, verdict) = ours(&together, "further by memory");
        assert!(freed > 50.0 && verdict == Verdict::InShape, "memory is scarce: {together:?}");
    }

    #[test]
    fn scarce_processors_leave_nothing_to_free() {
        let busy = lim_ensemble("busy", &machines(false, 0.9)).unwrap();
        let (freed, verdict) = ours(&busy, "further by memory");
        assert_eq!((freed, verdict), (0.0, Verdict::InShape), "{busy:?}");
    }
}
