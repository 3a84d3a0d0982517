//! The theses' tables cell by cell: what they print, what our models give, and why they differ.

mod acms;
mod dredbox;
mod ensemble;
mod gutierrez;
mod gutierrez_figures;
mod gutierrez_more;
mod lim;
mod lim_more;
mod lim_parts;

use serde::Serialize;

pub use acms::acms;
pub use dredbox::dredbox;
pub use ensemble::lim_ensemble;
pub use gutierrez::gutierrez;
pub use lim::lim;

/// What a cell shows. Only [`Verdict::Exact`], [`Verdict::Consistent`] and [`Verdict::InShape`] are
/// predictions that came true; what was put in, or chosen so that the cell comes out, tests
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The printed figure is an input of the model, or arithmetic of inputs that the text does too.
    Input,
    /// A constant that is not printed was chosen so that this cell comes out; `why` names it.
    Fitted,
    /// Computed, and the printed digits come out.
    Exact,
    /// Computed, and the printed digits lie within what the rounding of printed inputs leaves open.
    Consistent,
    /// Close, or of the same order and direction; `why` says how close.
    InShape,
    /// Different; `why` says what is known of it.
    Departs,
    /// The paper does not print what it would be computed from; ours is what the printed figures
    /// alone give.
    NotDerivable,
}

impl Verdict {
    /// Those that are tested come first.
    pub const ALL: [Verdict; 7] = [
        Verdict::Exact,
        Verdict::Consistent,
        Verdict::InShape,
        Verdict::Departs,
        Verdict::Fitted,
        Verdict::Input,
        Verdict::NotDerivable,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Verdict::Input => "input",
            Verdict::Fitted => "fitted",
            Verdict::Exact => "exact",
            Verdict::Consistent => "consistent",
            Verdict::InShape => "in shape",
            Verdict::Departs => "departs",
            Verdict::NotDerivable => "not derivable",
        }
    }

    /// True if the figure was computed from others and could have come out otherwise.
    pub fn is_tested(self) -> bool {
        !matches!(self, Verdict::Input | Verdict::Fitted | Verdict::NotDerivable)
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

/// A table or figure without a cell here, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    pub place: String,
    pub kind: Lack,
    pub why: String,
}

/// Why a table or figure has no cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    /// It has figures, and the paper does not print what they would be computed from, or compared
    /// with.
    NotDerivable,
    /// A drawing, a description, a list of inputs.
    NothingToCompute,
}

impl Lack {
    pub fn name(self) -> &'static str {
        match self {
            Lack::NotDerivable => "not derivable",
            Lack::NothingToCompute => "nothing to compute",
        }
    }
}

/// A thesis, cell by cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reproduction {
    pub source: String,
    pub cells: Vec<Cell>,
    pub errata: Vec<Erratum>,
    pub left_out: Vec<LeftOut>,
}

impl Reproduction {
    /// Counts the cells with this verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.cells.iter().filter(|cell| cell.verdict == verdict).count()
    }

    /// Says how many cells have each verdict, and how many of them test anything.
    pub fn summary(&self) -> String {
        let counted = |verdicts: &[Verdict]| -> String {
            let parts: Vec<String> = verdicts
                .iter()
                .map(|verdict| format!("{} {}", self.count(*verdict), verdict.name()))
                .collect();
            parts.join(", ")
        };
        let tested = self.cells.iter().filter(|cell| cell.verdict.is_tested()).count();
        let count = Verdict::ALL.iter().filter(|verdict| verdict.is_tested()).count();
        let (tests, rest) = Verdict::ALL.split_at(count);
        format!(
            "{tested} of {} cells are predictions: {}. The others test nothing: {}.",
            self.cells.len(),
            counted(tests),
            counted(rest)
        )
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

    /// The printed figure itself was put in: a cell that comes out tests nothing.
    fn input(self, why: impl Into<String>) -> Cell {
        match self.verdict {
            Verdict::Departs => self,
            _ => Cell { verdict: Verdict::Input, why: why.into(), ..self },
        }
    }

    /// A constant was chosen so that this cell comes out, to the digit or nearly; one that does not
    /// come out nevertheless departs.
    fn fitted(self, why: impl Into<String>) -> Cell {
        match self.verdict {
            Verdict::Departs => self,
            _ => Cell { verdict: Verdict::Fitted, why: why.into(), ..self },
        }
    }

    /// The paper does not print what the figure is made from.
    fn not_derivable(self, why: impl Into<String>) -> Cell {
        Cell { verdict: Verdict::NotDerivable, why: why.into(), ..self }
    }

    /// Departing or not, the printed figure lies within what the rounding of inputs leaves open.
    fn or_consistent(mut self, is_possible: bool, why: impl Into<String>) -> Cell {
        if is_possible && self.verdict != Verdict::Exact {
            (self.verdict, self.why) = (Verdict::Consistent, why.into());
        }
        self
    }
}

fn errata(all: &[(&str, &str)]) -> Vec<Erratum> {
    all.iter()
        .map(|(place, text)| Erratum { place: (*place).into(), text: (*text).into() })
        .collect()
}

fn left_out(kind: Lack, all: &[(&str, &str)]) -> Vec<LeftOut> {
    let one =
        |(place, why): &(&str, &str)| LeftOut { place: (*place).into(), kind, why: (*why).into() };
    all.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(paper: f64, ours: f64) -> Cell {
        Cell::rounded("Table 1", "a".into(), "", paper, ours, 0).within(0.1)
    }

    #[test]
    fn what_a_constant_was_chosen_by_is_fitted_also_where_it_is_only_near() {
        for ours in [10.0, 10.8] {
            assert!(cell(10.0, ours).verdict.is_tested());
            assert_eq!(cell(10.0, ours).fitted("x").verdict, Verdict::Fitted, "{ours}");
        }
        assert_eq!(cell(10.0, 20.0).fitted("x").verdict, Verdict::Departs);
    }

    #[test]
    fn the_summary_counts_each_cell_once_and_only_predictions_as_such() {
        let cells = vec![
            cell(10.0, 10.0),
            cell(10.0, 10.8),
            cell(10.0, 20.0),
            cell(10.0, 10.0).input("x"),
            cell(10.0, 10.0).fitted("x"),
            cell(10.0, 20.0).not_derivable("x"),
        ];
        let of = Reproduction { source: "x".into(), cells, errata: vec![], left_out: vec![] };
        assert_eq!(
            of.summary(),
            "3 of 6 cells are predictions: 1 exact, 0 consistent, 1 in shape, 1 departs. The \
             others test nothing: 1 fitted, 1 input, 1 not derivable."
        );
        let tested = Verdict::ALL.map(Verdict::is_tested);
        assert!(tested.windows(2).all(|pair| pair[0] || !pair[1]), "tested ones come first");
    }
}
