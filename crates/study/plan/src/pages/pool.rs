//! Peak of sums against pool size.

use farpool_report::{Axis, BarPlot, Cell, Column, Line, LinePlot, Page, Provenance, Table};
use farpool_units::about_bytes;

use super::place;
use crate::pool::{Answer, How, Question, Size};
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
    for table in what_if(answer, question) {
        page = page.table(table);
    }
    page.result(answer)
}

/// Tables of what changes if something does, of those changes that were asked for.
fn what_if(answer: &Answer, question: &Question) -> Vec<Table> {
    let what_if = &answer.what_if;
    let unit = if answer.unit == MemoryUnit::Bytes { 1.0 / super::GIB } else { 1.0 };
    let amount = if answer.unit == MemoryUnit::Bytes { "GiB" } else { "machines" };
    let mut grouped = Table::new(
        "grouped",
        format!("Who shares a pool of {} VMs", question.group),
        [
            Column::left("how").title("pools"),
            Column::right("ratio").title("memory / sum of peaks").decimals(3),
        ],
    );
    for row in &what_if.grouped {
        let how = match row.how {
            How::Random => "at random",
            How::AsListed => "as the file lists them",
            How::PeakTogether => "those that peak at the same time",
        };
        grouped.row([how.into(), row.ratio.into()]);
    }
    let mut growth = Table::new(
        "growth",
        format!("With {:.1} % growth a year", question.changes.growth_per_year * 100.0),
        [
            Column::right("year"),
            Column::right("apart").unit(amount).decimals(1),
            Column::right("pooled").unit(amount).decimals(1),
            Column::right("short_percent").title("today's pools short").unit("% of time"),
            Column::right("worst_percent").title("by at worst").unit("%").decimals(1),
        ],
    );
    for year in &what_if.growth {
        growth.row([
            year.year.into(),
            (year.sum_of_peaks * unit).into(),
            (year.pooled * unit).into(),
            (year.short_share * 100.0).into(),
            (year.worst_short_share * 100.0).into(),
        ]);
    }
    let mut lost = Table::new(
        "blade_lost",
        format!("When one of {} blades fails", question.blades),
        [
            Column::left("pool"),
            Column::right("vms_hit").title("hit").unit("VMs"),
            Column::right("lost_percent").title("of their far memory").unit("%").decimals(1),
            Column::right("short_percent").title("rest too small").unit("% of time"),
            Column::right("worst_percent").title("by at worst").unit("%").decimals(1),
        ],
    );
    for row in &what_if.blade_lost {
        lost.row([
            if row.has_spare { "with a spare" } else { "without" }.into(),
            row.vms_hit.into(),
            (row.lost_share * 100.0).into(),
            (row.short_share * 100.0).into(),
            (row.worst_short_share * 100.0).into(),
        ]);
    }
    let tables = [grouped, growth, lost, prices(answer)];
    tables.into_iter().filter(|table| !table.is_empty()).collect()
}

fn prices(answer: &Answer) -> Table {
    let mut table = Table::new(
        "prices",
        "At the ends of the prices",
        [
            Column::right("memory_dollars").title("GiB in a server").unit("$"),
            Column::right("far_dollars").title("GiB in a blade").unit("$"),
            Column::right("member_dollars").title("joining costs").unit("$ a VM"),
            Column::right("break_even_dollars").title("breaks even at").unit("$ a VM"),
            Column::right("net_dollars").title("saved").unit("$ a VM"),
        ],
    );
    for corner in &answer.what_if.prices {
        table.row([
            corner.local_price_per_gib.into(),
            corner.far_price_per_gib.into(),
            corner.member_cost.into(),
            corner.break_even_member_cost.into(),
            corner.net_per_member.into(),
        ]);
    }
    table
}

/// Adds a capital letter and a full stop.
pub(super) fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), letters.as_str())
}

fn sizes(answer: &Answer, question: &Question) -> Table {
    let is_bytes = answer.unit == MemoryUnit::Bytes;
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
        let of = |value: fn(&Size) -> Option<f64>| answer.sizes.iter().filter_map(value);
        let gib = digits(1, of(|size| size.saved_gib));
        columns.push(Column::right("saved_gib").title("saved").unit("GiB").decimals(gib));
        let dollars = digits(2, of(|size| size.break_even_member_cost));
        columns.push(
            Column::right("break_even_member_dollars")
                .title("breaks even at")
                .unit("$ a VM")
                .decimals(dollars),
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
    let amount = |value: f64| match is_bytes {
        true => about_bytes(value),
        false => format!("{value:.1} machines"),
    };
    let apart = amount(answer.sum_of_peaks);
    let mut note = format!("Apart the machines need {apart}, the sum of their peaks.");
    if let Some(provisioned) = answer.provisioned {
        note += &format!(" They were promised {}.", amount(provisioned));
    }
    table.note(note).note(format!(
        "Mean and 95 % of {} random groupings of seed {}.",
        question.groupings, question.seed
    ))
}

/// Returns the decimals, at least `usual`, that show two digits of the largest value.
fn digits(usual: usize, values: impl Iterator<Item = f64>) -> usize {
    let largest = values.map(f64::abs).fold(0.0, f64::max);
    match largest > 0.0 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 0 to 9
        true => usual.max((1.0 - largest.log10().floor()).clamp(0.0, 9.0) as usize),
        false => usual,
    }
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
