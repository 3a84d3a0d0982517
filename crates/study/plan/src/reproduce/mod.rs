//! The theses' tables cell by cell: what they print, what our models give, and why they differ.

mod ensemble;
mod gutierrez;
mod lim;
mod lim_parts;

use serde::Serialize;

pub use ensemble::lim_ensemble;
pub use gutierrez::gutierrez;
pub use lim::lim;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The printed digits, or within what the rounding of printed inputs allows.
    Exact,
    /// Close, or of the same order and direction; `why` says how close.
    InShape,
    /// Different; `why` says what is known of it.
    Departs,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Exact => "exact",
            Verdict::InShape => "in shape",
            Verdict::Departs => "departs",
        }
    }
}

/// One printed figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Where it is printed: `Table 3`.
    pub place: String,
    /// Its name: `srvr1, total cost`.
    pub name: String,
    pub unit: String,
    pub paper: f64,
    pub ours: f64,
    pub verdict: Verdict,
    /// Empty for most exact cells.
    pub why: String,
}

/// An error in the paper itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Erratum {
    pub place: String,
    pub text: String,
}

/// A thesis, cell by cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reproduction {
    pub source: String,
    pub cells: Vec<Cell>,
    pub errata: Vec<Erratum>,
}

impl Reproduction {
    /// Counts the cells with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.cells.iter().filter(|cell| cell.verdict == verdict).count()
    }

    /// Returns the cells of one place.
    pub fn of(&self, place: &str) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| cell.place == place)
    }
}

impl Cell {
    /// Exact if `ours` rounds to the printed value with `decimals` digits (a printed half may be
    /// rounded either way); otherwise in shape if it is within `band` of the printed value.
    fn rounded(
        place: &str,
        name: String,
        unit: &str,
        paper: f64,
        ours: f64,
        decimals: i32,
    ) -> Cell {
        let off = (ours - paper).abs();
        let exact = off <= 0.5 * 10_f64.powi(-decimals) + 1e-9;
        let verdict = if exact { Verdict::Exact } else { Verdict::Departs };
        Cell {
            place: place.into(),
            name,
            unit: unit.into(),
            paper,
            ours,
            verdict,
            why: String::new(),
        }
    }

    /// A percentage that other data can only approach: in shape within `points` points.
    fn near(place: &str, name: String, paper: f64, ours: f64, points: f64) -> Cell {
        let is_near = (ours - paper).abs() <= points;
        let verdict = if is_near { Verdict::InShape } else { Verdict::Departs };
        Cell { verdict, ..Cell::rounded(place, name, "%", paper, ours, 0) }
    }

    /// In shape instead of departing if it is within this share of the printed value.
    fn within(mut self, share: f64) -> Cell {
        let off = (self.ours / self.paper - 1.0).abs();
        if self.verdict == Verdict::Departs && off <= share {
            self.verdict = Verdict::InShape;
            self.why = format!("within {:.2} %", off * 100.0);
        }
        self
    }

    fn because(mut self, why: impl Into<String>) -> Cell {
        self.why = why.into();
        self
    }

    /// Gives the reason only if the cell departs.
    fn or_because(self, why: &str) -> Cell {
        match self.verdict {
            Verdict::Departs => self.because(why),
            _ => self,
        }
    }
}

fn errata(all: &[(&str, &str)]) -> Vec<Erratum> {
    all.iter()
        .map(|(place, text)| Erratum { place: (*place).into(), text: (*text).into() })
        .collect()
}
