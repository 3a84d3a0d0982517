//! `farpool attach` and `farpool detach`: wires to the keeper.

use farpool_run::{AttachEnd, RunError, RunOptions};

use super::{board_of, refuse_remote};
use crate::args::{AttachArgs, DetachArgs};
use crate::config::UsageError;
use crate::values::Size;

/// Attaches and stays until the process ends or is left.
pub fn main(args: AttachArgs) -> anyhow::Result<u8> {
    refuse_remote(&args.blade, Some(args.allow_remote_tcp))?;
    let (pid, local, quiet) = (args.pid, args.local, args.quiet);
    let end = farpool_run::attach(pid, &options(args), |entered| {
        if !quiet {
            println!(
                "process {pid} has {local} of local memory now; its {} threads were stopped for {:.1} ms",
                entered.threads,
                entered.stopped.as_secs_f64() * 1000.0,
            );
        }
    });
    let end = end.map_err(|error| match error {
        RunError::LimitTooSmall { .. } | RunError::Address { .. } => {
            UsageError(error.to_string()).into()
        }
        error => anyhow::Error::from(error),
    })?;
    if !quiet {
        println!(
            "process {pid} {}",
            match end {
                AttachEnd::ProcessEnded => "has ended",
                AttachEnd::Left => "has all its memory again",
            }
        );
    }
    Ok(0)
}

/// Has the keeper of an attached process leave it.
pub fn detach(args: &DetachArgs) -> anyhow::Result<u8> {
    farpool_run::detach(args.pid, &board_of(args.pid)?)?;
    println!("process {} has all its memory again", args.pid);
    Ok(0)
}

fn options(args: AttachArgs) -> RunOptions {
    let mut options = RunOptions::new("", args.local.into());
    options.blades = args.blade.iter().map(ToString::to_string).collect();
    options.quota_bytes = args.quota.map(|Size(bytes)| bytes);
    options.stats_file = args.stats;
    options.allow_remote_tcp = args.allow_remote_tcp;
    options.quiet = args.quiet;
    if let Some(policy) = args.policy {
        options.victim_policy = policy.to_string();
    }
    if let Some(prefetch) = args.prefetch {
        options.prefetch_policy = prefetch.to_string();
    }
    options
}
