//! `farpool bench` and the hidden `farpool workload`: wire to the measurements' room.

use farpool_bench::{BenchArgs, WorkloadArgs, bench_main, workload_main};

/// Measures and prints; a bar that is missed is no failure.
pub fn bench(args: &BenchArgs) -> anyhow::Result<u8> {
    bench_main(args)?;
    Ok(0)
}

/// Runs one workload in this process.
pub fn workload(args: &WorkloadArgs) -> anyhow::Result<u8> {
    workload_main(args)?;
    Ok(0)
}
