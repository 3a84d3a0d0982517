//! `farpool run`: passes the command line on to the keeper.

use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_run::{RackError, RackOptions, RunError, RunOptions};
use farpool_sim::{LoadOptions, load_pages};
use farpool_trace::{Columns, TraceReader};
use farpool_units::PAGE_BYTES_U64;

use crate::args::{RunArgs, RunSettings};
use crate::commands::refuse_remote;
use crate::commands::service::read_token;
use crate::config::UsageError;
use crate::values::{Door, LocalLimit, PeakMemory, Size, WhenFull, WhenOutside};

// `farpool sim predict` models the same rule.
const _: () = assert!(farpool_run::PERCENT_FLOOR_BYTES == farpool_sim::pager::SHARE_FLOOR_BYTES);

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
fn options(args: RunArgs) -> anyhow::Result<RunOptions> {
    let RunArgs { settings, program } = args;
    let missing = |what: &str| UsageError(format!("{what} is missing; see farpool run --help"));
    let mut words = program.into_iter();
    let program = words.next().ok_or_else(|| missing("the program"))?;
    let local = settings.local.ok_or_else(|| missing("--local SIZE or --local PCT"))?;
    let local = match settings.peak {
        None => local,
        Some(ref peak) => share_of(local, peak)?,
    };
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

/// Returns a share of a program's largest memory as a size.
fn share_of(local: LocalLimit, peak: &PeakMemory) -> anyhow::Result<LocalLimit> {
    let LocalLimit::Percent(percent) = local else {
        return Err(UsageError("--peak is for a share in --local, such as 50%".to_owned()).into());
    };
    let peak_bytes = match peak {
        PeakMemory::Bytes(bytes) => *bytes,
        PeakMemory::File(path) => peak_of(path)?,
    };
    Ok(LocalLimit::Bytes(share_bytes(peak_bytes, percent)))
}

fn share_bytes(peak_bytes: u64, percent: u8) -> u64 {
    let pages = peak_bytes / PAGE_BYTES_U64;
    farpool_units::at_most::<u64, _>(u128::from(pages) * u128::from(percent) / 100) * PAGE_BYTES_U64
}

/// Reads the largest memory from the statistics of an earlier run, or counts it in a trace.
fn peak_of(path: &Path) -> anyhow::Result<u64> {
    if path.extension().is_some_and(|extension| extension == "json") {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        let stats: serde_json::Value = serde_json::from_str(&text)
            .with_context(|| format!("{} holds no statistics of a run", path.display()))?;
        return stats["peak_bytes"].as_u64().filter(|bytes| *bytes > 0).with_context(|| {
            format!("{} names no peak_bytes: no statistics of farpool run", path.display())
        });
    }
    let trace = TraceReader::open(path, Columns::BLOCKS)?;
    let file_bytes = trace.info().native_file_bytes.unwrap_or(0);
    let options = LoadOptions { page_bytes: PAGE_BYTES_U64, memory_limit_bytes: u64::MAX };
    let pages = load_pages(trace, options, &mut |_| ())?;
    Ok(pages.page_count as u64 * PAGE_BYTES_U64 + file_bytes)
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
        tenant: settings.tenant.clone(),
        rate_bytes_per_s: settings.rate.map(|Size(bytes)| bytes),
        spill_directory: settings.spill.clone().unwrap_or_else(|| PathBuf::from(SPILL_DIRECTORY)),
    }))
}
