//! Turns rows as read from a file into dense series; every check is made here, for all kinds of
//! files alike.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use super::{
    Above, CpuUnit, MemoryUnit, Mended, Options, ProvisionTable, Rows, TimeUnit, Utilisation, Vm,
};
use crate::PlanError;

/// Steps times machines; beyond this the two series take more than 4 GiB.
const CELLS_MAX: usize = 1 << 28;
const VMS_MAX: usize = 1 << 24;
/// Step of a file that does not give one: the usual one of monitoring.
const STEP_S: f64 = 300.0;
/// Times are sums of rounded numbers; a sample this close to the next step, in steps, is in it.
const ROUNDING_STEPS: f64 = 1e-6;
/// Where steps are as long as the distance of samples, a sample may be this early or late, in
/// steps, and still has the place it would have in time: places are counted from a machine's first
/// sample, which may be off as well. With more it may take the place of its neighbour; then it is
/// counted as merged.
const JITTER_STEPS: f64 = 0.25;
/// Lengths of steps that people choose are multiples of these, in seconds.
const ROUND_S: [f64; 5] = [3600.0, 60.0, 10.0, 1.0, 0.1];
/// If more than one in so many samples shares a step with another, the file is refused; what jitter
/// is left and changes of summer time make fewer.
const MERGED_OF: usize = 10;
/// The most memory of a machine: 1 EiB. What is above is no memory, but another unit or damage.
const MEMORY_BYTES_MAX: f64 = (1_u64 << 60) as f64;

/// Returns the number of the next new machine.
pub(super) fn next_vm(path: &Path, known: usize) -> Result<u32, PlanError> {
    match u32::try_from(known) {
        Ok(next) if known < VMS_MAX => Ok(next),
        _ => Err(PlanError::foreign(path, format!("more than {VMS_MAX} machines"))),
    }
}

pub(super) fn build(path: &Path, rows: Rows, options: &Options) -> Result<Utilisation, PlanError> {
    if rows.vm.is_empty() {
        return Err(PlanError::foreign(path, "it has no rows"));
    }
    let mut checked = rows;
    let above_100_percent = check(path, &mut checked, options.above)?;
    let step = step_length(&checked, options.step_s)?;
    let step_s = step.length_s;
    let places = Places::new(path, &checked, &step)?;
    let (vms, steps) = (checked.names.len(), places.steps);
    if steps.saturating_mul(vms) > CELLS_MAX {
        let reason = format!("{vms} machines over {steps} steps; together at most {CELLS_MAX}");
        return Err(PlanError::foreign(path, reason));
    }
    let merged = merged(path, &checked, &places, &step)?;
    let mut cpu = vec![f64::NAN; vms * steps];
    let mut memory = vec![f64::NAN; vms * steps];
    for (row, vm) in checked.vm.iter().enumerate() {
        let cell = *vm as usize * steps + places.of(*vm, checked.time[row]);
        // Of several samples in one step the largest counts; the maximum of NaN and a number is the
        // number.
        cpu[cell] = cpu[cell].max(checked.cpu.get(row).copied().unwrap_or(0.0));
        memory[cell] = memory[cell].max(checked.memory.get(row).copied().unwrap_or(0.0));
    }
    let (held, absent) = fill(&mut cpu, steps);
    fill(&mut memory, steps);
    let vm = |name| Vm { name, cpu_provisioned: None, memory_provisioned: None };
    let (_, cpu_unit, memory_unit) = checked.units;
    Ok(Utilisation {
        vms: checked.names.into_iter().map(vm).collect(),
        steps,
        step_s,
        cpu_unit: cpu_unit.unwrap_or_default(),
        memory_unit: memory_unit.unwrap_or_default(),
        mended: Mended { above_100_percent, held, absent, merged },
        above: options.above,
        has_cpu: cpu_unit.is_some(),
        has_memory: memory_unit.is_some(),
        is_nameless: checked.is_nameless,
        cpu,
        memory,
    })
}

/// The length of a step, and what it means.
struct Step {
    length_s: f64,
    /// The length is the user's, not that of the samples.
    is_asked: bool,
    /// A step is to hold several samples of a machine.
    holds_several: bool,
}

/// Where times are among the steps.
struct Places {
    start: f64,
    divisor: f64,
    /// Each machine's first time; empty if a step holds several samples.
    firsts: Vec<f64>,
    steps: usize,
}

impl Places {
    fn new(path: &Path, rows: &Rows, step: &Step) -> Result<Places, PlanError> {
        let start = rows.time.iter().copied().fold(f64::MAX, f64::min);
        let divisor = if rows.units.0 == TimeUnit::Steps { 1.0 } else { step.length_s };
        let last = rows.time.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (row, last) = last.map_or((0, 0.0), |(row, last)| (row, (last - start) / divisor));
        if last >= CELLS_MAX as f64 {
            let reason = format!(
                "its time is {last:.0} steps of {} s after the first; at most {CELLS_MAX} are \
                 planned with: correct it, or set longer steps with --step",
                step.length_s
            );
            return Err(PlanError::row(path, rows.first_row + row, reason));
        }
        let mut places = Places { start, divisor, firsts: Vec::new(), steps: 0 };
        if !step.holds_several {
            places.firsts = vec![f64::NAN; rows.names.len()];
            for (vm, time) in rows.vm.iter().zip(&rows.time) {
                let first = &mut places.firsts[*vm as usize];
                *first = first.min(*time);
            }
        }
        let taken = rows.vm.iter().zip(&rows.time).map(|(vm, time)| places.of(*vm, *time));
        places.steps = taken.max().map_or(0, |last| last + 1);
        Ok(places)
    }

    /// Returns the step of a machine's time. A time that is a whole number of steps but for
    /// rounding is in the step that it begins.
    fn of(&self, vm: u32, time: f64) -> usize {
        let Some(first) = self.firsts.get(vm as usize) else {
            return whole_steps((time - self.start) / self.divisor + ROUNDING_STEPS);
        };
        nearest_step((first - self.start) / self.divisor)
            + nearest_step((time - first) / self.divisor)
    }
}

/// Returns the nearest whole number of steps: of two times that may each be off by
/// [`JITTER_STEPS`], the distance is off by twice as much.
fn nearest_step(steps: f64) -> usize {
    whole_steps(steps + 2.0 * JITTER_STEPS)
}

fn whole_steps(steps: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to `CELLS_MAX`
    let whole = steps.floor() as usize;
    whole
}

/// Counts the samples that share a step with the one before of their machine. If the length is that
/// of the samples, many mean that it is not their usual distance.
fn merged(path: &Path, rows: &Rows, places: &Places, step: &Step) -> Result<usize, PlanError> {
    let mut last = vec![usize::MAX; rows.names.len()];
    let (mut merged, mut first) = (0, None);
    for (row, vm) in rows.vm.iter().enumerate() {
        let place = places.of(*vm, rows.time[row]);
        if std::mem::replace(&mut last[*vm as usize], place) == place {
            merged += 1;
            first.get_or_insert(row);
        }
    }
    match first {
        Some(row) if !step.is_asked && merged * MERGED_OF > rows.vm.len() => {
            let reason = format!(
                "it is in the same step of {} s as the sample before, as are {merged} of {} \
                 samples: the median distance of samples is not their usual one; set the step with \
                 --step, such as --step 300s",
                step.length_s,
                rows.vm.len()
            );
            Err(PlanError::row(path, rows.first_row + row, reason))
        }
        _ => Ok(merged),
    }
}

/// Checks every value. Returns the number above 100 %.
fn check(path: &Path, rows: &mut Rows, above: Above) -> Result<usize, PlanError> {
    let (_, cpu_unit, memory_unit) = rows.units;
    let is_share = (cpu_unit == Some(CpuUnit::Machines), memory_unit == Some(MemoryUnit::Machines));
    let mut last_time = vec![f64::NEG_INFINITY; rows.names.len()];
    let mut beyond = 0;
    for index in 0..rows.vm.len() {
        let row = rows.first_row + index;
        let name = &rows.names[rows.vm[index] as usize];
        let wrong = |reason: String| Err(PlanError::row(path, row, reason));
        let time = rows.time[index];
        if !time.is_finite() {
            return wrong("its time is not a number".into());
        }
        let last = std::mem::replace(&mut last_time[rows.vm[index] as usize], time);
        if time <= last {
            let how = if time < last { "goes backwards" } else { "stands still" };
            let remedy = match rows.is_nameless {
                true => "; if its rows are of several machines, name their column with --vm-column",
                false => "",
            };
            return wrong(format!("time {how} for machine {name}{remedy}"));
        }
        let values = [
            ("processors", rows.cpu.get_mut(index), is_share.0, f64::MAX),
            ("memory", rows.memory.get_mut(index), is_share.1, MEMORY_BYTES_MAX),
        ];
        for (what, value, is_share, most) in values {
            let Some(value) = value else { continue };
            if let Some(reason) = impossible(what, *value, most) {
                return wrong(format!("{reason} for machine {name}"));
            }
            if is_share && *value > 1.0 {
                beyond += 1;
                match above {
                    Above::Clip => *value = 1.0,
                    Above::Keep => {}
                    Above::Refuse => {
                        let percent = *value * 100.0;
                        return wrong(format!("{what} of machine {name} at {percent:.1} %"));
                    }
                }
            }
        }
    }
    Ok(beyond)
}

/// Returns why a used amount is impossible, if it is.
fn impossible(what: impl Display, value: f64, most: f64) -> Option<String> {
    match value {
        v if !v.is_finite() => Some(format!("{what} is {v}, not a number")),
        v if v < 0.0 => Some(format!("{what} is {v}, below zero")),
        v if v > most => Some(format!("{what} is {v:.3e} bytes, more than a machine can have")),
        _ => None,
    }
}

/// Returns the step: the one asked for, or the median distance of a machine's samples. A step below
/// that distance is filled with the value before.
fn step_length(rows: &Rows, asked: Option<f64>) -> Result<Step, PlanError> {
    if let Some(step_s) = asked.filter(|step_s| !step_s.is_finite() || *step_s <= 0.0) {
        return Err(PlanError::Question(format!("a step cannot last {step_s} s")));
    }
    if rows.units.0 == TimeUnit::Steps {
        return Ok(Step { length_s: STEP_S, is_asked: false, holds_several: false });
    }
    let usual_s = usual_distance(rows);
    Ok(match asked {
        Some(length_s) => {
            let holds_several = usual_s.is_some_and(|usual_s| length_s >= 2.0 * usual_s);
            Step { length_s, is_asked: true, holds_several }
        }
        None => {
            let length_s = usual_s.unwrap_or(STEP_S);
            Step { length_s, is_asked: false, holds_several: false }
        }
    })
}

/// Returns the usual distance of a machine's samples; None if no machine has two. It is the mean of
/// all gaps of one step, or the median or a round number if either stays within the jitter over all
/// samples of a machine.
fn usual_distance(rows: &Rows) -> Option<f64> {
    let mut last = vec![f64::NAN; rows.names.len()];
    let mut counts = vec![0_u32; rows.names.len()];
    let mut gaps: Vec<f64> = Vec::new();
    for (vm, time) in rows.vm.iter().zip(&rows.time) {
        let before = std::mem::replace(&mut last[*vm as usize], *time);
        if !before.is_nan() {
            counts[*vm as usize] += 1;
            gaps.push(time - before);
        }
    }
    if gaps.is_empty() {
        return None;
    }
    let middle = gaps.len() / 2;
    let median = *gaps.select_nth_unstable_by(middle, f64::total_cmp).1;
    // Both samples of a gap may be off.
    let is_single = |gap: &&f64| (*gap - median).abs() < 2.0 * JITTER_STEPS * median;
    let (sum, single) = gaps
        .iter()
        .filter(is_single)
        .fold((0.0, 0.0), |(sum, count), gap| (sum + gap, count + 1.0));
    let mean = sum / single;
    let longest = f64::from(counts.into_iter().max().unwrap_or(0));
    let is_harmless =
        |other: &f64| *other > 0.0 && (other - mean).abs() * longest < JITTER_STEPS * mean;
    let rounded = ROUND_S.map(|unit| (mean / unit).round() * unit);
    Some([median].into_iter().chain(rounded).find(is_harmless).unwrap_or(mean))
}

/// Fills the gaps in each machine's series. Returns the numbers of values held and of values
/// absent.
fn fill(values: &mut [f64], steps: usize) -> (usize, usize) {
    let (mut held, mut absent) = (0, 0);
    for series in values.chunks_mut(steps) {
        let end = series.iter().rposition(|value| !value.is_nan()).map_or(0, |last| last + 1);
        let mut before = None;
        for (step, value) in series.iter_mut().enumerate() {
            match (value.is_nan(), before) {
                (false, _) => before = Some(*value),
                (true, Some(last)) if step < end => {
                    *value = last;
                    held += 1;
                }
                (true, _) => {
                    *value = 0.0;
                    absent += 1;
                }
            }
        }
    }
    (held, absent)
}

/// Adds the machines' promised amounts to their series, by name.
pub(super) fn provision(
    to: &mut Utilisation,
    path: &Path,
    table: &ProvisionTable,
) -> Result<(), PlanError> {
    let mut rows: HashMap<&str, usize> = HashMap::new();
    for (index, name) in table.names.iter().enumerate() {
        if rows.insert(name, index).is_some() {
            let row = table.first_row + index;
            return Err(PlanError::row(path, row, format!("machine {name} occurs twice")));
        }
    }
    let other =
        |what: &str| PlanError::foreign(path, format!("{what} in another unit than the series"));
    // A column that the series lack is taken in the table's unit.
    if let Some((unit, _)) = table.cpu.as_ref().filter(|_| !to.has_cpu) {
        to.cpu_unit = *unit;
    }
    if let Some((unit, _)) = table.memory.as_ref().filter(|_| !to.has_memory) {
        to.memory_unit = *unit;
    }
    if table.cpu.as_ref().is_some_and(|(unit, _)| *unit != to.cpu_unit) {
        return Err(other("processors"));
    }
    if table.memory.as_ref().is_some_and(|(unit, _)| *unit != to.memory_unit) {
        return Err(other("memory"));
    }
    for vm in &mut to.vms {
        let none = || PlanError::foreign(path, format!("machine {} is not in it", vm.name));
        let index = *rows.get(vm.name.as_str()).ok_or_else(none)?;
        let value = |what: &str, values: &[f64]| match impossible(what, values[index], f64::MAX) {
            Some(reason) => Err(PlanError::row(path, table.first_row + index, reason)),
            None => Ok(values[index]),
        };
        if let Some((_, values)) = &table.cpu {
            vm.cpu_provisioned = Some(value("processors", values)?);
        }
        if let Some((_, values)) = &table.memory {
            vm.memory_provisioned = Some(value("memory", values)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(samples: &[(u32, f64, f64, f64)]) -> Rows {
        Rows {
            names: vec!["a".into(), "b".into()],
            vm: samples.iter().map(|sample| sample.0).collect(),
            time: samples.iter().map(|sample| sample.1).collect(),
            cpu: samples.iter().map(|sample| sample.2).collect(),
            memory: samples.iter().map(|sample| sample.3).collect(),
            units: (TimeUnit::PerSecond(1.0), Some(CpuUnit::Machines), Some(MemoryUnit::Bytes)),
            first_row: 2,
            is_nameless: false,
        }
    }

    fn built(samples: &[(u32, f64, f64, f64)], options: &Options) -> Result<Utilisation, String> {
        build(Path::new("vms.csv"), rows(samples), options).map_err(|error| error.to_string())
    }

    #[test]
    fn gaps_are_held_and_what_lies_outside_a_life_is_nothing() {
        let samples = [
            (0, 0.0, 0.1, 5.0),
            (0, 60.0, 0.2, 6.0),
            (0, 240.0, 0.3, 7.0),
            (1, 60.0, 0.4, 8.0),
            (1, 120.0, 0.5, 9.0),
        ];
        let built = built(&samples, &Options::default()).expect("good rows");
        assert_eq!((built.steps, built.step_s), (5, 60.0));
        assert_eq!(built.memory(0), [5.0, 6.0, 6.0, 6.0, 7.0]);
        assert_eq!(built.memory(1), [0.0, 8.0, 9.0, 0.0, 0.0]);
        assert_eq!((built.mended.held, built.mended.absent), (2, 3));
    }

    #[test]
    fn samples_of_one_step_become_the_largest() {
        let samples =
            [(0, 0.0, 0.1, 5.0), (0, 10.0, 0.4, 9.0), (0, 60.0, 0.3, 7.0), (1, 0.0, 0.1, 1.0)];
        let options = Options { step_s: Some(60.0), ..Options::default() };
        let built = built(&samples, &options).expect("good rows");
        assert_eq!((built.memory(0), built.cpu(0)), (&[9.0, 7.0][..], &[0.4, 0.3][..]));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_row() {
        let good = (0, 0.0, 0.1, 5.0);
        let cases = [
            ((0, -1.0, 0.1, 5.0), "backwards"),
            ((0, 0.0, 0.1, 5.0), "stands still"),
            ((0, 60.0, f64::NAN, 5.0), "not a number"),
            ((0, 60.0, 0.1, -5.0), "below zero"),
            ((0, 60.0, f64::INFINITY, 5.0), "not a number"),
            ((0, f64::NAN, 0.1, 5.0), "its time is not a number"),
        ];
        for (bad, reason) in cases {
            let error = built(&[good, bad], &Options::default()).expect_err(reason);
            assert!(error.starts_with("vms.csv, row 3: ") && error.contains(reason), "{error}");
        }
        assert!(built(&[], &Options::default()).expect_err("no rows").contains("no rows"));
        let far = [good, (0, 1e18, 0.1, 5.0)];
        let options = Options { step_s: Some(1.0), ..Options::default() };
        let error = built(&far, &options).expect_err("too long");
        assert!(error.starts_with("vms.csv, row 3: ") && error.contains("--step"), "{error}");
    }

    #[test]
    fn a_step_that_swallows_samples_is_refused_with_its_row_and_remedy() {
        let far = [(0, 0.0, 0.1, 5.0), (0, 300.0, 0.1, 6.0), (0, 1e15, 0.1, 7.0)];
        let error = built(&far, &Options::default()).expect_err("two of three would be one");
        assert!(error.starts_with("vms.csv, row 3: ") && error.contains("--step"), "{error}");
        let gap = [(0, 0.0, 0.1, 5.0), (0, 300.0, 0.1, 6.0), (0, 90_000.0, 0.1, 7.0)];
        assert!(built(&gap, &Options::default()).is_err());
        let options = Options { step_s: Some(300.0), ..Options::default() };
        let mended = built(&gap, &options).expect("with the step that it names");
        assert_eq!((mended.steps, mended.step_s), (301, 300.0));
        // One that is far too early takes the place of its neighbour, and is counted.
        let early = |at| if at == 20 { 200.0 } else { 0.0 };
        let jitter: Vec<_> =
            (0..40).map(|at| (0, f64::from(at) * 300.0 - early(at), 0.1, 5.0)).collect();
        let counted = built(&jitter, &Options::default()).expect("good rows");
        assert_eq!((counted.step_s, counted.mended.merged), (300.0, 1));
        assert!(counted.warnings()[0].contains("1 samples"), "{:?}", counted.warnings());
    }

    /// Some samples are early or late by a fifth of a step, in machines of each phase.
    #[test]
    fn jitter_moves_no_sample_to_another_step() {
        let off = |at: i32| [0.0, 0.0, 0.0, 60.0, -60.0][usize::try_from(at % 5).expect("0 to 4")];
        for phase in [0.0, 75.0, 225.0, 299.0] {
            let sample = |at: i32| {
                let time = f64::from(at) * 300.0 + off(at);
                let memory = f64::from(at);
                [(0, time, 0.1, memory), (1, time + phase, 0.1, memory)]
            };
            let samples: Vec<_> = (0..100).flat_map(sample).collect();
            for step_s in [None, Some(300.0)] {
                let options = Options { step_s, ..Options::default() };
                let built = built(&samples, &options).expect("good rows");
                // A machine that begins in the second half of a step is in the next one.
                let late = usize::from(phase > 150.0);
                let told = (built.steps, built.step_s, built.mended.merged, built.mended.held);
                assert_eq!(told, (100 + late, 300.0, 0, 0), "{phase} {step_s:?}");
                let wanted: Vec<f64> = (0..100).map(f64::from).collect();
                assert_eq!(built.memory(0)[..100], wanted);
                assert_eq!(built.memory(1)[late..], wanted);
            }
        }
    }

    /// Machines that are sampled together share their steps, though the first sample of one is
    /// early and that of another, which begins later, is late.
    #[test]
    fn jitter_of_first_samples_parts_no_machines() {
        const LATER: i32 = 5;
        for off in [[-60.0, 60.0], [60.0, -60.0], [60.0, 60.0], [-60.0, -60.0], [0.0, -1.0]] {
            let sample = |at: i32| {
                [(0, 0, off[0]), (1, LATER, off[1])].into_iter().filter_map(move |it| {
                    let (vm, first, off) = it;
                    let time = f64::from(at) * 300.0 + if at == first { off } else { 0.0 };
                    (at >= first).then_some((vm, time, 0.1, f64::from(at)))
                })
            };
            let samples: Vec<_> = (0..20).flat_map(sample).collect();
            let built = built(&samples, &Options::default()).expect("good rows");
            assert_eq!(
                (built.steps, built.mended.merged, built.mended.held),
                (20, 0, 0),
                "{off:?}"
            );
            let wanted: Vec<f64> = (0..20).map(f64::from).collect();
            assert_eq!(built.memory(0), wanted, "{off:?}");
            let later = usize::try_from(LATER).expect("a step");
            assert_eq!(built.memory(1)[later..], wanted[later..], "{off:?}");
        }
    }

    /// 300.5 s in whole seconds.
    #[test]
    fn a_distance_that_is_not_round_is_found_from_all_samples() {
        let time = |at: i32| (f64::from(at) * 300.5).floor();
        let samples: Vec<_> = (0..2000).map(|at| (0, time(at), 0.1, 5.0)).collect();
        let built = built(&samples, &Options::default()).expect("good rows");
        assert_eq!((built.steps, built.mended.merged, built.mended.held), (2000, 0, 0));
        assert!((built.step_s - 300.5).abs() < 0.01, "{}", built.step_s);
    }

    #[test]
    fn samples_that_a_step_asked_for_merges_are_counted() {
        let samples: Vec<_> = (0..100).map(|at| (0, f64::from(at) * 300.0, 0.1, 5.0)).collect();
        let options = Options { step_s: Some(3600.0), ..Options::default() };
        let built = built(&samples, &options).expect("good rows");
        assert_eq!((built.steps, built.mended.merged), (9, 91));
        assert!(built.warnings()[0].starts_with("91 samples"), "{:?}", built.warnings());
    }

    #[test]
    fn steps_of_a_part_of_a_second_merge_nothing() {
        let samples: Vec<_> = (0..100).map(|at| (0, f64::from(at) * 0.1, 0.1, 5.0)).collect();
        let built = built(&samples, &Options::default()).expect("good rows");
        assert_eq!((built.steps, built.mended.merged, built.mended.held), (100, 0, 0));
    }

    #[test]
    fn memory_beyond_any_machine_is_refused() {
        let error = built(&[(0, 0.0, 0.1, 1e300)], &Options::default()).expect_err("1e300 bytes");
        assert!(error.contains("more than a machine can have"), "{error}");
    }

    #[test]
    fn shares_above_a_whole_are_counted_and_clipped_kept_or_refused() {
        let samples = [(0, 0.0, 2.15, 5.0), (0, 60.0, 0.2, 5.0), (1, 0.0, 1.0, 1.0)];
        let with = |above| built(&samples, &Options { above, ..Options::default() });
        let clipped = with(Above::Clip).expect("clipped");
        assert_eq!((clipped.cpu(0)[0], clipped.mended.above_100_percent), (1.0, 1));
        assert!(clipped.warnings()[0].contains("1 of 8 values"), "{:?}", clipped.warnings());
        assert_eq!(with(Above::Keep).expect("kept").cpu(0)[0], 2.15);
        let refused = with(Above::Refuse).expect_err("refused");
        assert!(refused.contains("row 2") && refused.contains("215.0 %"), "{refused}");
    }
}
