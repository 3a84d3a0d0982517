//! `farpool run`: passes the command line on to the keeper.

use std::path::PathBuf;

use farpool_run::{RackError, RackOptions, RunError, RunOptions};

use crate::args::{RunArgs, RunSettings};
use crate::commands::refuse_remote;
use crate::commands::service::read_token;
use crate::config::UsageError;
use crate::values::{Door, Size, WhenFull, WhenOutside};

/// Runs the program. Returns its exit code, or 128 + n if signal n ended it.
pub fn main(args: RunArgs) -> anyhow::Result<u8> {
    refuse_remote(&args.settings.blade, args.settings.allow_remote_tcp)?;
    let options = options(args)?;
    let code = farpool_run::run(&options).map_err(|error| match error {
        RunError::LimitTooSmall { .. }
        | RunError::Address { .. }
        | RunError::Rack(RackError::RemoteTcp { .. }) => UsageError(error.to_string()).into(),
        error => anyhow::Error::from(error),
    })?;
    Ok(u8::try_from(code).unwrap_or(crate::EXIT_FAILED))
}

/// Returns the keeper's options; unset ones keep the keeper's defaults.
fn options(args: RunArgs) -> Result<RunOptions, UsageError> {
    let RunArgs { settings, program } = args;
    let missing = |what: &str| UsageError(format!("{what} is missing; see farpool run --help"));
    let mut words = program.into_iter();
    let program = words.next().ok_or_else(|| missing("the program"))?;
    let local = settings.local.ok_or_else(|| missing("--local SIZE or --local PCT"))?;
    let mut options = RunOptions::new(program, local.into());
    options.arguments = words.collect();
    options.rack = rack(&settings)?;
    options.blades = settings.blade.iter().map(ToString::to_string).collect();
    options.quota_bytes = settings.quota.map(|Size(bytes)| bytes);
    options.stats_file = settings.stats;
    options.allow_remote_tcp = settings.allow_remote_tcp == Some(true);
    options.no_check = settings.no_check == Some(true);
    options.quiet = settings.quiet == Some(true);
    if let Some(door) = settings.door {
        options.door = match door {
            Door::Auto => farpool_run::Door::Auto,
            Door::Preload => farpool_run::Door::Preload,
            Door::Sidecar => farpool_run::Door::Sidecar,
        };
    }
    if let Some(when_outside) = settings.when_outside {
        options.when_outside = match when_outside {
            WhenOutside::Warn => farpool_run::WhenOutside::Warn,
            WhenOutside::Fail => farpool_run::WhenOutside::Fail,
            WhenOutside::Allow => farpool_run::WhenOutside::Allow,
        };
    }
    if let Some(policy) = settings.policy {
        options.victim_policy = policy.to_string();
    }
    if let Some(prefetch) = settings.prefetch {
        options.prefetch_policy = prefetch.to_string();
    }
    if let Some(when_full) = settings.when_full {
        options.when_full = match when_full {
            WhenFull::Fail => farpool_board::WhenFull::Fail,
            WhenFull::Slow => farpool_board::WhenFull::Slow,
        };
    }
    if let Some(threads) = settings.pager_threads {
        options.pager_threads = threads.into();
    }
    if let Some(Size(bytes)) = settings.threshold {
        options.threshold_bytes = bytes;
    }
    Ok(options)
}

/// Folder for spilled memory: on a disk, not in memory.
const SPILL_DIRECTORY: &str = "/var/tmp";

/// Returns the rack to take memory from, if one was named.
pub fn rack(settings: &RunSettings) -> Result<Option<RackOptions>, UsageError> {
    let Some(controllers) = settings.pool.clone() else { return Ok(None) };
    Ok(Some(RackOptions {
        controllers,
        token: read_token(settings.token_file.as_deref())?,
        host: settings.host.clone(),
        rate_bytes_per_s: settings.rate.map(|Size(bytes)| bytes),
        spill_directory: settings.spill.clone().unwrap_or_else(|| PathBuf::from(SPILL_DIRECTORY)),
    }))
}
