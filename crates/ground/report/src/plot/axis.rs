//! Axes: map values to positions, and choose the values to label.

use farpool_units::exactly;

/// The most ticks on an axis of powers before every second one is omitted.
const TICKS_MAX: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Log10,
    Log2,
    /// Linear, or decimal where values are decades apart.
    Wide,
}

/// Positive values further apart than this make a [`Scale::Wide`] axis logarithmic.
const WIDE_TIMES: f64 = 300.0;

/// The scale of one direction of a plot. Its label names the unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub(super) label: String,
    scale: Scale,
    zero: bool,
}

impl Axis {
    pub fn linear(label: impl Into<String>) -> Axis {
        Axis { label: label.into(), scale: Scale::Linear, zero: false }
    }

    /// Creates a decimal logarithmic axis; values of zero and below are omitted.
    pub fn log(label: impl Into<String>) -> Axis {
        Axis { scale: Scale::Log10, ..Axis::linear(label) }
    }

    /// Creates a binary logarithmic axis, for values that double from step to step.
    pub fn log2(label: impl Into<String>) -> Axis {
        Axis { scale: Scale::Log2, ..Axis::linear(label) }
    }

    /// Creates an axis that is linear from zero, unless the values are decades apart: then it is
    /// logarithmic.
    pub fn wide(label: impl Into<String>) -> Axis {
        Axis { scale: Scale::Wide, zero: true, ..Axis::linear(label) }
    }

    /// Makes a linear axis begin at zero, so that lengths can be compared.
    #[must_use]
    pub fn from_zero(self) -> Axis {
        Axis { zero: true, ..self }
    }

    /// True if `value` can be shown on this axis.
    pub(super) fn shows(&self, value: f64) -> bool {
        let is_linear = matches!(self.scale, Scale::Linear | Scale::Wide);
        value.is_finite() && (is_linear || value > 0.0)
    }

    /// Returns the section of the axis that holds all `values`, with its ticks.
    pub(super) fn fit(&self, values: impl IntoIterator<Item = f64>) -> Fitted {
        let shown: Vec<f64> = values.into_iter().filter(|value| self.shows(*value)).collect();
        if self.scale == Scale::Wide {
            let positive = || shown.iter().copied().filter(|value| *value > 0.0);
            let (least, most) =
                (positive().fold(f64::MAX, f64::min), positive().fold(0.0, f64::max));
            let scale = if most > least * WIDE_TIMES { Scale::Log10 } else { Scale::Linear };
            return Axis { scale, ..self.clone() }.fit(shown);
        }
        let shown = shown.into_iter();
        let (mut low, mut high) =
            shown.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        match self.scale {
            Scale::Linear | Scale::Wide => linear(if self.zero { low.min(0.0) } else { low }, high),
            Scale::Log10 => powers(low, high, 10.0),
            Scale::Log2 => powers(low, high, 2.0),
        }
    }
}

/// An axis with its limits.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fitted {
    low: f64,
    high: f64,
    log: bool,
    pub(super) ticks: Vec<f64>,
    decimals: usize,
}

impl Fitted {
    /// Returns the position of `value` between the limits, 0 to 1.
    pub(super) fn share(&self, value: f64) -> f64 {
        match self.log {
            true => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            false => (value - self.low) / (self.high - self.low),
        }
    }

    /// True if `value` has a place: a logarithmic axis has none for zero.
    pub(super) fn has(&self, value: f64) -> bool {
        !self.log || value > 0.0
    }

    pub(super) fn is_log(&self) -> bool {
        self.log
    }

    pub(super) fn label(&self, tick: f64) -> String {
        let size = tick.abs();
        if size >= 1e7 || (size > 0.0 && size < 1e-4) {
            return format!("{tick:e}");
        }
        match self.log {
            true => plain(tick),
            false => format!("{:.*}", self.decimals, if size == 0.0 { 0.0 } else { tick }),
        }
    }
}

/// Formats a value as briefly as possible, for ticks and for the tooltips of points.
pub(super) fn plain(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        s if s >= 100.0 || s == 0.0 => 0,
        s if s >= 10.0 => 1,
        s if s >= 1.0 => 2,
        s if s >= 0.01 => 4,
        _ => 6,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn linear(low: f64, high: f64) -> Fitted {
    let (low, high) = match high - low {
        span if span > 0.0 => (low, high),
        // A single value: the axis spans from it to zero.
        _ if high > 0.0 => (0.0, high),
        _ if high < 0.0 => (low, 0.0),
        _ => (0.0, 1.0),
    };
    let rough = (high - low) / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * power);
    let step = steps.into_iter().find(|step| *step >= rough * (1.0 - 1e-9)).unwrap_or(10.0 * power);
    let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
    #[allow(clippy::cast_possible_truncation)] // at most 7 steps fit by construction
    let ticks: Vec<f64> = (first as i64..=last as i64)
        .map(|index| {
            #[allow(clippy::cast_precision_loss)] // the same few steps
            let index = index as f64;
            index * step
        })
        .collect();
    let decimals = (0..9).find(|digits| is_whole(step * 10_f64.powi(*digits))).unwrap_or(9);
    let decimals = exactly(decimals);
    Fitted { low: first * step, high: last * step, log: false, ticks, decimals }
}

fn is_whole(value: f64) -> bool {
    (value - value.round()).abs() < 1e-6 * value.abs().max(1e-300)
}

fn powers(low: f64, high: f64, base: f64) -> Fitted {
    let first = (low.log(base) + 1e-9).floor();
    let last = (high.log(base) - 1e-9).ceil().max(first + 1.0);
    #[allow(clippy::cast_possible_truncation)] // the range of exponents of an f64
    let exponents = first as i32..=last as i32;
    let every = exponents.clone().count().div_ceil(TICKS_MAX);
    let mut ticks: Vec<f64> = exponents.step_by(every).map(|power| base.powi(power)).collect();
    if base > 2.0 && ticks.len() <= 3 {
        let between = |tick: &f64| [*tick, 2.0 * tick, 5.0 * tick];
        ticks = ticks.iter().flat_map(between).filter(|tick| *tick <= base.powf(last)).collect();
    }
    Fitted { low: base.powf(first), high: base.powf(last), log: true, ticks, decimals: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(fitted: &Fitted) -> Vec<String> {
        fitted.ticks.iter().map(|tick| fitted.label(*tick)).collect()
    }

    #[test]
    fn linear_ticks_are_round_and_hold_all_values() {
        let axis = Axis::linear("x").fit([0.13, 0.97]);
        assert_eq!(labels(&axis), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert!((axis.share(0.5) - 0.5).abs() < 1e-12);
        let axis = Axis::linear("x").from_zero().fit([40.0, 95.0]);
        assert_eq!(labels(&axis), ["0", "20", "40", "60", "80", "100"]);
        let axis = Axis::linear("x").fit([-3.0, 3.0]);
        assert_eq!(labels(&axis), ["-4", "-2", "0", "2", "4"]);
    }

    #[test]
    fn logarithmic_ticks_are_powers_and_what_has_no_place_is_left_out() {
        let axis = Axis::log2("x").fit([1.0, 16.0, 0.0, f64::NAN]);
        assert_eq!(labels(&axis), ["1", "2", "4", "8", "16"]);
        assert!((axis.share(4.0) - 0.5).abs() < 1e-12);
        let axis = Axis::log("x").fit([0.5, 20_000.0]);
        assert_eq!(labels(&axis), ["0.1", "1", "10", "100", "1000", "10000", "100000"]);
        let axis = Axis::log("x").fit([1.0, 10.0]);
        assert_eq!(labels(&axis), ["1", "2", "5", "10"]);
        assert!(Axis::log2("x").fit([1.0, 2_f64.powi(40)]).ticks.len() <= TICKS_MAX);
    }

    #[test]
    fn a_wide_axis_is_logarithmic_only_where_values_are_decades_apart() {
        let near = Axis::wide("x").fit([0.0, 3.0, 200.0]);
        assert!(!near.is_log() && near.has(0.0));
        let far = Axis::wide("x").fit([0.0, 3.0, 200_000.0]);
        assert!(far.is_log() && !far.has(0.0) && far.share(3.0) >= 0.0);
    }

    #[test]
    fn no_values_and_one_value_have_an_axis_too() {
        for axis in [Axis::linear("x"), Axis::log("x"), Axis::log2("x")] {
            for values in [vec![], vec![7.0], vec![0.0], vec![-2.0]] {
                let fitted = axis.fit(values.clone());
                assert!(fitted.ticks.len() >= 2, "{axis:?} {values:?} {fitted:?}");
                assert!(fitted.ticks.iter().all(|tick| fitted.share(*tick).is_finite()));
            }
        }
    }
}
