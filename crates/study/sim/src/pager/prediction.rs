//! Predicts a program's time under `farpool run --local`.

use farpool_policy::{PrefetchKind, VictimKind};
use farpool_report::{Column, Page, Provenance, Table};
use farpool_trace::Filter;
use farpool_units::at_most;
use serde::Serialize;

use super::{Costs, Events, MeasuredCosts, Settings, events};
use crate::experiment::LocalSize;
use crate::load::References;

/// The question: the runs' settings and the program's native time.
#[derive(Debug, Clone)]
pub struct Question {
    /// `--local` of the runs.
    pub local: Vec<LocalSize>,
    /// Memory that counts against `--local` and cannot be far.
    pub fixed_bytes: u64,
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
    /// The limit in bytes, as `--local` takes it.
    pub local_bytes: u64,
    /// The pager's events.
    pub events: Events,
    /// The time that they add to the program's.
    pub added_ps: u64,
    /// The predicted time, in thousandths of the program's own.
    pub slowdown_permille: u64,
}

/// Predicts the events and the time of one limit.
#[must_use]
pub fn predict(
    question: &Question,
    trace: &References,
    costs: &Costs,
    local: LocalSize,
) -> Prediction {
    let fixed_pages = question.fixed_bytes / trace.page_bytes;
    // A share refers to all of the program's memory.
    let all_pages = trace.page_count().saturating_add(at_most(fixed_pages));
    let limit_pages = local.pages(all_pages, trace.page_bytes) as u64;
    let settings = Settings {
        limit_pages,
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
    let mut table = Table::new(
        "predictions",
        "Under farpool run",
        [
            Column::right("local"),
            Column::right("limit").unit("MiB").decimals(1),
            Column::right("slowdown").unit("%").decimals(1),
            Column::right("time").unit("s").decimals(3),
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
            events.demand_fetches.into(),
            events.prefetches.into(),
            events.victim_hits.into(),
            events.zero_fills.into(),
            events.evictions.into(),
            events.pages_written.into(),
        ]);
    }
    let blades = if measured.blades.is_empty() {
        "its own memory".to_owned()
    } else {
        measured.blades.join(", ")
    };
    let mut page = Page::new("What far memory will cost this program", provenance);
    if let Some(worst) = predictions.iter().max_by_key(|it| it.slowdown_permille) {
        page = page.finding(format!(
            "With {} local the program takes {:.2} s instead of {:.2} s, on {}, far memory on \
             {blades}.",
            worst.local,
            seconds(question.native_ps + worst.added_ps),
            seconds(question.native_ps),
            measured.machine,
        ));
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
    page.table(table.note("slowdown: added to the program's own time, in percent of it")).result(
        &serde_json::json!({
            "native_ps": question.native_ps,
            "fixed_bytes": question.fixed_bytes,
            "predictions": predictions,
            "costs": measured.costs,
        }),
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
            number(probe.local_ns) + number(measured.costs.events_ps(&probe.events)) / 1e3;
        probes.row([
            probe.name.clone().into(),
            ms(number(probe.local_ns)).into(),
            ms(number(probe.far_ns)).into(),
            ms(explained_ns).into(),
            ((explained_ns / number(probe.far_ns) - 1.0) * 100.0).into(),
        ]);
    }
    let columns = [Column::left("event"), Column::right("cost").unit("us").decimals(3)];
    let mut costs = Table::new("costs", "Costs", columns);
    for (event, cost_ps) in measured.costs.named() {
        costs.row([event.into(), (number(cost_ps) / 1e6).into()]);
    }
    Page::new("What far memory costs here", provenance)
        .table(costs)
        .table(probes)
        .result(&serde_json::json!(measured))
}

const PS_PER_S: f64 = 1e12;

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn number(value: u64) -> f64 {
    value as f64
}
