//! `farpool demo`: passes the command line on to the demo's crate.

use farpool_demo::rack::plan::Plan;
use farpool_demo::rack::{self, Variant};

use crate::args::{DemoArgs, DemoCommand, RackDemoArgs, RackVariant};

/// Runs a demo. Returns 1 if a row failed, its results differ from the all-local ones, or a check
/// failed.
pub fn main(args: &DemoArgs) -> anyhow::Result<u8> {
    match &args.command {
        Some(DemoCommand::Rack(args)) => return rack(args),
        Some(DemoCommand::Tenant(args)) => {
            farpool_bench::tenant_main(args)?;
            return Ok(0);
        }
        None => {}
    }
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

fn rack(args: &RackDemoArgs) -> anyhow::Result<u8> {
    let variants = match args.only {
        None => Variant::ALL.to_vec(),
        Some(RackVariant::Controller) => vec![Variant::Controller],
        Some(RackVariant::Collaboration) => vec![Variant::Collaboration],
    };
    let options = rack::Options {
        farpool: std::env::current_exe()?,
        folder: args.dir.clone(),
        plan: if args.quick { Plan::quick() } else { Plan::full() },
        variants,
        only_figure: false,
        spoil: args.spoil,
        companions: Vec::new(),
        json: args.json,
    };
    Ok(u8::from(!rack::run(&options)?))
}
