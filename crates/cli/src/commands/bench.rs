//! `farpool bench` and the hidden `farpool workload`: pass the command line on to the crate of
//! measurements.

use farpool_bench::{BenchArgs, WorkloadArgs, bench_main, workload_main};

/// Measures and prints. A missed bar is not a failure.
pub fn bench(args: &BenchArgs) -> anyhow::Result<u8> {
    bench_main(args)?;
    Ok(0)
}

/// Runs one workload in this process.
pub fn workload(args: &WorkloadArgs) -> anyhow::Result<u8> {
    workload_main(args)?;
    Ok(0)
}
