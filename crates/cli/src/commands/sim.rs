//! `farpool sim`: wires to the simulator's room.

use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_report::{Column, Input, Page, Provenance, Table};
use farpool_sim::file::{self, PAGE_BYTES};
use farpool_sim::{Experiment, LoadOptions, Preset, References, answer, experiment, load};

use crate::args::{AnswerArgs, DesignsArgs, LoadArgs, SimAction, SimArgs, SimRunArgs};
use crate::terminal::{bar, counter, print};
use crate::values::Size;

/// Simulates; exit code 1 when a configuration could not be simulated.
pub fn main(args: SimArgs) -> anyhow::Result<u8> {
    match args.action {
        SimAction::Run(args) => run(args),
        SimAction::Designs(args) => designs(&args),
    }
}

fn run(args: SimRunArgs) -> anyhow::Result<u8> {
    let mut provenance = provenance();
    let is_experiment = args.input.extension().is_some_and(|extension| extension == "toml");
    let (trace, page_bytes, experiment) = if is_experiment {
        let file = file::read(&args.input)?;
        provenance = provenance.input(Input::of_file(&args.input)?);
        (file.trace, file.page_bytes, file.experiment)
    } else {
        let page_bytes = args.load.page.map_or(PAGE_BYTES, |size| size.0);
        let experiment = Experiment {
            designs: args.design.iter().map(|preset| preset.design()).collect(),
            local: args.local,
            policies: args.policy,
            overlap: args.overlap,
            tick_ps: args.tick_ps,
            seed: args.seed,
            clients: args.clients,
        };
        (args.input, page_bytes, experiment)
    };
    let references = load_trace(&trace, page_bytes, &args.load)?;
    let cells = experiment.designs.len() * experiment.local.len() * experiment.policies.len();
    let shown = bar("configurations", cells as u64);
    let (local, rows) = experiment::run(&experiment, &references, threads(&args.load), &|done| {
        shown.set_position(done as u64);
    })?;
    shown.finish_and_clear();
    let provenance = provenance
        .input(Input::of_file(&trace)?)
        .parameter("page_bytes", page_bytes)
        .parameter("local", &experiment.local)
        .parameter("policies", experiment.policies.iter().map(|it| it.name()).collect::<Vec<_>>())
        .parameter("clients", experiment.clients)
        .parameter("overlap", experiment.overlap)
        .parameter("tick_ps", experiment.tick_ps.unwrap_or_else(|| references.tick_ps()))
        .parameter("seed", experiment.seed);
    give(&answer::page(&experiment, &references, &local, &rows, provenance), &args.answer)?;
    Ok(u8::from(rows.iter().any(Result::is_err)))
}

/// Version and command line; inputs and parameters are added by who knows them.
fn provenance() -> Provenance {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    Provenance::new(env!("CARGO_PKG_VERSION"), words)
}

fn give(page: &Page, args: &AnswerArgs) -> anyhow::Result<()> {
    if let Some(report) = &args.report {
        page.write(report)?;
    }
    print(&if args.json { page.json() } else { page.text() })?;
    Ok(())
}

fn threads(args: &LoadArgs) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, usize::from);
    args.threads.map_or_else(processors, usize::from)
}

/// Loads a trace, after saying what that takes.
fn load_trace(path: &Path, page_bytes: u64, args: &LoadArgs) -> anyhow::Result<References> {
    let reader = farpool_trace::TraceReader::open(path, farpool_trace::Columns::BLOCKS)?;
    let records = reader.records();
    let memory_limit_bytes = match args.memory {
        Some(size) => size.0,
        None => {
            available_bytes().context("the machine does not say how much memory is available")?
        }
    };
    let needed_bytes = load::memory_bytes(records);
    eprintln!(
        "farpool sim: {records} records take {} in memory, and up to 48 bytes for each page; {} may be used",
        Size(needed_bytes),
        Size(memory_limit_bytes)
    );
    let shown = counter("records loaded");
    let options = LoadOptions { page_bytes, memory_limit_bytes };
    let loaded = load(path, options, &mut |done| shown.set_position(done));
    shown.finish_and_clear();
    Ok(loaded?)
}

/// What the machine could give without swapping, as the kernel estimates it.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string(PathBuf::from("/proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

fn designs(args: &DesignsArgs) -> anyhow::Result<u8> {
    if let Some(preset) = args.name {
        print(&toml::to_string(&preset.design())?)?;
        return Ok(0);
    }
    let columns = [
        Column::left("design"),
        Column::right("fetch").unit("us").decimals(3),
        Column::left("source"),
    ];
    let mut table = Table::new("designs", "Designs; print one as TOML with its name", columns);
    for preset in Preset::ALL {
        let fetch_ns = preset.design().idle_fetch_ps(PAGE_BYTES) / 1000;
        #[allow(clippy::cast_precision_loss, reason = "for people")]
        table.row([
            preset.name().into(),
            (fetch_ns as f64 / 1000.0).into(),
            preset.source().into(),
        ]);
    }
    print(&table.text())?;
    Ok(0)
}
