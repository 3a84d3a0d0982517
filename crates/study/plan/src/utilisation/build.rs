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
    let (time_unit, cpu_unit, memory_unit) = checked.units;
    let step_s = step_length(&checked, options.step_s, time_unit)?;
    let start = checked.time.iter().copied().fold(f64::MAX, f64::min);
    let divisor = if time_unit == TimeUnit::Steps { 1.0 } else { step_s };
    let span = checked.time.iter().map(|time| ((time - start) / divisor).floor());
    let last = span.fold(0.0, f64::max);
    let (vms, cells_max) = (checked.names.len(), CELLS_MAX);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // checked in the line
    let steps = match last < cells_max as f64 {
        true => last as usize + 1,
        false => return Err(PlanError::foreign(path, format!("it spans {last} steps"))),
    };
    if steps.saturating_mul(vms) > cells_max {
        let reason = format!("{vms} machines over {steps} steps; together at most {cells_max}");
        return Err(PlanError::foreign(path, reason));
    }
    let mut cpu = vec![f64::NAN; vms * steps];
    let mut memory = vec![f64::NAN; vms * steps];
    for (row, vm) in checked.vm.iter().enumerate() {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most `last`
        let step = ((checked.time[row] - start) / divisor).floor() as usize;
        let cell = *vm as usize * steps + step;
        // Of several samples in one step the largest counts; the maximum of NaN and a number is the
        // number.
        cpu[cell] = cpu[cell].max(checked.cpu[row]);
        memory[cell] = memory[cell].max(checked.memory[row]);
    }
    let (held, absent) = fill(&mut cpu, steps);
    fill(&mut memory, steps);
    let vm = |name| Vm { name, cpu_provisioned: None, memory_provisioned: None };
    Ok(Utilisation {
        vms: checked.names.into_iter().map(vm).collect(),
        steps,
        step_s,
        cpu_unit,
        memory_unit,
        mended: Mended { above_100_percent, held, absent },
        above: options.above,
        cpu,
        memory,
    })
}

/// Checks every value. Returns the number above 100 %.
fn check(path: &Path, rows: &mut Rows, above: Above) -> Result<usize, PlanError> {
    let (_, cpu_unit, memory_unit) = rows.units;
    let mut last_time = vec![f64::NEG_INFINITY; rows.names.len()];
    let mut beyond = 0;
    for index in 0..rows.vm.len() {
        let row = rows.first_row + index;
        let name = &rows.names[rows.vm[index] as usize];
        let wrong = |reason: String| Err(PlanError::row(path, row, reason));
        let time = rows.time[index];
        if !time.is_finite() {
            return wrong(format!("its time is {time}"));
        }
        let last = std::mem::replace(&mut last_time[rows.vm[index] as usize], time);
        if time <= last {
            let how = if time < last { "goes backwards" } else { "stands still" };
            return wrong(format!("time {how} for machine {name}: {time} after {last}"));
        }
        let of_machine = [
            ("processors", cpu_unit == CpuUnit::Machines),
            ("memory", memory_unit == MemoryUnit::Machines),
        ];
        let values = [&mut rows.cpu[index], &mut rows.memory[index]];
        for (value, (what, is_share)) in values.into_iter().zip(of_machine) {
            if let Some(reason) = impossible(what, *value) {
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
fn impossible(what: impl Display, value: f64) -> Option<String> {
    match value {
        v if !v.is_finite() => Some(format!("{what} is {v}, not a number")),
        v if v < 0.0 => Some(format!("{what} is {v}, below zero")),
        _ => None,
    }
}

fn step_length(rows: &Rows, asked: Option<f64>, unit: TimeUnit) -> Result<f64, PlanError> {
    if let Some(step_s) = asked {
        return match step_s.is_finite() && step_s > 0.0 {
            true => Ok(step_s),
            false => Err(PlanError::Question(format!("a step cannot last {step_s} s"))),
        };
    }
    if unit == TimeUnit::Steps {
        return Ok(STEP_S);
    }
    let mut last = vec![f64::NAN; rows.names.len()];
    let mut gaps: Vec<f64> = Vec::new();
    for (vm, time) in rows.vm.iter().zip(&rows.time) {
        let before = std::mem::replace(&mut last[*vm as usize], *time);
        if !before.is_nan() {
            gaps.push(time - before);
        }
    }
    if gaps.is_empty() {
        return Ok(STEP_S);
    }
    let middle = gaps.len() / 2;
    Ok(*gaps.select_nth_unstable_by(middle, f64::total_cmp).1)
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
    if table.cpu.as_ref().is_some_and(|(unit, _)| *unit != to.cpu_unit) {
        return Err(other("processors"));
    }
    if table.memory.as_ref().is_some_and(|(unit, _)| *unit != to.memory_unit) {
        return Err(other("memory"));
    }
    for vm in &mut to.vms {
        let none = || PlanError::foreign(path, format!("machine {} is not in it", vm.name));
        let index = *rows.get(vm.name.as_str()).ok_or_else(none)?;
        let value = |what: &str, values: &[f64]| match impossible(what, values[index]) {
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
            units: (TimeUnit::Seconds, CpuUnit::Machines, MemoryUnit::Bytes),
            first_row: 2,
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
            ((0, f64::NAN, 0.1, 5.0), "its time is NaN"),
        ];
        for (bad, reason) in cases {
            let error = built(&[good, bad], &Options::default()).expect_err(reason);
            assert!(error.starts_with("vms.csv, row 3: ") && error.contains(reason), "{error}");
        }
        assert!(built(&[], &Options::default()).expect_err("no rows").contains("no rows"));
        let far = [good, (0, 1e18, 0.1, 5.0)];
        let options = Options { step_s: Some(1.0), ..Options::default() };
        assert!(built(&far, &options).expect_err("too long").contains("spans"));
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
