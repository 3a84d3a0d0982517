//! Bills, efficiencies and what far memory may cost.

use farpool_report::{Axis, BarPlot, Column, Line, LinePlot, Page, Provenance, Table};

use crate::cost::{Bill, Catalog, Efficiency, FarMemory, HARMONIC_MEAN};

/// Ratios of the price of far memory to local memory in the sweep.
const PRICE_RATIOS: (f64, f64, u32) = (0.25, 1.5, 25);
/// Points of the sweep over a blade's overhead.
const SWEEP_STEPS: u32 = 40;

/// Renders everything that a catalog gives.
pub fn cost(catalog: &Catalog, from: Provenance) -> Page {
    let bills = catalog.bills();
    let efficiencies = catalog.efficiencies();
    let mut page = Page::new(catalog.title.clone(), from);
    if let Some(best) = best(catalog, &efficiencies) {
        page = page.finding(best);
    }
    for even in far_findings(catalog) {
        page = page.finding(even);
    }
    if !bills.is_empty() {
        page = page.table(bill_table(catalog, &bills)).plot(bill_plot(catalog, &bills));
    }
    if !efficiencies.is_empty() {
        page = page.table(efficiency_table(catalog, &efficiencies));
        page = page.plot(efficiency_plot(&bills, &efficiencies));
    }
    if let Some(far) = &catalog.far_memory {
        page = page
            .heading("Far memory")
            .table(far_table(catalog, far))
            .plot(overhead_plot(far))
            .plot(ratio_plot(far));
    }
    if !catalog.memories.is_empty() {
        page = page.table(memory_table(catalog));
    }
    if !catalog.figures.is_empty() {
        page = page.table(figure_table(catalog));
    }
    let break_evens: Vec<_> = catalog
        .far_memory
        .iter()
        .flat_map(|far| catalog.memories.iter().map(|memory| far.break_even(memory)))
        .collect();
    page.result(&serde_json::json!({
        "bills": bills, "efficiencies": efficiencies, "break_evens": break_evens,
    }))
}

fn best(catalog: &Catalog, efficiencies: &[Efficiency]) -> Option<String> {
    let baseline = catalog.baseline.as_ref()?;
    let means = efficiencies.iter().filter(|row| row.workload == HARMONIC_MEAN);
    let best = means.max_by(|a, b| a.per_total.total_cmp(&b.per_total))?;
    Some(format!(
        "{} gives most for its total cost: {:.0} % of {baseline}'s performance per dollar, at \
         {:.0} % of its performance (harmonic mean of all workloads).",
        best.server,
        best.per_total * 100.0,
        best.performance * 100.0
    ))
}

fn far_findings(catalog: &Catalog) -> Vec<String> {
    let Some(far) = &catalog.far_memory else { return Vec::new() };
    let finding = |memory| {
        let even = far.break_even(memory);
        let (name, date, price) = (&even.memory, &even.date, even.dollars_per_gib);
        match even.budget_dollars > 0.0 {
            true => format!(
                "{name} of {date} at ${price:.2} a GiB: far memory pays while blade, switch and \
                 port cost less than ${:.0} a server ({:.0} % of the blade's memory).",
                even.budget_per_server_dollars,
                even.overhead * 100.0
            ),
            false => format!(
                "{name} of {date} at ${price:.2} a GiB: do not pool; far memory costs ${:.0} a \
                 server more than it saves before there is a blade.",
                -even.budget_per_server_dollars
            ),
        }
    };
    catalog.memories.iter().map(finding).collect()
}

fn bill_table(catalog: &Catalog, bills: &[Bill]) -> Table {
    let columns = [
        Column::left("server"),
        Column::right("power_w").title("power").unit("W").decimals(0),
        Column::right("server_dollars").title("server").unit("$").decimals(0),
        Column::right("infrastructure_dollars").title("with rack (Inf-$)").unit("$").decimals(0),
        Column::right("power_cooling_dollars").title("power and cooling").unit("$").decimals(0),
        Column::right("total_dollars").title("total (TCO-$)").unit("$").decimals(0),
        Column::left("date"),
        Column::left("source"),
    ];
    let mut table = Table::new("bills", "What a server costs over its life", columns);
    for (bill, server) in bills.iter().zip(&catalog.servers) {
        table.row([
            bill.server.clone().into(),
            bill.power_w.into(),
            bill.server_dollars.into(),
            bill.infrastructure_dollars.into(),
            bill.power_cooling_dollars.into(),
            bill.total_dollars.into(),
            server.date.clone().into(),
            server.source.clone().into(),
        ]);
    }
    match &catalog.model {
        Some(model) => table.note(format!(
            "Burden {:.4}, activity {}, {} h, ${} a kWh: {} ({}).",
            model.burden(),
            model.activity_factor,
            model.hours,
            model.dollars_per_kwh,
            model.source,
            model.date
        )),
        None => table,
    }
}

fn bill_plot(catalog: &Catalog, bills: &[Bill]) -> BarPlot {
    let mut parts: Vec<&str> = Vec::new();
    for component in catalog.servers.iter().flat_map(|server| &server.components) {
        if !parts.contains(&component.name.as_str()) {
            parts.push(&component.name);
        }
    }
    let mut plot = BarPlot::stacked("What a server costs over its life", "$")
        .describe("Components, the server's part of the rack, and power and cooling.")
        .bars(bills.iter().map(|bill| bill.server.clone()));
    for part in parts {
        let dollars = catalog.servers.iter().map(|server| {
            let of_part = server.components.iter().filter(|component| component.name == part);
            of_part.map(|component| component.dollars).sum()
        });
        plot = plot.part(part, dollars);
    }
    plot.part("rack", bills.iter().map(|bill| bill.infrastructure_dollars - bill.server_dollars))
        .part("power and cooling", bills.iter().map(|bill| bill.power_cooling_dollars))
}

fn efficiency_table(catalog: &Catalog, efficiencies: &[Efficiency]) -> Table {
    let columns = [
        Column::left("workload"),
        Column::left("server"),
        Column::right("performance_percent").title("performance").unit("%").decimals(0),
        Column::right("per_infrastructure_percent").title("per Inf-$").unit("%").decimals(0),
        Column::right("per_watt_percent").title("per W").unit("%").decimals(0),
        Column::right("per_total_percent").title("per TCO-$").unit("%").decimals(0),
    ];
    let baseline = catalog.baseline.as_deref().unwrap_or("the baseline");
    let title = format!("Performance for what it costs, over {baseline}");
    let mut table = Table::new("efficiencies", title, columns);
    for row in efficiencies {
        table.row([
            row.workload.clone().into(),
            row.server.clone().into(),
            (row.performance * 100.0).into(),
            (row.per_infrastructure * 100.0).into(),
            (row.per_watt * 100.0).into(),
            (row.per_total * 100.0).into(),
        ]);
    }
    table
}

fn efficiency_plot(bills: &[Bill], efficiencies: &[Efficiency]) -> BarPlot {
    let mean = |server: &str, of: fn(&Efficiency) -> f64| {
        let row = efficiencies.iter().find(|r| r.workload == HARMONIC_MEAN && r.server == server);
        row.map_or(0.0, |row| of(row) * 100.0)
    };
    let all = |of: fn(&Efficiency) -> f64| -> Vec<f64> {
        bills.iter().map(|bill| mean(&bill.server, of)).collect()
    };
    BarPlot::grouped("Performance for what it costs, harmonic mean", "% of the baseline")
        .describe("Per dollar of infrastructure, per watt and per dollar of total cost.")
        .bars(bills.iter().map(|bill| bill.server.clone()))
        .part("per Inf-$", all(|row| row.per_infrastructure))
        .part("per W", all(|row| row.per_watt))
        .part("per TCO-$", all(|row| row.per_total))
}

fn far_table(catalog: &Catalog, far: &FarMemory) -> Table {
    let columns = [
        Column::left("memory"),
        Column::left("date"),
        Column::right("dollars_per_gib").title("price").unit("$/GiB"),
        Column::right("baseline_dollars").title("all local").unit("$").decimals(0),
        Column::right("local_dollars").title("stays local").unit("$").decimals(0),
        Column::right("far_dollars").title("blade's memory").unit("$").decimals(0),
        Column::right("budget_per_server_dollars").title("breaks even at").unit("$ a server"),
        Column::right("overhead_percent").title("of the blade's memory").unit("%").decimals(0),
    ];
    let mut table = Table::new("break_even", "What blade, switch and ports may cost", columns);
    for memory in &catalog.memories {
        let even = far.break_even(memory);
        table.row([
            even.memory.into(),
            even.date.into(),
            even.dollars_per_gib.into(),
            even.baseline_dollars.into(),
            even.local_dollars.into(),
            even.far_dollars.into(),
            even.budget_per_server_dollars.into(),
            (even.overhead * 100.0).into(),
        ]);
    }
    table.note(format!(
        "{} servers of {} GiB, or of {} GiB with {} GiB on a blade, at {} of the performance: {}.",
        far.servers, far.baseline_gib, far.local_gib, far.far_gib, far.performance, far.source
    ))
}

/// Lim's Figure 8.
fn overhead_plot(far: &FarMemory) -> LinePlot {
    let one = crate::cost::Memory { dollars_per_gib: 1.0, ..Default::default() };
    let even = far.break_even(&one).overhead;
    let most = (even * 2.0).max(1.0);
    let points = far.sweep(most, SWEEP_STEPS).into_iter();
    let plot = LinePlot::new(
        "Gain against the price of the blade",
        Axis::linear("price of blade, switch and ports over that of the blade's memory (%)"),
        Axis::linear("performance per memory $ against all local (%)"),
    )
    .describe(
        "Above zero far memory gives more performance for a dollar of memory; the price of \
        memory cancels out.",
    )
    .line(Line::new("gain", points.map(|point| (point.overhead * 100.0, point.gain * 100.0))))
    .level(0.0, "nothing gained");
    match even > 0.0 {
        true => plot.upright(even * 100.0, format!("breaks even at {:.0} %", even * 100.0)),
        false => plot,
    }
}

fn ratio_plot(far: &FarMemory) -> LinePlot {
    let one = crate::cost::Memory { dollars_per_gib: 1.0, ..Default::default() };
    let (from, to, steps) = PRICE_RATIOS;
    let points = (0..=steps).map(|step| {
        let ratio = from + (to - from) * f64::from(step) / f64::from(steps);
        let even = FarMemory { far_price_ratio: ratio, ..far.clone() }.break_even(&one);
        let all_local = even.baseline_dollars;
        (ratio, even.budget_dollars / all_local * 100.0)
    });
    LinePlot::new(
        "What the blade may cost against the price of its memory",
        Axis::linear("price of far memory over local memory"),
        Axis::linear("blade, switch and ports, over all local memory (%)"),
    )
    .describe(
        "Below zero no blade is cheap enough. Slower parts that others have no use for lie \
        on the left.",
    )
    .line(Line::new("breaks even at", points))
    .level(0.0, "do not pool below")
    .upright(far.far_price_ratio, "as in the catalog")
}

fn memory_table(catalog: &Catalog) -> Table {
    let columns = [
        Column::left("memory"),
        Column::right("dollars_per_gib").title("price").unit("$/GiB"),
        Column::left("date"),
        Column::left("source"),
    ];
    let mut table = Table::new("memory", "Prices of memory", columns);
    for memory in &catalog.memories {
        table.row([
            memory.name.clone().into(),
            memory.dollars_per_gib.into(),
            memory.date.clone().into(),
            memory.source.clone().into(),
        ]);
    }
    table
}

fn figure_table(catalog: &Catalog) -> Table {
    let columns = ["what", "value", "date", "source"].map(Column::left);
    let mut table = Table::new("figures", "Other figures, as reported", columns);
    for figure in &catalog.figures {
        let cells = [&figure.name, &figure.value, &figure.date, &figure.source];
        table.row(cells.map(|text| text.clone().into()));
    }
    table
}
