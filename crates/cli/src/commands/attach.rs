//! `farpool attach` and `farpool detach`: pass the command line on to the keeper.

use std::io::Write;

use farpool_run::{AttachEnd, FaultTrace, Reach, RunOptions, is_attached_to, runs};

use super::run::{rack, usage_or_failure};
use super::service::read_pki;
use super::{board_of, refuse_remote, trace};
use crate::args::{AttachArgs, DetachArgs, RunSettings};
use crate::config::UsageError;
use crate::values::{Redundancy, Size, Span};

/// Attaches and stays until the process ends or is detached.
pub fn main(args: AttachArgs) -> anyhow::Result<u8> {
    refuse_remote(&args.blade, Some(args.allow_remote_tcp || args.pki.is_some()))?;
    let (pid, local, quiet) = (args.pid, args.local, args.quiet);
    let reach = if args.tree { Reach::Tree } else { Reach::Process };
    let out = args.trace.clone();
    let end = farpool_run::attach(pid, reach, &options(args)?, out.as_deref(), |entered| {
        let milliseconds = entered.stopped.as_secs_f64() * 1000.0;
        let threads = entered.threads;
        let text = match reach {
            _ if quiet => return,
            Reach::Process => format!(
                "process {pid} has {local} of local memory now; its {threads} threads were stopped \
                 for {milliseconds:.1} ms"
            ),
            Reach::Tree => format!(
                "process {pid} and its descendants have {local} of local memory now; {} of them were \
                 attached so far, their {threads} threads stopped at most {milliseconds:.1} ms",
                entered.processes
            ),
        };
        // A closed output must not end this process, and the program with it.
        let _ = writeln!(std::io::stdout(), "{text}");
    });
    let (end, trace) = end.map_err(usage_or_failure)?;
    if let (Some(out), Some(trace)) = (&out, trace)
        && !quiet
    {
        let FaultTrace { records, threads, notes } = trace;
        trace::tell_people(out, records, threads, &notes);
    }
    let text = match end {
        _ if quiet => return Ok(0),
        AttachEnd::ProcessEnded => "has ended",
        AttachEnd::Left => "has all its memory again",
    };
    let _ = writeln!(std::io::stdout(), "process {pid} {text}");
    Ok(0)
}

/// Has the keeper detach from a process.
pub fn detach(args: &DetachArgs) -> anyhow::Result<u8> {
    let attached = || runs().into_iter().find(|board| is_attached_to(board, args.pid));
    let board = board_of(args.pid).or_else(|error| attached().ok_or(error))?;
    farpool_run::detach(args.pid, &board)?;
    println!("process {} has all its memory again", args.pid);
    Ok(0)
}

fn options(args: AttachArgs) -> Result<RunOptions, UsageError> {
    let mut options = RunOptions::new("", args.local.into());
    options.rack = rack(&RunSettings {
        pool: args.pool,
        pki: args.pki.clone(),
        token_file: args.token_file,
        insecure: Some(args.insecure),
        host: args.host,
        rate: args.rate,
        spill: args.spill,
        ..RunSettings::default()
    })?;
    options.credentials = match &options.rack {
        Some(rack) => rack.access.credentials.clone(),
        None => read_pki(args.pki.as_deref())?,
    };
    options.blades = args.blade.iter().map(ToString::to_string).collect();
    options.quota_bytes = args.quota.map(|Size(bytes)| bytes);
    options.share_with = args.share_with;
    options.stats_file = args.stats;
    options.allow_remote_tcp = args.allow_remote_tcp;
    options.seal = args.seal.into();
    options.redundancy = args.redundancy.map(|Redundancy(redundancy)| redundancy);
    options.verify_every = args.verify_every.0;
    options.quiet = args.quiet;
    if let Some(Span(deadline)) = args.deadline {
        options.deadline = deadline;
    }
    if let Some(policy) = args.policy {
        options.victim_policy = policy.to_string();
    }
    if let Some(prefetch) = args.prefetch {
        options.prefetch_policy = prefetch.to_string();
    }
    Ok(options)
}
