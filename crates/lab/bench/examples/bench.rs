//! Runs workloads and measurements without the farpool binary: what `farpool workload` and
//! `farpool bench` do.

use clap::Parser;
use farpool_bench::{BenchArgs, WorkloadArgs, bench_main, workload_main};

#[derive(Debug, Parser)]
enum Command {
    Workload(WorkloadArgs),
    Bench(BenchArgs),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match Command::parse() {
        Command::Workload(args) => workload_main(&args).map(drop)?,
        Command::Bench(args) => bench_main(&args).map(drop)?,
    }
    Ok(())
}
