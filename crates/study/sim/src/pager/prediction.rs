//! Predicts a program's time under `farpool run --local`.

use farpool_policy::{PrefetchKind, VictimKind};
use farpool_report::{Column, Page, Provenance, Table};
use farpool_trace::Filter;
use farpool_units::at_most;
use serde::Serialize;

use super::measured::error;
use super::{
    Events, FIT_ERROR_MAX_PERMILLE, Limit, Load, MeasuredCosts, SHARE_FLOOR_BYTES, Settings, events,
};
use crate::experiment::LocalSize;
use crate::load::References;

/// The question: the runs' settings and the program's native time.
#[derive(Debug, Clone)]
pub struct Question {
    /// `--local` of the runs.
    pub local: Vec<LocalSize>,
    /// Shares are of the program's largest memory, its pages and files (`--peak` of the runs), not
    /// of
    /// what it has in use so far.
    pub of_peak: bool,
    /// Memory that counts against `--local` and cannot be far.
    pub fixed_bytes: u64,
    /// How much of [`Question::fixed_bytes`] is the program's files; None if nobody said.
    pub file_bytes: Option<u64>,
    /// `--victims` of the runs.
    pub victims: VictimKind,
    /// `--prefetch` of the runs.
    pub prefetch: PrefetchKind,
    /// Far memory is not on this machine: unchanged pages that arrived in runs are remembered too.
    pub remembers_runs: bool,
    /// For the random victim policy.
    pub seed: u64,
    /// The program's time with all its memory local.
    pub native_ps: u64,
}

/// The prediction for one limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Prediction {
    /// The limit as requested.
    pub local: LocalSize,
    /// The limit in bytes, as `--local` takes it; if it grows with the program, at its end.
    pub local_bytes: u64,
    /// The pager's events.
    pub events: Events,
    /// The time that they add to the program's.
    pub added_ps: u64,
    /// The predicted time, in thousandths of the program's own.
    pub slowdown_permille: u64,
    /// The band of the whole time that the calibration's errors leave; None if they are not known.
    pub time_band_ps: Option<(u64, u64)>,
}

/// Errors of the fit on each side of a predicted time, which hold nineteen in twenty.
const BAND_ERRORS: u64 = 2;
/// No prediction is surer than this, in thousandths.
const BAND_LEAST_PERMILLE: u64 = 20;

/// Returns the band of a predicted time.
fn band(time_ps: u64, measured: &MeasuredCosts) -> Option<(u64, u64)> {
    let error = u64::from(measured.fit()?.error_permille);
    let error = (error * BAND_ERRORS).max(BAND_LEAST_PERMILLE);
    let part = |permille: u64| at_most(u128::from(time_ps) * u128::from(permille) / 1000);
    Some((part(1000_u64.saturating_sub(error)), part(1000 + error)))
}

/// Predicts the events and the time of one limit.
#[must_use]
pub fn predict(
    question: &Question,
    trace: &References,
    measured: &MeasuredCosts,
    local: LocalSize,
) -> Prediction {
    let costs = &measured.costs;
    let fixed_pages = question.fixed_bytes / trace.page_bytes;
    // In use at the end: the program's and, as the pager counts, the pager's own.
    let all_pages = (trace.page_count() as u64).saturating_add(fixed_pages);
    let own_pages = question.file_bytes.unwrap_or(0) / trace.page_bytes;
    let peak_pages = trace.page_count().saturating_add(at_most(own_pages));
    let limit = match local {
        LocalSize::Permille(permille) if !question.of_peak => {
            Limit::Share { permille, least_pages: SHARE_FLOOR_BYTES / trace.page_bytes }
        }
        _ => Limit::Pages(local.pages(peak_pages, trace.page_bytes) as u64),
    };
    let limit_pages = limit.pages(all_pages);
    let settings = Settings {
        limit,
        fixed_pages,
        victims: question.victims,
        prefetch: question.prefetch,
        remembers_runs: question.remembers_runs,
        seed: question.seed,
    };
    let events = events(trace, &settings);
    let added_ps = costs.added_ps(&events);
    let permille = u128::from(added_ps) * 1000 / u128::from(question.native_ps.max(1));
    Prediction {
        local,
        local_bytes: limit_pages * trace.page_bytes,
        events,
        added_ps,
        slowdown_permille: at_most(permille),
        time_band_ps: band(question.native_ps.saturating_add(added_ps), measured),
    }
}

/// Builds the page that `farpool sim predict` answers with.
#[must_use]
pub fn page(
    question: &Question,
    trace: &References,
    measured: &MeasuredCosts,
    predictions: &[Prediction],
    provenance: Provenance,
) -> Page {
    let seconds = |ps: u64| number(ps) / PS_PER_S;
    let blades = if measured.blades.is_empty() {
        "its own memory".to_owned()
    } else {
        measured.blades.join(", ")
    };
    let mut page = Page::new("What far memory will cost this program", provenance);
    if let Some(worst) = predictions.iter().max_by_key(|it| it.slowdown_permille) {
        page = page.finding(format!(
            "With {} local the program takes {:.2} s{} instead of {:.2} s, on {}, far memory on \
             {blades}.",
            worst.local,
            seconds(question.native_ps + worst.added_ps),
            worst.time_band_ps.map_or_else(String::new, |(low, high)| {
                format!(" ({:.2} to {:.2} s)", seconds(low), seconds(high))
            }),
            seconds(question.native_ps),
            measured.machine,
        ));
    }
    for warning in doubts(question, measured) {
        page = page.warning(warning);
    }
    if !matches!(trace.info.filter, Some(Filter::Pages(_)) | None) {
        page = page.warning(
            "the trace went through caches, which hide pages that are in use; capture it with \
             --pages",
        );
    }
    if trace.thread_count > 1 {
        let threads = trace.thread_count;
        page = page.warning(format!(
            "{threads} threads: their faults overlap, and the costs are those of one; the program \
             will be faster"
        ));
    }
    page.table(prediction_table(question, predictions)).result(&serde_json::json!({
        "native_ps": question.native_ps,
        "fixed_bytes": question.fixed_bytes,
        "of_peak": question.of_peak,
        "fit": measured.fit(),
        "predictions": predictions,
        "costs": measured.costs,
    }))
}

fn prediction_table(question: &Question, predictions: &[Prediction]) -> Table {
    let seconds = |ps: u64| number(ps) / PS_PER_S;
    let mut table = Table::new(
        "predictions",
        "Under farpool run",
        [
            Column::right("local"),
            Column::right("limit").unit("MiB").decimals(1),
            Column::right("slowdown").unit("%").decimals(1),
            Column::right("time").unit("s").decimals(3),
            Column::right("time_low").title("from").unit("s").decimals(3),
            Column::right("time_high").title("to").unit("s").decimals(3),
            Column::right("fetches"),
            Column::right("ahead"),
            Column::right("taken_back").title("taken back"),
            Column::right("first").title("first touches"),
            Column::right("out").title("moved out"),
            Column::right("written"),
        ],
    );
    for prediction in predictions {
        let Prediction { events, .. } = prediction;
        table.row([
            prediction.local.to_string().into(),
            (number(prediction.local_bytes) / f64::from(1 << 20)).into(),
            (number(prediction.slowdown_permille) / 10.0).into(),
            seconds(question.native_ps + prediction.added_ps).into(),
            prediction.time_band_ps.map(|(low, _)| seconds(low)).into(),
            prediction.time_band_ps.map(|(_, high)| seconds(high)).into(),
            events.demand_fetches.into(),
            events.prefetches.into(),
            events.victim_hits.into(),
            events.zero_fills.into(),
            events.evictions.into(),
            events.pages_written.into(),
        ]);
    }
    let shares = match question.of_peak {
        true => "A share is one of the program's largest memory, as in farpool run --peak.",
        false => {
            "A share is one of what the program has in use so far, as in farpool run: the limit \
             grows with it, and is shown as it is at the end."
        }
    };
    table
        .note("slowdown: added to the program's own time, in percent of it")
        .note(shares)
        .note("from, to: what the calibration's own errors leave; errors of the counts come on top")
}

/// What speaks against a prediction, before any figure of it is read.
fn doubts(question: &Question, measured: &MeasuredCosts) -> Vec<String> {
    let mut doubts = Vec::new();
    if question.file_bytes.is_none() {
        doubts.push(
            "the trace does not say how much memory the program's files take (captured without \
             --time), so only the pager's own counts: the prediction is too fast; give --fixed, or \
             capture with --time"
                .to_owned(),
        );
    }
    match measured.fit() {
        None => doubts.push(
            "the file of costs has no probes: how well it fits is not known, and there is no band"
                .to_owned(),
        ),
        Some(fit) if !fit.is_good() => doubts.push(format!(
            "the costs do not fit: they explain probe {:?} {} % wrong; calibrate again on a quiet \
             machine",
            fit.worst_probe,
            fit.worst_permille / 10
        )),
        Some(_) => {}
    }
    if let Some(load) = measured.load.filter(|load| load.is_noticed()) {
        doubts.push(told_load(load));
    }
    doubts
}

fn told_load(load: Load) -> String {
    format!(
        "the machine did other work while it was measured: others used {}.{} % of its processors, \
         and {}.{} % were stolen",
        load.others_permille / 10,
        load.others_permille % 10,
        load.stolen_permille / 10,
        load.stolen_permille % 10
    )
}

/// Builds the page that `farpool sim calibrate` answers with.
#[must_use]
pub fn costs_page(measured: &MeasuredCosts, provenance: Provenance) -> Page {
    let ms = |ns: f64| ns / 1e6;
    let mut probes = Table::new(
        "probes",
        "Probes",
        [
            Column::left("probe"),
            Column::right("local").unit("ms").decimals(1),
            Column::right("far").unit("ms").decimals(1),
            Column::right("explained").title("by the costs").unit("ms").decimals(1),
            Column::right("error").unit("%").decimals(1),
        ],
    );
    for probe in &measured.probes {
        let explained_ns =
            number(probe.local_ns) + number(measured.costs.added_ps(&probe.events)) / 1e3;
        probes.row([
            probe.name.clone().into(),
            ms(number(probe.local_ns)).into(),
            ms(number(probe.far_ns)).into(),
            ms(explained_ns).into(),
            (error(&measured.costs, probe) * 100.0).into(),
        ]);
    }
    let columns = [Column::left("event"), Column::right("cost").unit("us").decimals(3)];
    let mut costs = Table::new("costs", "Costs", columns);
    for (event, cost_ps) in measured.costs.named() {
        costs.row([event.into(), (number(cost_ps) / 1e6).into()]);
    }
    let mut page = Page::new("What far memory costs here", provenance);
    if let Some(fit) = measured.fit() {
        page = page.finding(format!(
            "The costs explain the probes with an error of {}.{} %; the worst, {:?}, is off by \
             {}.{} %. Medians of {} alternated rounds.",
            fit.error_permille / 10,
            fit.error_permille % 10,
            fit.worst_probe,
            fit.worst_permille / 10,
            fit.worst_permille % 10,
            measured.rounds
        ));
        if !fit.is_good() {
            page = page.warning(format!(
                "more than {} %: these costs do not fit",
                FIT_ERROR_MAX_PERMILLE / 10
            ));
        }
    }
    if let Some(load) = measured.load.filter(|load| load.is_noticed()) {
        page = page.warning(told_load(load));
    }
    page.table(costs).table(probes).result(&serde_json::json!(measured))
}

const PS_PER_S: f64 = 1e12;

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn number(value: u64) -> f64 {
    value as f64
}
