//! The papers' claims about programs on far memory, and our results.
//!
//! Figures that need the authors' own programs cannot be matched digit by digit; their direction
//! and band can. Lim's claims are tested on any given traces, those of HPL-2011-31 on its own
//! microbenchmark.

mod contents;
mod hpl;
mod lim;
mod sharing;

use farpool_report::{Column, Page, Provenance, Table};
use serde::Serialize;

pub use hpl::{MstressRun, hpl, hpl_vms};
pub use lim::lim;
pub use sharing::VmsRun;

/// The verdict on a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// Our direction and band agree with the paper's.
    InShape,
    /// They disagree.
    Departs,
    /// It follows from a constant that was chosen to fit the paper.
    Fitted,
    /// The paper's own figure is put in, so that the result tests nothing of it.
    Input,
    /// The paper does not print enough to test it.
    NotDerivable,
}

/// A claim of a paper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// Where it is printed.
    pub place: String,
    /// What is claimed.
    pub claim: String,
    /// The trace it was tested on.
    pub on: String,
    /// The paper's value.
    pub paper: String,
    /// Our value.
    pub ours: String,
    /// The verdict.
    pub holds: Holds,
    /// Why it departs, or a caveat.
    pub why: String,
}

fn verdict(is_so: bool) -> Holds {
    if is_so { Holds::InShape } else { Holds::Departs }
}

/// Returns `a / b` with two digits; integers throughout, so that it is the same everywhere.
fn ratio(a: u64, b: u64) -> String {
    let hundredths = u128::from(a) * 100 / u128::from(b.max(1));
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

fn percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// Renders the claims as a table.
#[must_use]
pub fn table(claims: &[Claim]) -> Table {
    let columns = ["place", "claim", "on", "paper", "ours", "verdict", "why"].map(Column::left);
    let mut table =
        Table::new("claims", "What the paper says of programs, and what comes out here", columns);
    for claim in claims {
        let holds = match claim.holds {
            Holds::InShape => "in shape",
            Holds::Departs => "departs",
            Holds::Fitted => "fitted",
            Holds::Input => "input",
            Holds::NotDerivable => "not derivable",
        };
        let cells = [&claim.place, &claim.claim, &claim.on, &claim.paper, &claim.ours];
        let cells = cells.map(|text| text.clone().into());
        table.row(cells.into_iter().chain([holds.into(), claim.why.clone().into()]));
    }
    table
}

/// Builds a page of the claims alone.
#[must_use]
pub fn page(title: &str, claims: &[Claim], provenance: Provenance) -> Page {
    let count = |holds| claims.iter().filter(|claim| claim.holds == holds).count();
    let (fitting, departing) = (count(Holds::InShape), count(Holds::Departs));
    let others = [
        (Holds::Fitted, "fitted"),
        (Holds::Input, "input"),
        (Holds::NotDerivable, "not derivable from what is printed"),
    ];
    let others: Vec<String> = others
        .into_iter()
        .map(|(holds, what)| (count(holds), what))
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    let others = if others.is_empty() { String::new() } else { format!("; {}", others.join(", ")) };
    Page::new(title, provenance)
        .finding(format!(
            "{} claims, {} of them predictions: {fitting} in shape, {departing} depart{others}.",
            claims.len(),
            fitting + departing
        ))
        .table(table(claims))
        .result(&claims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_tried_is_not_counted_as_in_shape() {
        let claims = hpl_vms(VmsRun { pages: 1000, references: 20_000 }).unwrap();
        let text = page("HPL", &claims, Provenance::new("test", ["reproduce"])).text();
        let count = |holds| claims.iter().filter(|claim| claim.holds == holds).count();
        let (fitting, departing) = (count(Holds::InShape), count(Holds::Departs));
        let tried = fitting + departing;
        assert_eq!(tried + 5, claims.len());
        let told = format!(
            "{} claims, {tried} of them predictions: {fitting} in shape, {departing} depart; 1 \
             fitted, 1 input, 3 not derivable from what is printed.",
            claims.len()
        );
        assert!(text.contains(&told), "{text}");
    }
}
