//! The page on servers packed with machines.

use farpool_report::{BarPlot, Column, Page, Provenance, Table};

use super::pool::sentence;
use super::{GIB, place};
use crate::pack::{Answer, Method, Question, Row};
use crate::utilisation::MemoryUnit;

/// Names of left-out machines that are printed before the rest is only counted.
const NAMES_MAX: usize = 8;

/// Renders the answer to `question`, with the warnings of the series' reader.
pub fn pack(answer: &Answer, question: &Question, warnings: &[String], from: Provenance) -> Page {
    let title = format!("{} machines in servers of kind {}", answer.machines, question.server.name);
    let mut page = Page::new(title, from);
    for reason in &answer.reasons {
        page = page.finding(sentence(reason));
    }
    for warning in warnings {
        page = page.warning(sentence(warning));
    }
    if !answer.too_large.is_empty() {
        page = page.warning(too_large(&answer.too_large));
    }
    page.table(rows(answer)).plot(servers(answer)).plot(far(answer)).result(answer)
}

fn too_large(names: &[String]) -> String {
    let shown = names.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join(", ");
    let rest = names.len().saturating_sub(NAMES_MAX);
    let rest = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    let (count, verb) = (names.len(), if names.len() == 1 { "is" } else { "are" });
    format!("{count} of the machines {verb} larger than a server and left out: {shown}{rest}.")
}

fn name(row: &Row) -> String {
    match row.is_static {
        true => "by peaks, all local".into(),
        false if row.local_share >= 1.0 => "over time, all local".into(),
        false => format!("over time, {:.0} % local", row.local_share * 100.0),
    }
}

fn amount(answer: &Answer, value: f64) -> f64 {
    match answer.memory_unit {
        MemoryUnit::Bytes => value / GIB,
        MemoryUnit::Machines => value,
    }
}

fn unit(answer: &Answer) -> &'static str {
    match answer.memory_unit {
        MemoryUnit::Bytes => "GiB",
        MemoryUnit::Machines => "machines",
    }
}

fn rows(answer: &Answer) -> Table {
    let columns = [
        Column::left("how"),
        Column::right("servers"),
        Column::left("method").title("found by"),
        Column::right("first_fit").title("first fit"),
        Column::right("best_fit").title("best fit"),
        Column::right("lower_bound").title("at least"),
        Column::right("over_bound").title("over that").decimals(3),
        Column::right("sum_bound").title("peak of sums").unit("servers").decimals(1),
        Column::left("scarce"),
        Column::right("far_peak").title("far, peak of sums").unit(unit(answer)).decimals(1),
        Column::right("far_sum").title("far, sum of peaks").unit(unit(answer)).decimals(1),
    ];
    let mut table = Table::new("packings", "Servers that hold the machines", columns);
    for row in &answer.rows {
        let method = match row.method {
            Method::FirstFit => "first fit",
            Method::BestFit => "best fit",
            Method::Alignment => "alignment",
            Method::LocalSearch => "local search",
            Method::Exact => "proof",
        };
        table.row([
            name(row).into(),
            row.servers.into(),
            method.into(),
            row.first_fit.into(),
            row.best_fit.into(),
            row.lower_bound.into(),
            row.over_bound.into(),
            row.sum_bound.into(),
            if row.is_cpu_bound { "processors" } else { "memory" }.into(),
            amount(answer, row.far_peak).into(),
            amount(answer, row.far_sum).into(),
        ]);
    }
    table.note(
        "No packing has fewer servers than \"at least\": peak of sums, and Martello and \
        Toth's bound at every step.",
    )
}

fn servers(answer: &Answer) -> BarPlot {
    let of = |value: fn(&Row) -> usize| answer.rows.iter().map(move |row| place(value(row)));
    BarPlot::grouped("Servers", "servers")
        .describe("What was found, what first fit decreasing finds, and what nothing can go below.")
        .bars(answer.rows.iter().map(name))
        .part("found", of(|row| row.servers))
        .part("first fit", of(|row| row.first_fit))
        .part("at least", of(|row| row.lower_bound))
}

fn far(answer: &Answer) -> BarPlot {
    let rows = || answer.rows.iter().filter(|row| row.local_share < 1.0);
    BarPlot::grouped("Far memory", unit(answer))
        .describe(
            "Shared by all: as much as is in use at once. Given for good: as much as each \
            may need.",
        )
        .bars(rows().map(name))
        .part("shared by all", rows().map(|row| amount(answer, row.far_peak)))
        .part("given for good", rows().map(|row| amount(answer, row.far_sum)))
}
