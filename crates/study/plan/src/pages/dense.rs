//! Servers full of stacks.

use farpool_report::{Axis, BarPlot, Column, Line, LinePlot, Page, Provenance, Table};

use crate::dense::{Built, Catalog, Limit};

/// Renders all designs of a catalog, or only the one of this name.
pub fn dense(catalog: &Catalog, only: Option<&str>, from: Provenance) -> Page {
    let built = catalog.build_all(only);
    let mut page = Page::new(catalog.title.clone(), from);
    for finding in findings(catalog, &built) {
        page = page.finding(finding);
    }
    let unlisted: Vec<&str> = catalog
        .designs
        .iter()
        .filter(|design| only.is_none_or(|only| only == design.name))
        .filter(|design| design.unlisted_memory_floor_w > 0.0 || design.unlisted_core_mw > 0.0)
        .map(|design| design.name.as_str())
        .collect();
    if !unlisted.is_empty() {
        page = page.warning(format!(
            "Powers of {} have parts that the source does not list; they are the keys unlisted_* \
             of the catalog.",
            unlisted.join(", ")
        ));
    }
    page = page.table(table(catalog, &built)).plot(power_plot(&built));
    if built.iter().any(|built| built.requests_per_s.is_some()) {
        page = page
            .plot(density_plot(catalog, &built))
            .plot(power_against_requests(catalog, &built))
            .plot(efficiency_plot(catalog, &built));
    }
    page.result(&built)
}

fn name(built: &Built) -> String {
    format!("{}, {}", built.design, built.cores_per_stack)
}

fn findings(catalog: &Catalog, built: &[Built]) -> Vec<String> {
    let units = catalog.server.units;
    let best = |of: &dyn Fn(&Built) -> Option<f64>| {
        let known = built.iter().filter_map(|built| Some((built, of(built)?)));
        known.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(built, _)| built)
    };
    let mut findings = Vec::new();
    if let Some(most) = best(&|built| built.requests_per_s) {
        findings.push(format!(
            "Most requests in {units}U: {} with {} cores a stack, {:.2} million a second, {} \
             stacks, {:.0} W.",
            most.design,
            most.cores_per_stack,
            most.requests_per_s.unwrap_or(0.0) / 1e6,
            most.stacks,
            most.power_w
        ));
    }
    // Ties go to the one with the most requests.
    let densest =
        |built: &Built| Some(built.memory_gb * 1e12 + built.requests_per_s.unwrap_or(0.0));
    if let Some(most) = best(&densest) {
        findings.push(format!(
            "Most memory in {units}U: {} with {} cores a stack, {:.0} GB, {:.0} W.",
            most.design, most.cores_per_stack, most.memory_gb, most.power_w
        ));
    }
    findings
}

fn table(catalog: &Catalog, built: &[Built]) -> Table {
    let columns = [
        Column::left("design"),
        Column::right("cores_per_stack").title("cores/stack"),
        Column::right("stacks"),
        Column::right("switches"),
        Column::right("ports"),
        Column::right("cores"),
        Column::left("limit").title("limited by"),
        Column::right("area_cm2").title("area").unit("cm2").decimals(0),
        Column::right("power_w").title("power").unit("W").decimals(0),
        Column::right("memory_gb").title("density").unit("GB").decimals(0),
        Column::right("bandwidth_gbs").title("bandwidth").unit("GB/s").decimals(0),
        Column::right("requests_per_s").title("requests").unit("M/s"),
        Column::right("requests_per_j").title("per W").unit("k/s"),
        Column::right("requests_per_s_gb").title("per GB").unit("k/s"),
    ];
    let title = format!("What a server of {}U holds", catalog.server.units);
    let mut table = Table::new("servers", title, columns);
    for built in built {
        let limit = match built.limit {
            Limit::Ports => "ports",
            Limit::Area => "area",
            Limit::Power => "power",
        };
        table.row([
            built.design.clone().into(),
            built.cores_per_stack.into(),
            built.stacks.into(),
            built.switches.into(),
            built.ports.into(),
            built.cores.into(),
            limit.into(),
            built.area_cm2.into(),
            built.power_w.into(),
            built.memory_gb.into(),
            built.bandwidth_gbs.into(),
            built.requests_per_s.map(|requests| requests / 1e6).into(),
            built.requests_per_j.map(|requests| requests / 1e3).into(),
            built.requests_per_s_gb.map(|requests| requests / 1e3).into(),
        ]);
    }
    let mut table = table.note("Power at the largest bandwidth of the memory.");
    for design in &catalog.designs {
        if let (Some(request), true) =
            (&design.request, built.iter().any(|built| built.design == design.name))
        {
            table = table.note(format!("Requests of {}: {request}.", design.name));
        }
    }
    table
}

fn power_plot(built: &[Built]) -> BarPlot {
    BarPlot::grouped("Power of a full server", "W")
        .describe("At the largest bandwidth of the memory.")
        .bars(built.iter().map(name))
        .part("power", built.iter().map(|built| built.power_w))
}

/// As Figures 3.14 and 3.15 of Gutierrez's thesis.
fn density_plot(catalog: &Catalog, built: &[Built]) -> LinePlot {
    let plot = LinePlot::new(
        "Requests against memory",
        Axis::log("memory of a server (GB)"),
        Axis::wide("million requests a second"),
    )
    .describe(
        "One point for each number of cores a stack: more cores serve more and leave room \
        for less.",
    );
    by_design(plot, catalog, built, |it| Some((it.memory_gb, it.requests_per_s? / 1e6)))
}

/// As Figures 3.16 and 3.17.
fn power_against_requests(catalog: &Catalog, built: &[Built]) -> LinePlot {
    let plot = LinePlot::new(
        "Requests against power",
        Axis::linear("power of a server (W)"),
        Axis::wide("million requests a second"),
    )
    .describe(
        "One point for each number of cores a stack, up to the power that a server may draw.",
    );
    by_design(plot, catalog, built, |it| Some((it.power_w, it.requests_per_s? / 1e6)))
}

fn efficiency_plot(catalog: &Catalog, built: &[Built]) -> LinePlot {
    let plot = LinePlot::new(
        "Requests for a watt",
        Axis::log2("cores a stack"),
        Axis::wide("thousand requests a second and watt"),
    )
    .describe("At the power of the largest bandwidth of the memory.");
    let point = |it: &Built| Some((f64::from(it.cores_per_stack), it.requests_per_j? / 1e3));
    by_design(plot, catalog, built, point)
}

/// Adds a line for each design, with a point for each number of cores a stack.
fn by_design(
    mut plot: LinePlot,
    catalog: &Catalog,
    built: &[Built],
    point: impl Fn(&Built) -> Option<(f64, f64)>,
) -> LinePlot {
    for design in &catalog.designs {
        let of_design = built.iter().filter(|built| built.design == design.name);
        let points: Vec<(f64, f64)> = of_design.filter_map(&point).collect();
        if !points.is_empty() {
            plot = plot.line(Line::new(design.name.clone(), points));
        }
    }
    plot
}
