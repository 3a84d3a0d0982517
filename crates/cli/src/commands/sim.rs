//! `farpool sim`: passes the command line on to the simulator's crate.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use farpool_bench::stage::Door;
use farpool_bench::{CostsOptions, measure_costs};
use farpool_plan::utilisation::Utilisation;
use farpool_report::{Column, Input, Page, Table};
use farpool_sim::budget::{self, Budget};
use farpool_sim::curves::{self, CurvesQuestion, Method};
use farpool_sim::file;
use farpool_sim::mrc::Rate;
use farpool_sim::pager::{self, MeasuredCosts, Question, prediction};
use farpool_sim::reproduce::{self, MstressRun, VmsRun};
use farpool_sim::{
    Experiment, LoadOptions, Preset, References, answer, experiment, load, load_pages,
};
use farpool_trace::{Columns, TraceReader};
use farpool_units::PAGE_BYTES_U64;

use super::answer::{give, provenance};
use crate::args::{
    CalibrateArgs, DesignsArgs, LoadArgs, LocalArgs, Paper, PredictArgs, ReproduceArgs, SimAction,
    SimArgs, SimMrcArgs, SimRunArgs,
};
use crate::config::UsageError;
use crate::terminal::{bar, counter, print};
use crate::values::Size;

/// Simulates. Returns 1 if a configuration could not be simulated.
pub fn main(args: SimArgs) -> anyhow::Result<u8> {
    match args.action {
        SimAction::Run(args) => run(args),
        SimAction::Mrc(args) => mrc(&args),
        SimAction::Calibrate(args) => calibrate(&args),
        SimAction::Predict(args) => predict(&args),
        SimAction::Reproduce(args) => papers(&args),
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
        let page_bytes = args.load.page.map_or(PAGE_BYTES_U64, |size| size.0);
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

fn threads(args: &LoadArgs) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, usize::from);
    args.threads.map_or_else(processors, usize::from)
}

/// Loads a trace, after printing how much memory that takes.
fn load_trace(path: &Path, page_bytes: u64, args: &LoadArgs) -> anyhow::Result<References> {
    let reader = TraceReader::open(path, Columns::ALL)?;
    let options = announce(&reader, page_bytes, args, load::memory_bytes)?;
    let shown = counter("records loaded");
    let loaded = load(reader, options, &mut |done| shown.set_position(done));
    shown.finish_and_clear();
    Ok(loaded?)
}

/// Prints how much memory the records take, computed by `bytes_of` from their number, and how much
/// may be used.
fn announce(
    trace: &TraceReader,
    page_bytes: u64,
    args: &LoadArgs,
    bytes_of: fn(u64) -> u64,
) -> anyhow::Result<LoadOptions> {
    let records = trace.records();
    let memory_limit_bytes = match args.memory {
        Some(size) => size.0,
        None => {
            available_bytes().context("the machine does not say how much memory is available")?
        }
    };
    eprintln!(
        "farpool sim: {records} records take {} in memory, and up to 48 bytes for each page; {} \
         may be used",
        about(bytes_of(records)),
        about(memory_limit_bytes)
    );
    Ok(LoadOptions { page_bytes, memory_limit_bytes })
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn about(bytes: u64) -> String {
    farpool_units::about_bytes(bytes as f64)
}

fn mrc(args: &SimMrcArgs) -> anyhow::Result<u8> {
    let page_bytes = args.load.page.map_or(PAGE_BYTES_U64, |size| size.0);
    let method = match args.sample {
        Some(share) => {
            Method::Sampled(Rate::new(share).map_err(|error| UsageError(error.to_string()))?)
        }
        None if args.exact => Method::Exact,
        None => Method::Auto,
    };
    let reader = TraceReader::open(&args.trace, Columns::BLOCKS)?;
    let options = announce(&reader, page_bytes, &args.load, load::pages_memory_bytes)?;
    let shown = counter("records loaded");
    let loaded = load_pages(reader, options, &mut |done| shown.set_position(done));
    shown.finish_and_clear();
    let pages = loaded?;
    let mut sizes: Vec<usize> =
        args.local.iter().map(|size| size.pages(pages.page_count, page_bytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let question = CurvesQuestion {
        policies: args.policy.clone(),
        sizes,
        method,
        threads: threads(&args.load),
    };
    let needed_bytes = curves::memory_bytes(&question, &pages);
    let shown = bar("requests", 0);
    if needed_bytes > options.memory_limit_bytes {
        bail!(
            "{}: the curves take about {} and {} may be used; ask for fewer policies, --threads 1 \
             or --sample 0.01",
            args.trace.display(),
            Size(needed_bytes),
            Size(options.memory_limit_bytes)
        );
    }
    let answers = curves::curves(&question, &pages, |progress| {
        shown.set_length(progress.requests_total);
        shown.set_position(progress.requests);
    })?;
    shown.finish_and_clear();
    let provenance = provenance()
        .input(Input::of_file(&args.trace)?)
        .parameter("page_bytes", page_bytes)
        .parameter("policies", args.policy.iter().map(|it| it.name()).collect::<Vec<_>>())
        .parameter("local", &args.local)
        .parameter("method", answers.iter().map(|it| it.method.clone()).collect::<Vec<_>>());
    give(&curves::page(&question, &pages, page_bytes, &answers, provenance), &args.answer)
}

/// `farpool plan local`: a plan, made by simulation.
pub fn local(args: &LocalArgs) -> anyhow::Result<u8> {
    let page_bytes = args.load.page.map_or(PAGE_BYTES_U64, |size| size.0);
    let references = load_trace(&args.trace, page_bytes, &args.load)?;
    let budget = Budget {
        designs: args.design.iter().map(|preset| preset.design()).collect(),
        policy: args.policy,
        slowdown_permille: args.slowdown.0,
        overlap: args.overlap,
        tick_ps: args.tick_ps,
    };
    let shown = counter("sizes simulated");
    let needs = budget::needs(&budget, &references, &mut || shown.inc(1))?;
    shown.finish_and_clear();
    let from = provenance()
        .input(Input::of_file(&args.trace)?)
        .parameter("page_bytes", page_bytes)
        .parameter("slowdown_permille", args.slowdown.0)
        .parameter("policy", args.policy.name())
        .parameter("overlap", args.overlap)
        .parameter("tick_ps", args.tick_ps.unwrap_or_else(|| references.tick_ps()));
    give(&budget::page(&budget, &references, &needs, from), &args.answer)
}

fn calibrate(args: &CalibrateArgs) -> anyhow::Result<u8> {
    let farpool = std::env::current_exe().context("find the farpool binary")?;
    let options = CostsOptions {
        door: Door::usual(&farpool),
        farpool,
        blades: args.blade.clone(),
        bytes: args.bytes.0,
        rounds: args.rounds,
    };
    let measured = measure_costs(&options)?;
    let is_good = measured.fit().is_some_and(|fit| fit.is_good());
    if is_good || args.accept {
        measured.write(&args.out)?;
    }
    let provenance = provenance().parameter("bytes", args.bytes.0).parameter("rounds", args.rounds);
    give(&prediction::costs_page(&measured, provenance), &args.answer)?;
    if !is_good && !args.accept {
        bail!(
            "{} was not written: the costs do not fit; let nothing else run and try again, with \
             more --rounds or --bytes, or write them with --accept",
            args.out.display()
        );
    }
    Ok(0)
}

/// The simulator counts in picoseconds, which overflow after 213 days.
fn picoseconds(time: Duration) -> Result<u64, UsageError> {
    u64::try_from(time.as_nanos() * 1000)
        .map_err(|_| UsageError("--native is longer than 213 days".to_owned()))
}

fn predict(args: &PredictArgs) -> anyhow::Result<u8> {
    let measured = MeasuredCosts::read(&args.costs)?;
    let page_bytes = args.load.page.map_or(PAGE_BYTES_U64, |size| size.0);
    let references = load_trace(&args.trace, page_bytes, &args.load)?;
    let given = args.native.map(|span| picoseconds(span.0)).transpose()?;
    let Some(native_ps) = given.or(references.info.native_ps) else {
        bail!(
            "{}: the trace does not say how long the program takes by itself; capture it with \
             --time, or give --native",
            args.trace.display()
        )
    };
    let file_bytes = args.fixed.map(|size| size.0).or(references.info.native_file_bytes);
    let question = Question {
        local: args.local.clone(),
        of_peak: args.peak,
        file_bytes,
        fixed_bytes: file_bytes.unwrap_or(0) + measured.own_bytes,
        victims: args.victims,
        prefetch: args.prefetch,
        remembers_runs: measured.is_remote(),
        seed: args.seed,
        native_ps,
    };
    let needed_bytes = pager::memory_bytes(references.rising_page_numbers());
    let limit_bytes = args.load.memory.map(|size| size.0).or_else(available_bytes);
    if limit_bytes.is_some_and(|limit| needed_bytes > limit) {
        bail!(
            "{}: its pages are scattered, and the pager's tables for them take {}; raise --memory, \
             or capture less",
            args.trace.display(),
            Size(needed_bytes)
        );
    }
    let shown = bar("limits", question.local.len() as u64);
    let predictions: Vec<_> = question
        .local
        .iter()
        .map(|local| {
            let prediction = pager::predict(&question, &references, &measured, *local);
            shown.inc(1);
            prediction
        })
        .collect();
    shown.finish_and_clear();
    let provenance = provenance()
        .input(Input::of_file(&args.trace)?)
        .input(Input::of_file(&args.costs)?)
        .parameter("page_bytes", page_bytes)
        .parameter("local", &question.local)
        .parameter("native_ps", native_ps)
        .parameter("peak", question.of_peak)
        .parameter("fixed_bytes", question.fixed_bytes)
        .parameter("victims", question.victims.to_string())
        .parameter("prefetch", question.prefetch.to_string())
        .parameter("seed", question.seed);
    give(
        &prediction::page(&question, &references, &measured, &predictions, provenance),
        &args.answer,
    )
}

fn papers(args: &ReproduceArgs) -> anyhow::Result<u8> {
    let is_given = !args.traces.is_empty() || !args.utilisation.is_empty();
    if is_given && args.paper != Paper::Lim {
        let refusal = "only lim's claims are tested on traces and utilisation";
        return Err(UsageError(refusal.to_owned()).into());
    }
    let page = match args.paper {
        Paper::Gutierrez => {
            farpool_plan::pages::reproduction(&farpool_plan::reproduce::gutierrez(), provenance())
        }
        Paper::Acms => {
            farpool_plan::pages::reproduction(&farpool_plan::reproduce::acms(), provenance())
        }
        Paper::Dredbox => {
            farpool_plan::pages::reproduction(&farpool_plan::reproduce::dredbox(), provenance())
        }
        Paper::Hpl => {
            let mut claims = reproduce::hpl(MstressRun::PAPER);
            claims.extend(reproduce::hpl_vms(VmsRun::SMALL)?);
            reproduce::page("Lim 2011 (HPL-2011-31), section 4", &claims, provenance())
        }
        Paper::Lim => lim(args)?,
    };
    give(&page, &args.answer)
}

fn lim(args: &ReproduceArgs) -> anyhow::Result<Page> {
    let page_bytes = args.load.page.map_or(PAGE_BYTES_U64, |size| size.0);
    let mut claims = Vec::new();
    let mut from = provenance();
    for trace in &args.traces {
        let references = load_trace(trace, page_bytes, &args.load)?;
        let name = trace.file_stem().unwrap_or_default().to_string_lossy();
        claims.extend(reproduce::lim(&name, &references, threads(&args.load))?);
        from = from.input(Input::of_file(trace)?);
    }
    let mut tables = farpool_plan::reproduce::lim();
    for path in &args.utilisation {
        let mut machines = Utilisation::read(path, &Default::default())?;
        if let Some(promised) = &args.promised {
            machines.read_provisioned(promised, &Default::default())?;
            from = from.input(Input::of_file(promised)?);
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        tables.cells.extend(farpool_plan::reproduce::lim_ensemble(&name, &machines)?);
        from = from.input(Input::of_file(path)?);
    }
    let page = farpool_plan::pages::reproduction(&tables, from);
    Ok(if claims.is_empty() {
        page.warning(
            "no trace was named: the thesis's claims about programs (chapter 4) were not tested",
        )
    } else {
        page.table(reproduce::table(&claims))
            .result(&serde_json::json!({ "tables": tables, "claims": claims }))
    })
}

/// Returns the memory available without swapping, as estimated by the kernel.
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
        let fetch_us = answer::fetch_us(&preset.design(), PAGE_BYTES_U64);
        table.row([preset.name().into(), fetch_us.into(), preset.source().into()]);
    }
    print(&table.text())?;
    Ok(0)
}
