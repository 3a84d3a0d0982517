//! Horizontal bars, which leave room for long names: side by side, or stacked to a sum.

use std::fmt::Write;

use super::axis::{Axis, plain};
use super::{COLOURS, WIDTH, at, fitted, html, legend, text_width};

/// Thickness of a bar.
const BAR: f64 = 20.0;
/// Thickness of each of several bars side by side.
const THIN_BAR: f64 = 13.0;
/// Between two bars, or two groups of them.
const GAP: f64 = 11.0;
/// Space for the figure beside a bar that reaches the right edge.
const RIGHT: f64 = 64.0;
const BELOW: f64 = 46.0;
/// Widest space for the bars' names.
const NAME_MAX: f64 = 240.0;

/// Bars, one or one group per name. Values that are negative or not finite have no length.
///
/// Bars side by side whose values are decades apart get a logarithmic axis by themselves; zeros
/// have
/// no length there. Stacked bars stay linear, as the lengths of their parts must add up.
#[derive(Clone, Debug, PartialEq)]
pub struct BarPlot {
    pub(super) title: String,
    pub(super) description: String,
    label: String,
    names: Vec<String>,
    parts: Vec<(String, Vec<f64>)>,
    stacked: bool,
}

impl BarPlot {
    /// Creates a plot where each bar is the sum of its parts, as a time split by cause. `label`
    /// names the axis and its unit.
    pub fn stacked(title: impl Into<String>, label: impl Into<String>) -> BarPlot {
        let (names, parts) = (Vec::new(), Vec::new());
        let (title, description) = (title.into(), String::new());
        BarPlot { title, description, label: label.into(), names, parts, stacked: true }
    }

    /// Creates a plot where each name has a group of bars, one for each part.
    pub fn grouped(title: impl Into<String>, label: impl Into<String>) -> BarPlot {
        BarPlot { stacked: false, ..BarPlot::stacked(title, label) }
    }

    /// Describes the plot in a sentence, which is printed below it and read out in its place.
    #[must_use]
    pub fn describe(self, description: impl Into<String>) -> BarPlot {
        BarPlot { description: description.into(), ..self }
    }

    /// Sets the names of the bars, from the top.
    #[must_use]
    pub fn bars<Name: Into<String>>(self, names: impl IntoIterator<Item = Name>) -> BarPlot {
        BarPlot { names: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// Adds one part of every bar, in the order of [`BarPlot::bars`].
    #[must_use]
    pub fn part(
        mut self,
        name: impl Into<String>,
        values: impl IntoIterator<Item = f64>,
    ) -> BarPlot {
        self.parts.push((name.into(), values.into_iter().collect()));
        self
    }

    fn value(&self, part: usize, bar: usize) -> f64 {
        let value = self.parts[part].1.get(bar).copied().unwrap_or(0.0);
        if value.is_finite() { value.max(0.0) } else { 0.0 }
    }

    fn total(&self, bar: usize) -> f64 {
        (0..self.parts.len()).map(|part| self.value(part, bar)).sum()
    }

    fn lengths(&self) -> Vec<f64> {
        let bars = 0..self.names.len();
        match self.stacked {
            true => bars.map(|bar| self.total(bar)).collect(),
            false => bars
                .flat_map(|bar| (0..self.parts.len()).map(move |part| self.value(part, bar)))
                .collect(),
        }
    }
}

impl BarPlot {
    fn axis(&self) -> Axis {
        match self.stacked {
            true => Axis::linear("").from_zero(),
            false => Axis::wide(""),
        }
    }

    /// Returns the rows that the plot shows: the name of a bar, then its parts.
    pub(super) fn csv(&self) -> Vec<Vec<String>> {
        let names = self.parts.iter().map(|(name, _)| name.clone());
        let header = std::iter::once(self.label.clone()).chain(names).collect();
        let row = |(bar, name): (usize, &String)| {
            let values = (0..self.parts.len()).map(|part| self.value(part, bar).to_string());
            std::iter::once(name.clone()).chain(values).collect()
        };
        std::iter::once(header).chain(self.names.iter().enumerate().map(row)).collect()
    }
}

/// Draws the plot. Returns its height and contents.
pub(super) fn draw(plot: &BarPlot) -> (f64, String) {
    let mut body = String::new();
    let names: Vec<&str> = plot.parts.iter().map(|(name, _)| name.as_str()).collect();
    let legend_height = match names.len() {
        0 | 1 => 0.0,
        _ => legend(&mut body, &names, |index, x, y| {
            format!("{}\n", block(index, x + 6.0, y - 6.0, 16.0, 12.0, ""))
        }),
    };
    let name_width =
        plot.names.iter().map(|name| text_width(name)).fold(0.0, f64::max).min(NAME_MAX);
    let (left, right) = (name_width + 18.0, WIDTH - RIGHT);
    let axis = plot.axis().fit(plot.lengths());
    // On a logarithmic axis a bar begins at its left end.
    let x = |value: f64| left + axis.share(value).max(0.0) * (right - left);
    let top = legend_height + 10.0;
    let row = match plot.stacked {
        true => BAR,
        false => plot.parts.iter().map(|_| THIN_BAR).sum::<f64>().max(BAR),
    };
    let bottom = plot.names.iter().fold(top + GAP / 2.0, |y, _| y + row + GAP);
    for tick in &axis.ticks {
        let (place, label) = (at(x(*tick)), html(&axis.label(*tick)));
        let _ = writeln!(
            body,
            "<line class=\"grid\" x1=\"{place}\" x2=\"{place}\" y1=\"{}\" y2=\"{}\"/>\
             <text class=\"mid\" x=\"{place}\" y=\"{}\">{label}</text>",
            at(top),
            at(bottom),
            at(bottom + 17.0)
        );
    }
    let mut y = top + GAP;
    for (bar, name) in plot.names.iter().enumerate() {
        let _ = writeln!(
            body,
            "<text class=\"end\" x=\"{}\" y=\"{}\">{}<title>{}</title></text>",
            at(left - 8.0),
            at(y + row / 2.0 + 4.0),
            html(&fitted(name, NAME_MAX)),
            html(name)
        );
        match plot.stacked {
            true => draw_stack(&mut body, plot, bar, y, &x),
            false => draw_group(&mut body, plot, bar, y, &x),
        }
        y += row + GAP;
    }
    let _ = writeln!(
        body,
        "<path class=\"axis\" d=\"M{0} {1}V{2}H{3}\"/>\
         <text class=\"mid label\" x=\"{4}\" y=\"{5}\">{6}</text>",
        at(left),
        at(top),
        at(bottom),
        at(right),
        at((left + right) / 2.0),
        at(bottom + 38.0),
        html(&if axis.is_log() { format!("{} (log)", plot.label) } else { plot.label.clone() })
    );
    (bottom + BELOW, body)
}

fn draw_stack(body: &mut String, plot: &BarPlot, bar: usize, y: f64, x: &impl Fn(f64) -> f64) {
    let mut from = 0.0;
    for (part, (name, _)) in plot.parts.iter().enumerate() {
        let value = plot.value(part, bar);
        let title = format!("{}, {name}: {}", plot.names[bar], plain(value));
        let _ =
            writeln!(body, "{}", block(part, x(from), y, x(from + value) - x(from), BAR, &title));
        from += value;
    }
    draw_figure(body, x(from), y + BAR / 2.0, from);
}

fn draw_group(body: &mut String, plot: &BarPlot, bar: usize, y: f64, x: &impl Fn(f64) -> f64) {
    let mut y = y;
    for (part, (name, _)) in plot.parts.iter().enumerate() {
        let value = plot.value(part, bar);
        let title = format!("{}, {name}: {}", plot.names[bar], plain(value));
        let _ =
            writeln!(body, "{}", block(part, x(0.0), y, x(value) - x(0.0), THIN_BAR - 2.0, &title));
        draw_figure(body, x(value), y + THIN_BAR / 2.0 - 1.0, value);
        y += THIN_BAR;
    }
}

/// Draws the value beside a bar.
fn draw_figure(body: &mut String, x: f64, y: f64, value: f64) {
    let _ = writeln!(
        body,
        "<text class=\"figure\" x=\"{}\" y=\"{}\">{}</text>",
        at(x + 5.0),
        at(y + 4.0),
        plain(value)
    );
}

fn block(part: usize, x: f64, y: f64, width: f64, height: f64, title: &str) -> String {
    let colour = part % COLOURS;
    let title = match title {
        "" => String::new(),
        text => format!("<title>{}</title>", html(text)),
    };
    format!(
        "<rect class=\"block k{colour}\" x=\"{}\" y=\"{}\" width=\"{}\" \
         height=\"{}\">{title}</rect>",
        at(x),
        at(y),
        at(width),
        at(height)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacked_parts_follow_each_other_and_end_in_their_sum() {
        let plot =
            BarPlot::stacked("time", "ms").bars(["a"]).part("near", [3.0]).part("far", [5.0]);
        let (_, body) = draw(&plot);
        assert!(body.contains(">8</text>"), "the sum: {body}");
        let numbers = |line: &str, name: &str| -> f64 {
            let from = line.find(&format!(" {name}=\"")).expect("there") + name.len() + 3;
            line[from..].split('"').next().expect("ended").parse().expect("a number")
        };
        let blocks: Vec<&str> =
            body.lines().filter(|l| l.contains("rect") && l.contains("a, ")).collect();
        let end = numbers(blocks[0], "x") + numbers(blocks[0], "width");
        assert!((end - numbers(blocks[1], "x")).abs() < 0.2, "{blocks:?}");
    }

    #[test]
    fn values_that_are_decades_apart_can_all_be_seen() {
        let values = [0.0, 0.4, 3.0, 2_421_431.0];
        let plot = BarPlot::grouped("t", "%").bars(["a", "b", "c", "d"]).part("p", values);
        let (_, body) = draw(&plot);
        let widths: Vec<f64> = body
            .lines()
            .filter(|line| line.contains("rect") && line.contains(", p: "))
            .map(|line| line.split(" width=\"").nth(1).and_then(|rest| rest.split('"').next()))
            .map(|width| width.expect("there").parse().expect("a number"))
            .collect();
        assert_eq!(widths[0], 0.0, "nothing has no length");
        assert!(widths[1] > 20.0 && widths.is_sorted(), "{widths:?}");
        assert!(body.contains("% (log)"), "and the axis says so");
    }

    #[test]
    fn what_has_no_length_is_drawn_without_one() {
        let plot = BarPlot::grouped("t", "x").bars(["a", "b"]).part("p", [f64::NAN, -1.0]);
        let (_, body) = draw(&plot);
        assert!(!body.contains("NaN") && !body.contains("width=\"-"), "{body}");
        assert!(draw(&BarPlot::stacked("t", "x")).1.contains("axis"));
    }
}
