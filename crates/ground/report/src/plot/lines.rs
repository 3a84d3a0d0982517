//! Line plots, with confidence bands and reference lines.

use std::fmt::Write;

use super::axis::{Axis, Fitted, plain};
use super::{COLOURS, WIDTH, at, fitted, html, legend, text_width};

const PLOT_HEIGHT: f64 = 320.0;
/// Space right of the plot, into which the last tick's label reaches.
const RIGHT: f64 = 24.0;
/// Space below the plot for the labels of ticks and axis.
const BELOW: f64 = 46.0;
/// Points up to which each is marked; beyond, the tooltips would outweigh the rest of the page.
const MARKED_POINTS_MAX: usize = 200;

/// One series of points, in the order in which they are joined.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    band: Vec<(f64, f64)>,
}

impl Line {
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Line {
        let points = points.into_iter().collect();
        Line { name: name.into(), points, band: Vec::new() }
    }

    /// Sets the lowest and highest plausible value of each point.
    #[must_use]
    pub fn band(self, band: impl IntoIterator<Item = (f64, f64)>) -> Line {
        Line { band: band.into_iter().collect(), ..self }
    }
}

/// Lines in one frame.
#[derive(Clone, Debug, PartialEq)]
pub struct LinePlot {
    pub(super) title: String,
    pub(super) description: String,
    x: Axis,
    y: Axis,
    lines: Vec<Line>,
    levels: Vec<(f64, String)>,
    uprights: Vec<(f64, String)>,
}

impl LinePlot {
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> LinePlot {
        let (title, description) = (title.into(), String::new());
        let (lines, levels, uprights) = (Vec::new(), Vec::new(), Vec::new());
        LinePlot { title, description, x, y, lines, levels, uprights }
    }

    /// Describes the plot in a sentence, which is printed below it and read out in its place.
    #[must_use]
    pub fn describe(self, description: impl Into<String>) -> LinePlot {
        LinePlot { description: description.into(), ..self }
    }

    #[must_use]
    pub fn line(mut self, line: Line) -> LinePlot {
        self.lines.push(line);
        self
    }

    /// Adds a horizontal reference line.
    #[must_use]
    pub fn level(mut self, y: f64, label: impl Into<String>) -> LinePlot {
        self.levels.push((y, label.into()));
        self
    }

    /// Adds a vertical reference line.
    #[must_use]
    pub fn upright(mut self, x: f64, label: impl Into<String>) -> LinePlot {
        self.uprights.push((x, label.into()));
        self
    }

    /// Returns the points of all lines: name, x, y, and the ends of the band.
    pub(super) fn csv(&self) -> Vec<Vec<String>> {
        let header = ["line", &self.x.label, &self.y.label, "lowest", "highest"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        for line in &self.lines {
            for (at, (x, y)) in line.points.iter().enumerate() {
                let (low, high) = line.band.get(at).map_or_else(
                    || (String::new(), String::new()),
                    |(low, high)| (low.to_string(), high.to_string()),
                );
                rows.push(vec![line.name.clone(), x.to_string(), y.to_string(), low, high]);
            }
        }
        rows
    }

    fn fit(&self) -> (Fitted, Fitted) {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let bands = self.lines.iter().flat_map(|line| &line.band).flat_map(|(l, h)| [*l, *h]);
        let levels = self.levels.iter().map(|(y, _)| *y);
        let uprights = self.uprights.iter().map(|(x, _)| *x);
        (
            self.x.fit(points().map(|(x, _)| *x).chain(uprights)),
            self.y.fit(points().map(|(_, y)| *y).chain(bands).chain(levels)),
        )
    }
}

/// The plot's frame, and the mapping of values to positions.
struct Frame {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    x: Fitted,
    y: Fitted,
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        self.left + self.x.share(value) * (self.right - self.left)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - self.y.share(value) * (self.bottom - self.top)
    }
}

/// Draws the plot. Returns its height and contents.
pub(super) fn draw(plot: &LinePlot) -> (f64, String) {
    let mut body = String::new();
    let names: Vec<&str> = plot.lines.iter().map(|line| line.name.as_str()).collect();
    let legend_height = legend(&mut body, &names, |index, x, y| {
        let (from, to) = (at(x), at(x + 24.0));
        let class = class(index);
        let line = format!(
            "<line class=\"{class}\" x1=\"{from}\" x2=\"{to}\" y1=\"{0}\" y2=\"{0}\"/>",
            at(y)
        );
        format!("{line}{}\n", marker(index, x + 12.0, y, None))
    });
    let (x, y) = plot.fit();
    let widest = y.ticks.iter().map(|tick| text_width(&y.label(*tick))).fold(0.0, f64::max);
    let top = legend_height + 14.0;
    let bottom = top + PLOT_HEIGHT;
    let frame = Frame { left: widest + 34.0, top, right: WIDTH - RIGHT, bottom, x, y };
    draw_axes(&mut body, &frame, plot);
    for (index, line) in plot.lines.iter().enumerate() {
        draw_line(&mut body, &frame, plot, index, line);
    }
    draw_references(&mut body, &frame, plot);
    (bottom + BELOW, body)
}

fn draw_axes(body: &mut String, frame: &Frame, plot: &LinePlot) {
    let (left, right) = (at(frame.left), at(frame.right));
    let (top, bottom) = (at(frame.top), at(frame.bottom));
    for tick in &frame.y.ticks {
        let (y, label) = (frame.y(*tick), html(&frame.y.label(*tick)));
        let _ = writeln!(
            body,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{0}\" y2=\"{0}\"/>\
             <text class=\"end\" x=\"{1}\" y=\"{2}\">{label}</text>",
            at(y),
            at(frame.left - 6.0),
            at(y + 4.0)
        );
    }
    for tick in &frame.x.ticks {
        let (x, label) = (at(frame.x(*tick)), html(&frame.x.label(*tick)));
        let _ = writeln!(
            body,
            "<line class=\"grid\" x1=\"{x}\" x2=\"{x}\" y1=\"{top}\" y2=\"{bottom}\"/>\
             <text class=\"mid\" x=\"{x}\" y=\"{}\">{label}</text>",
            at(frame.bottom + 17.0)
        );
    }
    let middle = (frame.top + frame.bottom) / 2.0;
    let _ = writeln!(
        body,
        "<path class=\"axis\" d=\"M{left} {top}V{bottom}H{right}\"/>\
         <text class=\"mid label\" x=\"{}\" y=\"{}\">{}</text>\
         <text class=\"mid label\" transform=\"translate(12 {}) rotate(-90)\">{}</text>",
        at((frame.left + frame.right) / 2.0),
        at(frame.bottom + 38.0),
        html(&plot.x.label),
        at(middle),
        html(&fitted(&plot.y.label, frame.bottom - frame.top)),
    );
}

fn draw_line(body: &mut String, frame: &Frame, plot: &LinePlot, index: usize, line: &Line) {
    let shown =
        |(x, y): (f64, f64)| plot.x.shows(x) && plot.y.shows(y) && frame.x.has(x) && frame.y.has(y);
    let place = |(x, y): (f64, f64)| format!("{},{}", at(frame.x(x)), at(frame.y(y)));
    let banded = || line.points.iter().zip(&line.band);
    let lows = banded().map(|((x, _), (low, _))| (*x, *low)).filter(|point| shown(*point));
    let highs = banded().map(|((x, _), (_, high))| (*x, *high)).filter(|point| shown(*point));
    let highs: Vec<(f64, f64)> = highs.collect();
    let outline: Vec<String> = lows.chain(highs.into_iter().rev()).map(place).collect();
    if !outline.is_empty() {
        let _ = writeln!(
            body,
            "<polygon class=\"band k{}\" points=\"{}\"/>",
            index % COLOURS,
            outline.join(" ")
        );
    }
    let points: Vec<(f64, f64)> = line.points.iter().copied().filter(|p| shown(*p)).collect();
    let joined: Vec<String> = points.iter().copied().map(place).collect();
    let class = class(index);
    let _ = writeln!(body, "<polyline class=\"{class}\" points=\"{}\"/>", joined.join(" "));
    if points.len() > MARKED_POINTS_MAX {
        return;
    }
    for (x, y) in points {
        let title = format!("{}: {} \u{2192} {}", line.name, plain(x), plain(y));
        let _ = writeln!(body, "{}", marker(index, frame.x(x), frame.y(y), Some(&title)));
    }
}

fn draw_references(body: &mut String, frame: &Frame, plot: &LinePlot) {
    for (value, label) in plot.levels.iter().filter(|(y, _)| plot.y.shows(*y) && frame.y.has(*y)) {
        let y = frame.y(*value);
        let _ = writeln!(
            body,
            "<line class=\"reference\" x1=\"{}\" x2=\"{}\" y1=\"{2}\" y2=\"{2}\"/>\
             <text class=\"end halo\" x=\"{3}\" y=\"{4}\">{5}</text>",
            at(frame.left),
            at(frame.right),
            at(y),
            at(frame.right - 4.0),
            at(y - 5.0),
            html(&fitted(label, frame.right - frame.left)),
        );
    }
    for (value, label) in plot.uprights.iter().filter(|(x, _)| plot.x.shows(*x) && frame.x.has(*x))
    {
        let x = frame.x(*value);
        // The label goes to the side with more space.
        let rightwards = x < (frame.left + frame.right) / 2.0;
        let (class, from, room) = match rightwards {
            true => ("halo", x + 5.0, frame.right - x),
            false => ("end halo", x - 5.0, x - frame.left),
        };
        let _ = writeln!(
            body,
            "<line class=\"reference\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/>\
             <text class=\"{class}\" x=\"{3}\" y=\"{4}\">{5}</text>",
            at(x),
            at(frame.top),
            at(frame.bottom),
            at(from),
            at(frame.top + 13.0),
            html(&fitted(label, room)),
        );
    }
}

fn class(index: usize) -> String {
    format!("line k{} dash{}", index % COLOURS, (index / 4) % 3)
}

/// Draws the symbol of a series at a position, with its tooltip.
fn marker(index: usize, x: f64, y: f64, title: Option<&str>) -> String {
    let path = match index % 4 {
        0 => "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        1 => "m-3.5 -3.5h7v7h-7z",
        2 => "m0 -5l4.5 8h-9z",
        _ => "m0 -5l5 5l-5 5l-5 -5z",
    };
    let title = title.map(|text| format!("<title>{}</title>", html(text))).unwrap_or_default();
    let colour = index % COLOURS;
    format!("<path class=\"mark k{colour}\" d=\"M{} {}{path}\">{title}</path>", at(x), at(y))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_has_a_mark_with_its_values_and_hopeless_ones_are_left_out() {
        let line = Line::new("lru", [(1.0, 0.5), (2.0, f64::NAN), (0.0, 0.1), (4.0, 0.25)]);
        let plot = LinePlot::new("t", Axis::log2("size"), Axis::linear("ratio")).line(line);
        let (_, body) = draw(&plot);
        assert!(body.contains("<title>lru: 4 \u{2192} 0.25</title>"), "{body}");
        assert_eq!(body.matches("<title>").count(), 2, "{body}");
        assert!(!body.contains("NaN") && !body.contains("inf"), "{body}");
    }

    #[test]
    fn a_band_is_drawn_up_one_side_and_down_the_other() {
        let line = Line::new("a", [(0.0, 5.0), (10.0, 5.0)]).band([(0.0, 10.0), (0.0, 10.0)]);
        let plot = LinePlot::new("t", Axis::linear("x"), Axis::linear("y")).line(line);
        let (_, body) = draw(&plot);
        let band = body.lines().find(|line| line.contains("polygon")).expect("a band");
        assert_eq!(band.matches(',').count(), 4, "{band}");
    }

    #[test]
    fn an_empty_plot_and_a_long_one_can_be_drawn() {
        let plot = LinePlot::new("t", Axis::log("x"), Axis::linear("y"));
        assert!(draw(&plot).1.contains("axis"));
        let many = (0..1000).map(|x| (f64::from(x), 1.0));
        let (_, body) = draw(&plot.line(Line::new("a", many)));
        assert!(!body.contains("<title>"), "no marks on a thousand points");
    }
}
