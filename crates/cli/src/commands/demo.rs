//! `farpool demo`: wires to the demo's room.

use crate::args::DemoArgs;

/// Runs the demo; exit code 1 when a row failed or its results differ from the all-local ones.
pub fn main(args: &DemoArgs) -> anyhow::Result<u8> {
    let options = farpool_demo::Options {
        farpool: std::env::current_exe()?,
        records_bytes: args.records.0,
        requests: args.requests,
        folder: args.dir.clone(),
        only: args.only.clone(),
        json: args.json,
    };
    Ok(u8::from(!farpool_demo::run(&options)?))
}
