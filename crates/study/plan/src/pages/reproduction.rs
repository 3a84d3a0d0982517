//! A thesis's figures beside ours.

use farpool_report::{Column, Page, Provenance, Table};

use crate::reproduce::Reproduction;

/// Returns all cells of one place, or of all places.
pub fn reproduction_table(of: &Reproduction, place: Option<&str>) -> Table {
    let columns = [
        Column::left("place"),
        Column::left("cell"),
        Column::left("unit"),
        Column::right("paper"),
        Column::right("ours"),
        Column::left("verdict"),
        Column::left("why"),
    ];
    let mut table = Table::new("cells", of.source.clone(), columns);
    for cell in of.cells.iter().filter(|cell| place.is_none_or(|place| cell.place == place)) {
        table.row([
            cell.place.clone().into(),
            cell.name.clone().into(),
            cell.unit.clone().into(),
            cell.paper.into(),
            cell.ours.into(),
            cell.verdict.name().into(),
            cell.why.clone().into(),
        ]);
    }
    table
}

/// Returns the errors in the paper itself.
pub fn errata_table(of: &Reproduction) -> Table {
    let columns = [Column::left("place"), Column::left("text").title("what")];
    let mut table = Table::new("errata", "What contradicts itself in print", columns);
    for erratum in &of.errata {
        table.row([erratum.place.clone().into(), erratum.text.clone().into()]);
    }
    table
}

/// Returns the tables and figures that have no cell, with the reason.
fn left_out_table(of: &Reproduction) -> Table {
    let columns = [Column::left("place"), Column::left("kind"), Column::left("why")];
    let mut table = Table::new("left_out", "Tables and figures without a cell", columns);
    for left in &of.left_out {
        table.row([left.place.clone().into(), left.kind.name().into(), left.why.clone().into()]);
    }
    table
}

/// Renders the whole thesis.
pub fn reproduction(of: &Reproduction, from: Provenance) -> Page {
    Page::new(of.source.clone(), from)
        .finding(of.summary())
        .table(reproduction_table(of, None))
        .table(errata_table(of))
        .table(left_out_table(of))
        .result(of)
}
