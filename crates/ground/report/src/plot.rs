//! Plots as inline SVG: lines on linear or logarithmic axes, and bars.
//!
//! Colours come from the page's style sheet by class (`k0` to `k7`, the palette of Okabe and Ito,
//! which colour-blind people can tell apart), so one drawing serves light, dark and paper. Lines
//! differ in marker and dashes, too.

mod axis;
mod bars;
mod lines;

use std::fmt::Write;

pub use axis::Axis;
pub use bars::BarPlot;
pub use lines::{Line, LinePlot};

use crate::escape::html;

/// Width of every drawing in its own units; the page scales it.
const WIDTH: f64 = 760.0;
/// Average width of a label's character at 12 units of height, rounded up generously.
const CHARACTER: f64 = 6.8;
/// Height of a line of the legend.
const LEGEND_ROW: f64 = 20.0;
/// Colours; further series start again at the first, with other dashes.
const COLOURS: usize = 8;

/// Any kind of plot.
#[derive(Clone, Debug, PartialEq)]
pub enum Plot {
    Lines(LinePlot),
    Bars(BarPlot),
}

impl From<LinePlot> for Plot {
    fn from(plot: LinePlot) -> Plot {
        Plot::Lines(plot)
    }
}

impl From<BarPlot> for Plot {
    fn from(plot: BarPlot) -> Plot {
        Plot::Bars(plot)
    }
}

impl Plot {
    pub(crate) fn title(&self) -> &str {
        match self {
            Plot::Lines(plot) => &plot.title,
            Plot::Bars(plot) => &plot.title,
        }
    }

    pub(crate) fn description(&self) -> &str {
        match self {
            Plot::Lines(plot) => &plot.description,
            Plot::Bars(plot) => &plot.description,
        }
    }

    /// Returns what the plot shows as comma-separated values with a header.
    pub(crate) fn csv(&self) -> String {
        let rows = match self {
            Plot::Lines(plot) => plot.csv(),
            Plot::Bars(plot) => plot.csv(),
        };
        let line = |row: &Vec<String>| {
            let fields: Vec<String> = row.iter().map(|field| csv_field(field)).collect();
            fields.join(",") + "\n"
        };
        rows.iter().map(line).collect()
    }

    /// Draws the plot; `id` makes the names in it unique on the page.
    pub(crate) fn svg(&self, id: &str) -> String {
        let (height, body) = match self {
            Plot::Lines(plot) => lines::draw(plot),
            Plot::Bars(plot) => bars::draw(plot),
        };
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-desc\">\n<title id=\"{id}-title\">{}</title>\n\
             <desc id=\"{id}-desc\">{}</desc>\n{body}</svg>\n",
            html(self.title()),
            html(self.description()),
        )
    }
}

/// Quotes a field that would not be one otherwise.
fn csv_field(field: &str) -> String {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}

/// Formats a position to a tenth of a unit: short, and the same on every machine.
fn at(position: f64) -> String {
    let text = format!("{position:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

fn text_width(text: &str) -> f64 {
    // No label has so many characters that the count would lose digits.
    #[allow(clippy::cast_precision_loss)]
    let characters = text.chars().count() as f64;
    characters * CHARACTER
}

/// Returns `text` cut to fit into `width`.
fn fitted(text: &str, width: f64) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let mut cut: String = String::new();
    for character in text.chars() {
        if text_width(&cut) + 2.0 * CHARACTER > width {
            break;
        }
        cut.push(character);
    }
    cut.push('\u{2026}');
    cut
}

/// Draws the legend above the plot; `key` draws the symbol of entry n with its left edge at (x, y).
/// Returns the height.
fn legend(body: &mut String, names: &[&str], key: impl Fn(usize, f64, f64) -> String) -> f64 {
    const KEY: f64 = 30.0;
    let (mut x, mut y) = (8.0, 14.0);
    for (index, name) in names.iter().enumerate() {
        let width = KEY + text_width(name) + 16.0;
        if x + width > WIDTH && x > 8.0 {
            (x, y) = (8.0, y + LEGEND_ROW);
        }
        body.push_str(&key(index, x, y));
        let name = html(&fitted(name, WIDTH - KEY - 16.0));
        let _ = writeln!(body, "<text x=\"{}\" y=\"{}\">{name}</text>", at(x + KEY), at(y + 4.0));
        x += width;
    }
    if names.is_empty() { 0.0 } else { y + 8.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_short_and_labels_are_cut_to_fit() {
        assert_eq!((at(3.0).as_str(), at(5.12).as_str()), ("3", "5.1"));
        assert_eq!(fitted("short", 100.0), "short");
        let cut = fitted("a rather long label", 60.0);
        assert!(cut.ends_with('\u{2026}') && text_width(&cut) <= 60.0, "{cut}");
    }

    #[test]
    fn what_is_drawn_can_be_taken_along() {
        let line = LinePlot::new("t", Axis::linear("size, GiB"), Axis::linear("ratio"))
            .line(Line::new("a", [(1.0, 0.5), (2.0, 0.25)]).band([(0.4, 0.6), (0.2, 0.3)]));
        let text = Plot::from(line).csv();
        assert_eq!(
            text,
            "line,\"size, GiB\",ratio,lowest,highest\na,1,0.5,0.4,0.6\na,2,0.25,0.2,0.3\n"
        );
        let bars = BarPlot::grouped("t", "ms").bars(["a", "b"]).part("p", [1.0, 2.0]);
        assert_eq!(Plot::from(bars).csv(), "ms,p\na,1\nb,2\n");
    }

    #[test]
    fn text_from_outside_is_no_markup_in_a_drawing() {
        let evil = "</svg><script>alert(1)</script>";
        let line = LinePlot::new(evil, Axis::linear(evil), Axis::linear(evil))
            .describe(evil)
            .level(1.0, evil)
            .upright(1.0, evil)
            .line(Line::new(evil, [(0.0, 1.0), (1.0, 2.0)]));
        let bars = BarPlot::stacked(evil, evil).bars([evil]).part(evil, [1.0]);
        for plot in [Plot::from(line), Plot::from(bars)] {
            let svg = plot.svg("p0");
            assert!(!svg.contains("<script") && svg.matches("</svg>").count() == 1, "{svg}");
        }
    }
}
