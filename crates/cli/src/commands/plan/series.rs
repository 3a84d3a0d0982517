//! `farpool plan pool` and `pack`: answers from the utilisation of machines over time.

use std::path::Path;

use farpool_plan::cost::latest_memory;
use farpool_plan::pack::{self, Demand, Server};
use farpool_plan::utilisation::{Above, Columns, Options, Utilisation};
use farpool_plan::{pages, pool};
use farpool_report::{Input, Provenance};
use farpool_units::exactly;
use indicatif::ProgressBar;

use super::{give, provenance, refused, text_of};
use crate::args::{AboveArg, DemandArg, PackArgs, PoolArgs, SeriesArgs};
use crate::terminal::status;
use crate::values::{Percent, Prices};

/// Years planned where only the growth was given.
const USUAL_YEARS: u32 = 3;

pub fn pool(args: &PoolArgs) -> anyhow::Result<u8> {
    let progress = status();
    let (machines, from) = read(&args.series, &progress)?;
    let memory = latest_memory();
    let local_price = args.memory_price.map_or(memory.dollars_per_gib, Prices::middle);
    let mut from = from;
    let local_share = match args.local_from.is_empty() {
        true => args.local.map_or(0.0, |local| local.share()),
        false => {
            let mut most: f64 = 0.0;
            for path in &args.local_from {
                most = most.max(local_share(path, args.local_design.as_deref())?);
                from = from.input(Input::of_file(path)?);
            }
            most
        }
    };
    let changes = pool::Changes {
        growth_per_year: args.growth.share(),
        years: args.years.unwrap_or(if args.growth.share() > 0.0 { USUAL_YEARS } else { 0 }),
        local_price_per_gib: args.memory_price.and_then(Prices::span),
        far_price_per_gib: args.far_price.and_then(Prices::span),
        member_cost: args.member_cost.and_then(Prices::span),
    };
    let question = pool::Question {
        group: args.group.unwrap_or(pool::USUAL_GROUP.min(machines.vms.len())),
        groupings: exactly(args.groupings),
        seed: args.seed,
        local_share,
        blades: args.blades.unwrap_or(0),
        percentiles: args.percentile.clone(),
        local_price_per_gib: local_price,
        far_price_per_gib: args.far_price.map(Prices::middle),
        member_cost: args.member_cost.map(Prices::middle),
        // No machine has enough memory for the rounding to matter.
        #[allow(clippy::cast_precision_loss)]
        machine_memory_bytes: args.machine_memory.map(|size| size.0 as f64),
        worth: args.worth.share(),
        changes,
    };
    let source = match args.memory_price {
        Some(_) => "as given".to_owned(),
        None => format!("{} of {}: {}", memory.name, memory.date, memory.source),
    };
    let from = from.parameters(&question).parameter("memory_price_source", source);
    let mut tell = |share: f64| progress.set_message(format!("pools: {:.0} %", share * 100.0));
    let answer = pool::plan(&machines, &question, &mut tell).map_err(refused)?;
    progress.finish_and_clear();
    give(&pages::pool(&answer, &question, &machines.warnings(), from), &args.answer)
}

/// Returns the share of local memory that an answer of `farpool plan local` found, from its JSON or
/// its page.
fn local_share(path: &Path, design: Option<&str>) -> anyhow::Result<f64> {
    let wrong = |why: &str| anyhow::anyhow!("{}: {why}", path.display());
    let answer = super::answer_of(path)?;
    let needs = answer["result"].as_array().ok_or_else(|| wrong("no answer of plan local"))?;
    let is_it = |need: &&serde_json::Value| design.is_none_or(|name| need["design"] == name);
    let need = needs.iter().find(is_it).ok_or_else(|| wrong("it has no such design"))?;
    let least = need["least"]["local"].as_str().and_then(|local| local.parse::<Percent>().ok());
    least.map(Percent::share).ok_or_else(|| {
        wrong("no size of local memory was enough for the design; choose another --local-design")
    })
}

pub fn pack(args: &PackArgs) -> anyhow::Result<u8> {
    let progress = status();
    let (machines, mut from) = read(&args.series, &progress)?;
    let server = match &args.server {
        None => Server::machine(),
        Some(path) => {
            let text = text_of(path)?;
            from = from.input(Input::of_bytes(path.display().to_string(), text.as_bytes()));
            Server::parse(path, &text).map_err(refused)?
        }
    };
    let question = pack::Question {
        server,
        demand: match args.demand {
            DemandArg::Used => Demand::Used,
            DemandArg::Promised => Demand::Provisioned,
        },
        local_shares: args.local.iter().map(|share| share.share()).collect(),
        moves: args.moves,
        seed: args.seed,
        worth: args.worth.share(),
    };
    let from = from.parameters(&question);
    let answer =
        pack::plan(&machines, &question, &mut |what| progress.set_message(what.to_owned()));
    let answer = answer.map_err(refused)?;
    progress.finish_and_clear();
    give(&pages::pack(&answer, &question, &machines.warnings(), from), &args.answer)
}

/// The machines and their provenance.
fn read(args: &SeriesArgs, progress: &ProgressBar) -> anyhow::Result<(Utilisation, Provenance)> {
    progress.set_message("reading");
    let above = match args.above_100 {
        AboveArg::Clip => Above::Clip,
        AboveArg::Keep => Above::Keep,
        AboveArg::Refuse => Above::Refuse,
    };
    let columns = Columns {
        vm: args.vm_column.clone(),
        time: args.time_column.clone(),
        cpu: args.cpu_column.clone(),
        memory: args.memory_column.clone(),
    };
    let step_s = args.step.map(|step| step.0.as_secs_f64());
    let options = Options { columns, step_s, above };
    let mut from = provenance().input(Input::of_file(&args.series)?);
    let mut machines = Utilisation::read(&args.series, &options).map_err(refused)?;
    if let Some(path) = &args.promised {
        from = from.input(Input::of_file(path)?);
        machines.read_provisioned(path, &Columns::default()).map_err(refused)?;
    }
    // Files that count steps are of one length; theirs become longer here.
    if let Some(step_s) = step_s {
        machines = machines.with_steps_of(step_s);
    }
    let named = [&args.vm_column, &args.time_column, &args.cpu_column, &args.memory_column];
    let named: Vec<String> = named.into_iter().flatten().map(ToString::to_string).collect();
    from = from
        .parameter("columns", named)
        .parameter("above_100", above)
        .parameter("step_s", machines.step_s);
    Ok((machines, from))
}
