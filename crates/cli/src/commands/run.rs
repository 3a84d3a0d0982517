//! `farpool run`: passes the command line on to the keeper.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_run::{RackError, RackOptions, RunError, RunOptions};
use farpool_sim::count_pages;
use farpool_trace::{Columns, TraceReader};
use farpool_units::PAGE_BYTES_U64;

use crate::args::{RunArgs, RunSettings};
use crate::commands::refuse_remote;
use crate::commands::service::{access, read_pki};
use crate::config::UsageError;
use crate::terminal::counter;
use crate::values::{
    Door, LocalLimit, PeakMemory, Redundancy, Size, Span, VerifyEvery, WhenFull, WhenOutside,
};

// `farpool sim predict` models the same rule.
const _: () = assert!(farpool_run::PERCENT_FLOOR_BYTES == farpool_sim::pager::SHARE_FLOOR_BYTES);

/// Runs the program. Returns its exit code, or 128 + n if signal n ended it.
pub fn main(args: RunArgs) -> anyhow::Result<u8> {
    let code = farpool_run::run(&checked_options(args)?).map_err(usage_or_failure)?;
    Ok(u8::try_from(code).unwrap_or(crate::EXIT_FAILED))
}

/// Returns the keeper's options, unless they name a blade that must not be used.
pub fn checked_options(args: RunArgs) -> anyhow::Result<RunOptions> {
    let is_allowed = args.settings.allow_remote_tcp == Some(true) || args.settings.pki.is_some();
    refuse_remote(&args.settings.blade, Some(is_allowed))?;
    options(args)
}

/// Tells wrong usage from other errors.
pub fn usage_or_failure(error: RunError) -> anyhow::Error {
    match error {
        RunError::LimitTooSmall { .. }
        | RunError::TooFewDomains { .. }
        | RunError::UnsealedCopies
        | RunError::SharingSealed
        | RunError::Address { .. }
        | RunError::Rack(RackError::RemoteTcp { .. }) => UsageError(error.to_string()).into(),
        error => anyhow::Error::from(error),
    }
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
    options.share_with = settings.share_with;
    options.stats_file = settings.stats;
    options.allow_remote_tcp = settings.allow_remote_tcp == Some(true);
    options.credentials = match &options.rack {
        Some(rack) => rack.access.credentials.clone(),
        None => read_pki(settings.pki.as_deref())?,
    };
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
    if let Some(Span(deadline)) = settings.deadline {
        options.deadline = deadline;
    }
    if let Some(seal) = settings.seal {
        options.seal = seal.into();
    }
    options.redundancy = settings.redundancy.map(|Redundancy(redundancy)| redundancy);
    if let Some(VerifyEvery(every)) = settings.verify_every {
        options.verify_every = every;
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

/// How a trace begins; statistics are JSON, whatever their name.
const TRACE_BEGINS: &[u8] = b"PAR1";
/// The longest statistics of a run that are read: some hundred times as long as they are.
const STATISTICS_BYTES_MAX: u64 = 1 << 20;

/// Reads the largest memory from the statistics of an earlier run, or counts it in a trace.
fn peak_of(path: &Path) -> anyhow::Result<u64> {
    let unreadable = || format!("{} cannot be read", path.display());
    let mut file = File::open(path).with_context(unreadable)?.take(STATISTICS_BYTES_MAX + 1);
    let mut begins = Vec::new();
    file.by_ref()
        .take(TRACE_BEGINS.len() as u64)
        .read_to_end(&mut begins)
        .with_context(unreadable)?;
    if begins == TRACE_BEGINS {
        let trace = TraceReader::open(path, Columns::BLOCKS)?;
        let file_bytes = trace.info().native_file_bytes.unwrap_or(0);
        let shown = counter("records read");
        let pages = count_pages(trace, PAGE_BYTES_U64, &mut |read| shown.set_position(read));
        shown.finish_and_clear();
        let bytes = pages?.checked_mul(PAGE_BYTES_U64);
        let all = bytes.and_then(|bytes| bytes.checked_add(file_bytes));
        return all.with_context(|| {
            format!("{}: more file memory than there can be: {file_bytes} bytes", path.display())
        });
    }
    let neither =
        || format!("{} is neither a trace nor the statistics of farpool run", path.display());
    file.read_to_end(&mut begins).with_context(unreadable)?;
    if begins.len() as u64 > STATISTICS_BYTES_MAX {
        anyhow::bail!("{}: it has more than {STATISTICS_BYTES_MAX} bytes", neither());
    }
    let statistics: serde_json::Value = serde_json::from_slice(&begins).with_context(neither)?;
    let peak_bytes = statistics["peak_bytes"].as_u64().filter(|bytes| *bytes > 0);
    peak_bytes.with_context(|| format!("{}: it names no peak_bytes", neither()))
}

/// Folder for spilled memory: on a disk, not in memory.
const SPILL_DIRECTORY: &str = "/var/tmp";

/// Returns the rack to take memory from, if one was named.
pub fn rack(settings: &RunSettings) -> Result<Option<RackOptions>, UsageError> {
    let Some(controllers) = settings.pool.clone() else { return Ok(None) };
    Ok(Some(RackOptions {
        access: access(
            &controllers,
            settings.pki.as_deref(),
            settings.token_file.as_deref(),
            settings.insecure == Some(true),
        )?,
        controllers,
        host: settings.host.clone(),
        tenant: settings.tenant.clone(),
        rate_bytes_per_s: settings.rate.map(|Size(bytes)| bytes),
        spill_directory: settings.spill.clone().unwrap_or_else(|| PathBuf::from(SPILL_DIRECTORY)),
    }))
}

#[cfg(test)]
mod tests {
    use farpool_trace::{Access, Clock, Record, TraceInfo, TraceWriter};

    use super::*;

    #[test]
    fn the_peak_is_read_from_traces_and_statistics_by_what_they_hold() {
        let folder = tempfile::tempdir().expect("a folder");
        let trace = folder.path().join("trace.json");
        let mut info = TraceInfo::new("test", PAGE_BYTES_U64, Clock::Accesses);
        info.native_file_bytes = Some(3 * PAGE_BYTES_U64);
        let mut writer = TraceWriter::create(&trace, info).expect("a trace");
        for block in [1, 7, 1, 9, 7] {
            let record = Record { block, ticks: 1, access: Access::Read, thread: 0 };
            writer.push(record).expect("written");
        }
        writer.finish().expect("written");
        assert_eq!(peak_of(&trace).expect("three pages and files"), 6 * PAGE_BYTES_U64);
        let other = folder.path().join("run.stats");
        let told = |text: &[u8]| {
            std::fs::write(&other, text).expect("written");
            peak_of(&other).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(told(b"{\"peak_bytes\": 8192}"), Ok(8192));
        let long = b" ".repeat(1 + usize::try_from(STATISTICS_BYTES_MAX).expect("a mebibyte"));
        for text in [&b"{}"[..], b"{\"peak_bytes\": 0}", b"", b"PAR", b"no JSON", &long] {
            let error = told(text).expect_err("no peak");
            assert!(error.contains("run.stats is neither a trace nor"), "{error}");
        }
        assert!(told(b"PAR1").expect_err("cut short").contains("run.stats"));
    }

    #[test]
    fn a_share_of_the_peak_is_whole_pages() {
        let local = share_of(LocalLimit::Percent(50), &PeakMemory::Bytes(5 * PAGE_BYTES_U64));
        assert_eq!(local.expect("a size"), LocalLimit::Bytes(2 * PAGE_BYTES_U64));
        assert!(share_of(LocalLimit::Bytes(1), &PeakMemory::Bytes(1)).is_err());
    }
}
