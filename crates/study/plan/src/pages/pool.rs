//! Peak of sums against pool size.

use farpool_report::{Axis, BarPlot, Cell, Column, Line, LinePlot, Page, Provenance, Table};

use super::{GIB, place};
use crate::pool::{Answer, Question, Size};
use crate::utilisation::MemoryUnit;

/// Renders the answer to `question`, with the warnings of the series' reader.
pub fn pool(answer: &Answer, question: &Question, warnings: &[String], from: Provenance) -> Page {
    let mut page = Page::new(format!("Pools of {} machines", answer.vms), from);
    for reason in &answer.advice.reasons {
        page = page.finding(sentence(reason));
    }
    for warning in warnings {
        page = page.warning(sentence(warning));
    }
    page = page
        .table(sizes(answer, question))
        .plot(ratios(answer, question))
        .table(percentiles(answer, question));
    if answer.percentiles.len() > 1 {
        page = page.plot(shortages(answer, question));
    }
    if answer.sizes.iter().any(|size| size.break_even_member_cost.is_some()) {
        page = page.plot(break_even(answer, question));
    }
    page.result(answer)
}

/// Adds a capital letter and a full stop.
pub(super) fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), letters.as_str())
}

fn sizes(answer: &Answer, question: &Question) -> Table {
    let is_bytes = answer.unit == MemoryUnit::Bytes;
    let amount = if is_bytes { "GiB" } else { "machines" };
    let is_sized = answer.sizes.iter().any(|size| size.saved_gib.is_some());
    let mut columns = vec![
        Column::right("pool_vms").title("pool").unit("VMs"),
        Column::right("pools"),
        Column::right("ratio").title("peak of sums / sum of peaks").decimals(3),
        Column::right("ratio_low").title("2.5 %").decimals(3),
        Column::right("ratio_high").title("97.5 %").decimals(3),
        Column::right("ratio_with_spare").title("with spare").decimals(3),
        Column::right("vms_at_risk").title("hit by a failed blade").unit("VMs"),
    ];
    if !is_bytes {
        columns.push(Column::right("saved_machines").title("saved").unit("machines").decimals(1));
    }
    if is_sized {
        columns.push(Column::right("saved_gib").title("saved").unit("GiB").decimals(1));
        columns.push(
            Column::right("break_even_member_dollars").title("breaks even at").unit("$ a VM"),
        );
    }
    let mut table = Table::new("sizes", "Pools by size", columns);
    for size in &answer.sizes {
        let mut row: Vec<Cell> = vec![
            size.vms.into(),
            size.pools.into(),
            size.ratio.into(),
            size.ratio_low.into(),
            size.ratio_high.into(),
            size.ratio_with_spare.into(),
            size.vms_at_risk.into(),
        ];
        if !is_bytes {
            row.push(size.saved.into());
        }
        if is_sized {
            row.extend([size.saved_gib.into(), size.break_even_member_cost.into()]);
        }
        table.row(row);
    }
    let apart = match is_bytes {
        true => answer.sum_of_peaks / GIB,
        false => answer.sum_of_peaks,
    };
    let mut note = format!("Apart the machines need {apart:.1} {amount}, the sum of their peaks.");
    if let Some(provisioned) = answer.provisioned {
        let provisioned = if is_bytes { provisioned / GIB } else { provisioned };
        note += &format!(" They were promised {provisioned:.1} {amount}.");
    }
    table.note(note).note(format!(
        "Mean and 95 % of {} random groupings of seed {}.",
        question.groupings, question.seed
    ))
}

fn ratios(answer: &Answer, question: &Question) -> LinePlot {
    let points = |of: fn(&Size) -> f64| -> Vec<(f64, f64)> {
        answer.sizes.iter().map(|size| (place(size.vms), of(size))).collect()
    };
    let band = answer.sizes.iter().map(|size| (size.ratio_low, size.ratio_high));
    let y = Axis::linear("memory / sum of peaks").from_zero();
    let mut plot =
        LinePlot::new("Memory of pools against their size", Axis::log2("pool size (VMs)"), y)
            .describe("Peak of sums over sum of peaks; the band holds 95 % of the groupings.")
            .line(Line::new("peak of sums", points(|size| size.ratio)).band(band));
    if question.blades > 1 {
        plot = plot.line(Line::new("with a spare blade", points(|size| size.ratio_with_spare)));
    }
    plot = plot
        .level(1.0, "apart")
        .level(1.0 - question.worth, "worth it below")
        .upright(place(question.group), format!("{} VMs", question.group));
    match answer.advice.right_vms {
        Some(right) if right != question.group => plot.upright(place(right), "right size"),
        _ => plot,
    }
}

fn percentiles(answer: &Answer, question: &Question) -> Table {
    let columns = [
        Column::right("percentile").decimals(1),
        Column::right("ratio").title("memory / sum of peaks").decimals(3),
        Column::right("short_percent").title("time short").unit("%").decimals(3),
        Column::right("shortages_per_pool_day").title("shortages").unit("a pool and day"),
        Column::right("longest_short_min").title("longest").unit("min").decimals(0),
        Column::right("worst_short_percent").title("worst").unit("% of the pool").decimals(1),
    ];
    let title = format!("Pools of {} VMs with less than their peak", question.group);
    let mut table = Table::new("percentiles", title, columns);
    for row in &answer.percentiles {
        table.row([
            row.percentile.into(),
            row.ratio.into(),
            (row.short_share * 100.0).into(),
            row.shortages_per_pool_day.into(),
            (row.longest_short_s / 60.0).into(),
            (row.worst_short_share * 100.0).into(),
        ]);
    }
    table.note("Without a spare blade. What is short must wait, move or be refused.")
}

fn shortages(answer: &Answer, question: &Question) -> BarPlot {
    let rows = || answer.percentiles.iter();
    BarPlot::grouped(
        format!("Pools of {} VMs with less than their peak", question.group),
        "percent",
    )
    .describe("Less memory, and what it is paid for with.")
    .bars(rows().map(|row| format!("{} %", row.percentile)))
    .part("memory / sum of peaks", rows().map(|row| row.ratio * 100.0))
    .part("time short", rows().map(|row| row.short_share * 100.0))
}

fn break_even(answer: &Answer, question: &Question) -> LinePlot {
    let points = answer
        .sizes
        .iter()
        .filter_map(|size| Some((place(size.vms), size.break_even_member_cost?)));
    let plot = LinePlot::new(
        "What joining a pool may cost",
        Axis::log2("pool size (VMs)"),
        Axis::linear("$ a VM").from_zero(),
    )
    .describe(
        "Port, switch and blade of a member together must cost less than this for the pool to pay.",
    )
    .line(Line::new("breaks even at", points));
    match question.member_cost {
        Some(cost) => plot.level(cost, "costs"),
        None => plot,
    }
}
