//! `farpool kv bench`: fills the server, runs the load or a sweep, prints the figures.

use std::time::Duration;

use anyhow::Context;
use farpool_load::client::asked::Server;
use farpool_load::client::echo::Echo;
use farpool_load::client::measured::Measured;
use farpool_load::client::request::{Protocol, Writer};
use farpool_load::client::run::{Gaps, Pace, Plan, fill, run};
use farpool_load::sweep::Sweep;
use farpool_load::workload::sizes::Sizes;
use farpool_load::workload::{KeyNumber, Mix, Operation, Workload};
use serde_json::{Value, json};

use crate::args::{BenchGaps, BenchProtocol, KvBenchArgs, Promise};
use crate::config::UsageError;
use crate::terminal;

/// First rate of a sweep without `--rate`.
const SWEEP_FIRST_RATE: f64 = 10_000.0;
/// Highest rate of a sweep: no client sends more.
const SWEEP_MOST_RATE: f64 = 8e6;
/// If this quantile of the client's own delays is over half the tightest target, the client warns
/// that it cannot judge the server.
const LATE_SHARE: f64 = 0.99;

/// Runs the measurement. Returns 1 if a latency target was missed.
pub fn main(args: &KvBenchArgs) -> anyhow::Result<u8> {
    if !args.closed && !args.sweep && args.rate.is_none() {
        let how = "choose how to send requests: --closed, --rate 50000, or --sweep --slo p95=10ms";
        return Err(UsageError(how.into()).into());
    }
    let workload = workload(args)?;
    let echo_bytes = args.echo_bytes.unwrap_or_else(|| reply_bytes(&workload));
    let echo = args
        .echo
        .then(|| Echo::start(echo_bytes, args.server_cpu).context("cannot start an echo server"))
        .transpose()?;
    let protocol = match args.protocol {
        _ if args.echo => Protocol::Echo,
        BenchProtocol::Text => Protocol::Text,
        BenchProtocol::Meta => Protocol::Meta,
        BenchProtocol::Binary => Protocol::Binary,
        BenchProtocol::Redis => Protocol::Redis,
        BenchProtocol::KeyVault => Protocol::KeyVault { checked: !args.no_checksums },
    };
    let plan = Plan {
        server: echo.as_ref().map_or_else(|| args.server.clone(), |it| Server::Tcp(it.address())),
        workload,
        protocol,
        pace: Pace::Closed { depth: usize::from(args.depth) },
        connections: usize::from(args.connections),
        threads: usize::from(args.threads),
        processor: args.client_cpu,
        warm_up: args.warm_up.0,
        duration: args.duration.0,
        seed: args.seed,
        echo_bytes,
    };
    if !args.no_fill && !args.echo {
        let progress = terminal::counter("storing the keys");
        let stored = fill(&plan).context("storing the keys")?;
        progress.finish_and_clear();
        if stored.refused > 0 {
            eprintln!("{} of {} keys were refused by the server", stored.refused, stored.keys);
        }
    }
    let (plan, measured) = if args.sweep {
        sweep(args, plan)?
    } else {
        let plan = Plan { pace: pace(args, args.rate.unwrap_or_default()), ..plan };
        let measured = run(&plan)?;
        (plan, measured)
    };
    if let Some(path) = &args.histogram {
        let text = format!("# LATENCY_NS COUNT\n{}", measured.latencies.to_text());
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    print(args, &plan, &measured);
    Ok(u8::from(!args.slo.iter().all(|promise| keeps(&measured, *promise))))
}

fn workload(args: &KvBenchArgs) -> Result<Workload, UsageError> {
    let mut workload = Workload::named(&args.workload, args.keys)
        .map_err(|error| UsageError(error.to_string()))?;
    if let Some(bytes) = args.key_bytes {
        workload.key_bytes = Sizes::Fixed(bytes.into());
    }
    if let Some(bytes) = args.value_bytes {
        workload.value_bytes = Sizes::Fixed(bytes as usize);
    }
    if let Some(operations) = args.operation {
        workload.mix = Mix { set: 1.0 - operations.get, delete: 0.0 };
    }
    if let Some(keys) = args.multi_get {
        workload.multi_get = keys.into();
    }
    workload.look_aside &= !args.no_look_aside;
    Ok(workload)
}

/// Returns the length of the reply to a get that hits.
fn reply_bytes(workload: &Workload) -> usize {
    let mut request = Vec::new();
    Writer { workload, protocol: Protocol::Text }.push(
        &mut request,
        Operation::Set,
        &[KeyNumber(0)],
    );
    // `VALUE key 0 64` is two bytes longer than `set key 0 0 64` without its lifetime; then `END`.
    request.len() + "END\r\n".len()
}

fn pace(args: &KvBenchArgs, rate: f64) -> Pace {
    if args.closed {
        return Pace::Closed { depth: usize::from(args.depth) };
    }
    let gaps = match args.gaps {
        BenchGaps::Exponential => Gaps::Exponential,
        BenchGaps::Constant => Gaps::Constant,
    };
    Pace::Open { rate, gaps }
}

fn keeps(measured: &Measured, promise: Promise) -> bool {
    let found = measured.latencies.quantile_ns(promise.percent / 100.0);
    measured.unanswered <= measured.requests / 100 && u128::from(found) <= promise.limit.as_nanos()
}

/// Tries rates. Returns the highest that met all latency targets, with its figures.
fn sweep(args: &KvBenchArgs, plan: Plan) -> anyhow::Result<(Plan, Measured)> {
    let progress = terminal::counter("runs");
    let mut sweep = Sweep::new(args.rate.unwrap_or(SWEEP_FIRST_RATE), SWEEP_MOST_RATE);
    let mut best = None;
    while let Some(rate) = sweep.next() {
        let plan = Plan { pace: pace(args, rate), ..plan.clone() };
        let mut held = None;
        for number in 0..u64::from(args.tries) {
            let tried = Plan { seed: plan.seed + number, ..plan.clone() };
            let measured = run(&tried)?;
            progress.inc(1);
            if args.slo.iter().all(|promise| keeps(&measured, *promise)) {
                held = Some((tried, measured));
                break;
            }
        }
        sweep.take(rate, held.is_some());
        if held.is_some() && rate >= sweep.held() {
            best = held;
        }
    }
    progress.finish_and_clear();
    best.context("no rate meets the targets, however low: is the server busy with something else?")
}

fn print(args: &KvBenchArgs, plan: &Plan, measured: &Measured) {
    let late = lateness(args, measured);
    if args.json {
        println!("{}", figures(args, plan, measured));
        return;
    }
    let us = |fraction: f64| micros(measured.latencies.quantile_ns(fraction));
    println!("server        {}", if args.echo { "echo".into() } else { plan.server.to_string() });
    println!("workload      {}, {} keys", args.workload, args.keys);
    if let Pace::Open { rate, .. } = plan.pace {
        println!("asked         {rate:.0} requests/s");
    }
    println!("requests/s    {:.0}", measured.rate());
    println!("keys/s        {:.0}", per_second(measured.keys, measured.elapsed));
    println!(
        "latency us    p50 {:.1}  p90 {:.1}  p95 {:.1}  p99 {:.1}  p99.9 {:.1}  max {:.1}",
        us(0.5),
        us(0.9),
        us(0.95),
        us(0.99),
        us(0.999),
        micros(measured.latencies.longest_ns())
    );
    if !args.echo {
        println!(
            "hits          {} of {} keys, {} refused",
            measured.hits, measured.keys, measured.refused
        );
    }
    println!(
        "bytes/s       {:.1} MB sent, {:.1} MB received",
        per_second(measured.bytes_sent, measured.elapsed) / 1e6,
        per_second(measured.bytes_received, measured.elapsed) / 1e6
    );
    println!("client        {:.0} % of a processor{late}", 100.0 * cpu_share(measured));
    for promise in &args.slo {
        let kept = if keeps(measured, *promise) { "met" } else { "MISSED" };
        println!("target        p{} <= {:?}: {kept}", promise.percent, promise.limit);
    }
}

/// Describes how far the client was behind its schedule; warns if that spoils the measurement.
fn lateness(args: &KvBenchArgs, measured: &Measured) -> String {
    if measured.late.count() == 0 {
        return String::new();
    }
    let late_ns = measured.late.quantile_ns(LATE_SHARE);
    let text = format!(", p99 {:.1} us behind its schedule", micros(late_ns));
    let tightest = args.slo.iter().map(|it| it.limit.as_nanos()).min();
    if tightest.is_some_and(|limit| u128::from(late_ns) * 2 > limit) {
        eprintln!(
            "the client itself is late by {:.1} us (p99): give it more --threads or a processor of \
             its own",
            micros(late_ns)
        );
    }
    text
}

fn figures(args: &KvBenchArgs, plan: &Plan, measured: &Measured) -> Value {
    let us = |fraction: f64| micros(measured.latencies.quantile_ns(fraction));
    let asked = match plan.pace {
        Pace::Open { rate, .. } => Some(rate),
        Pace::Closed { .. } => None,
    };
    json!({
        "server": if args.echo { "echo".to_owned() } else { plan.server.to_string() },
        "workload": args.workload,
        "keys_in_set": args.keys,
        "asked_per_s": asked,
        "requests_per_s": measured.rate(),
        "keys_per_s": per_second(measured.keys, measured.elapsed),
        "requests": measured.requests,
        "keys": measured.keys,
        "hits": measured.hits,
        "misses": measured.misses,
        "refused": measured.refused,
        "stored_after_miss": measured.stored_after_miss,
        "unanswered": measured.unanswered,
        "latency_us": {
            "p50": us(0.5), "p90": us(0.9), "p95": us(0.95), "p99": us(0.99), "p99.9": us(0.999),
            "max": micros(measured.latencies.longest_ns()),
        },
        "late_us": { "p50": micros(measured.late.quantile_ns(0.5)), "p99": micros(measured.late.quantile_ns(0.99)) },
        "bytes_sent_per_s": per_second(measured.bytes_sent, measured.elapsed),
        "bytes_received_per_s": per_second(measured.bytes_received, measured.elapsed),
        "client_cpu_share": cpu_share(measured),
        "promises_kept": args.slo.iter().all(|promise| keeps(measured, *promise)),
    })
}

fn cpu_share(measured: &Measured) -> f64 {
    measured.cpu.as_secs_f64() / measured.elapsed.as_secs_f64().max(1e-9)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn per_second(count: u64, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64().max(1e-9)
}

#[expect(clippy::cast_precision_loss, reason = "latencies are far below 2^53 ns")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}
