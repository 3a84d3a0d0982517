//! An experiment's results as an answer: text, JSON, page.

use farpool_report::{BarPlot, Cell, Column, Page, Provenance, Table};

use crate::design::Design;
use crate::engine::Outcome;
use crate::experiment::{Experiment, Refused, Row};
use crate::load::References;

/// If the longest time is more than this many times the shortest, bars are shares.
const WIDE_TIMES: f64 = 50.0;

/// Picoseconds in a millisecond.
const MS_PS: f64 = 1e9;

/// Builds the page that `farpool sim run` answers with.
#[must_use]
pub fn page(
    experiment: &Experiment,
    trace: &References,
    local: &Outcome,
    rows: &[Result<Row, Refused>],
    provenance: Provenance,
) -> Page {
    let done: Vec<&Row> = rows.iter().filter_map(|row| row.as_ref().ok()).collect();
    let mut page = Page::new("Designs of far memory", provenance);
    if let Some(best) = done.iter().min_by_key(|row| row.slowdown_permille) {
        page = page.finding(format!(
            "{} with {} local ({}) is {} slower than everything local; the slowest, {}.",
            best.design,
            best.local,
            best.policy,
            percent(best.slowdown_permille),
            done.iter()
                .max_by_key(|row| row.slowdown_permille)
                .map(|row| format!(
                    "{} with {}, {}",
                    row.design,
                    row.local,
                    percent(row.slowdown_permille)
                ))
                .unwrap_or_default()
        ));
    }
    for refused in rows.iter().filter_map(|row| row.as_ref().err()) {
        let Refused { design, local, reason } = refused;
        page = page.warning(format!("{design} with {local} local was not simulated: {reason}"));
    }
    let page = page
        .table(trace_table(experiment, trace, local))
        .table(row_table(&done))
        .table(design_table(experiment, trace.page_bytes))
        .plot(slowdown_plot(&done));
    let page = page.plot(time_plot(&done, local));
    page.result(
        &serde_json::json!({ "all_local": local, "rows": done, "designs": experiment.designs }),
    )
}

fn percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn number(value: u64) -> f64 {
    value as f64
}

fn trace_table(experiment: &Experiment, trace: &References, local: &Outcome) -> Table {
    let columns = [Column::left("what"), Column::left("value")];
    let mut table = Table::new("trace", "The trace", columns);
    let mut row = |name: &str, value: String| table.row([name.into(), value.into()]);
    if !trace.info.program.is_empty() {
        row("program", trace.info.program.join(" "));
    }
    row("source", trace.info.source.clone());
    row("references", trace.references.len().to_string());
    let footprint = trace.page_count() as u64 * trace.page_bytes;
    let bytes = farpool_units::format_bytes(trace.page_bytes);
    row("footprint", format!("{} in pages of {bytes}", farpool_units::format_bytes(footprint)));
    row("threads", trace.thread_count.to_string());
    let tick_ps = experiment.tick_ps.unwrap_or_else(|| trace.tick_ps());
    row("a tick of its clock", format!("{}.{:03} ns", tick_ps / 1000, tick_ps % 1000));
    row("time, everything local", format!("{:.3} ms", number(local.time_ps) / MS_PS));
    for note in &trace.info.notes {
        row("note", note.clone());
    }
    table
}

fn row_table(rows: &[&Row]) -> Table {
    let mut table = Table::new(
        "designs",
        "Designs",
        [
            Column::left("design"),
            Column::right("local"),
            Column::left("policy"),
            Column::right("slowdown").unit("%").decimals(1),
            Column::right("time").unit("ms").decimals(3),
            Column::right("far").unit("ms").decimals(3),
            Column::right("frames").unit("ms").decimals(3),
            Column::right("far_references").title("far refs"),
            Column::right("fetched").unit("MiB").decimals(1),
            Column::right("sent").unit("MiB").decimals(1),
        ],
    );
    for row in rows {
        let outcome = &row.outcome;
        let ms = |ps: u64| Cell::from(number(ps) / MS_PS);
        let mib = |bytes: u64| Cell::from(number(bytes) / f64::from(1 << 20));
        table.row([
            row.design.clone().into(),
            row.local.to_string().into(),
            row.policy.into(),
            (number(row.slowdown_permille) / 10.0).into(),
            ms(outcome.time_ps),
            ms(outcome.far_ps + outcome.overflow_ps),
            ms(outcome.frame_ps),
            (outcome.far_references + outcome.overflow_references).into(),
            mib(outcome.fetched_bytes),
            mib(outcome.sent_bytes),
        ]);
    }
    table.note("slowdown: time over everything local; frames: waiting for a page to leave")
}

fn design_table(experiment: &Experiment, page_bytes: u64) -> Table {
    let columns = [
        Column::left("design"),
        Column::right("fetch").unit("us").decimals(3),
        Column::left("source"),
    ];
    let mut table =
        Table::new("sources", "What a fetch takes when nothing else is going on", columns);
    for design in &experiment.designs {
        let fetch_us = fetch_us(design, page_bytes);
        table.row([design.name.clone().into(), fetch_us.into(), design.source.clone().into()]);
    }
    table
}

/// Returns the microseconds of a fetch; none where everything is local and nothing is fetched.
#[must_use]
pub fn fetch_us(design: &Design, page_bytes: u64) -> Option<f64> {
    (!design.is_all_local).then(|| number(design.idle_fetch_ps(page_bytes)) / 1e6)
}

fn labels(rows: &[&Row]) -> Vec<String> {
    rows.iter().map(|row| format!("{} {} {}", row.design, row.local, row.policy)).collect()
}

fn slowdown_plot(rows: &[&Row]) -> BarPlot {
    BarPlot::grouped("Slowdown against local memory", "%")
        .describe("How much longer the program takes than with everything local")
        .bars(labels(rows))
        .part("slowdown", rows.iter().map(|row| number(row.slowdown_permille) / 10.0))
}

fn time_plot(rows: &[&Row], local: &Outcome) -> BarPlot {
    let outcomes: Vec<&Outcome> =
        std::iter::once(local).chain(rows.iter().map(|row| &row.outcome)).collect();
    let names = std::iter::once("everything local".to_owned()).chain(labels(rows));
    // Beside a disk every other bar would have no width: then each is drawn as shares of its own.
    let total = |outcome: &Outcome| {
        number(
            outcome.compute_ps
                + outcome.local_ps
                + outcome.far_ps
                + outcome.overflow_ps
                + outcome.frame_ps
                + outcome.migration_ps,
        )
    };
    let totals = || outcomes.iter().map(|outcome| total(outcome));
    let is_wide = totals().fold(0.0, f64::max) > totals().fold(f64::MAX, f64::min) * WIDE_TIMES;
    let plot = match is_wide {
        true => BarPlot::stacked("Where the time goes", "% of the time of each").describe(
            "Time of all threads by what they wait for; the longest is many times the \
                       shortest, so that each bar is one whole",
        ),
        false => BarPlot::stacked("Where the time goes", "ms")
            .describe("Time of all threads by what they wait for"),
    };
    let plot = plot.bars(names);
    let part = |value: fn(&Outcome) -> u64| -> Vec<f64> {
        let shown = |outcome: &&Outcome| match is_wide {
            true => number(value(outcome)) / total(outcome).max(1.0) * 100.0,
            false => number(value(outcome)) / MS_PS,
        };
        outcomes.iter().map(shown).collect()
    };
    plot.part("computing", part(|outcome| outcome.compute_ps))
        .part("local memory", part(|outcome| outcome.local_ps))
        .part("far memory", part(|outcome| outcome.far_ps))
        .part("the tier below", part(|outcome| outcome.overflow_ps))
        .part("free frames", part(|outcome| outcome.frame_ps))
        .part("migration", part(|outcome| outcome.migration_ps))
}
