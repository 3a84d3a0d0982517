//! `farpool trace`: passes the command line on to the trace crate.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow};
use farpool_run::{FaultTrace, RunOptions};
use farpool_trace::capture::{self, Captured, Children, QemuCapture, QemuSettings};
use farpool_trace::import::{CsvColumns, Format, ImportOptions, import};
use farpool_trace::{CacheFilter, Columns, Filter, PageFilter, TraceInfo, TraceReader, export};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::args::{
    CaptureArgs, ExportArgs, ImportArgs, TimeUnit, TraceAction, TraceArgs, TraceFormat, Via,
};
use crate::config::UsageError;
use crate::terminal::{counter, print};
use crate::values::{CacheLevel, LocalLimit, Size};

/// File name of the capture plugin, which is beside the binary or in ../lib/farpool.
const PLUGIN_NAME: &str = "libfarpool_capture_qemu.so";

/// Captures, imports, exports or describes a trace. A capture returns the program's exit code.
pub fn main(args: TraceArgs) -> anyhow::Result<u8> {
    match args.action {
        None => capture(args.capture),
        Some(TraceAction::Import(args)) => import_trace(args),
        Some(TraceAction::Export(args)) => export_trace(&args),
        Some(TraceAction::Info(args)) => info(&args.trace, args.json),
    }
}

fn capture(args: CaptureArgs) -> anyhow::Result<u8> {
    let filter = filter(&args);
    if args.via == Via::Fault {
        refuse_flags_of_qemu(&args)?;
    }
    let out = args.out.ok_or_else(|| UsageError("--out FILE is missing".to_owned()))?;
    if args.via == Via::Fault {
        return capture_faults(args.program, args.local, &out, args.json);
    }
    if args.local.is_some() {
        let refusal = "--local belongs to --via fault; under qemu-user nothing is far";
        return Err(UsageError(refusal.to_owned()).into());
    }
    let qemu = args.qemu.or_else(capture::find_qemu).ok_or_else(|| {
        let name = format!("qemu-{}", std::env::consts::ARCH);
        anyhow!("there is no {name} in PATH; install it (Debian: apt-get install qemu-user)")
    })?;
    let plugin = find_plugin()?;
    let is_followed = args.children || args.process.is_some();
    let children = is_followed.then_some(Children { only: args.process });
    let command = capture::resolve(&args.program, std::env::var_os("PATH").as_deref())?;
    // The terminal sends ctrl-C to the program, too: the program ends, and the trace is completed.
    // While the program is timed, both signals end the command.
    let interrupted = Arc::new(AtomicBool::new(false));
    let terminated = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted))?;
    signal_hook::flag::register(SIGTERM, Arc::clone(&terminated))?;
    signal_hook::flag::register(SIGTERM, Arc::clone(&interrupted))?;
    let native = match args.time {
        Some(runs) => Some(capture::time_native(&command, runs, &interrupted)?),
        None => None,
    };
    let settings = QemuSettings {
        qemu,
        plugin,
        filter,
        native,
        max_records: args.max_records,
        skip_records: args.skip,
        children,
    };
    let running = QemuCapture::start(&command, &settings, &out)?;
    let process = i32::try_from(running.process()).ok().and_then(rustix::process::Pid::from_raw);
    let shown = counter("references recorded");
    let captured = running.finish(&mut |records| {
        shown.set_position(records);
        if terminated.swap(false, Ordering::Relaxed) {
            // A program that has ended meanwhile needs no signal.
            let _ =
                process.map(|it| rustix::process::kill_process(it, rustix::process::Signal::TERM));
        }
    });
    shown.finish_and_clear();
    let captured = captured?;
    let Captured { status, records, threads, processes, notes } = captured;
    let code = exit_code(status);
    tell(&out, &Told { records, threads, processes, code, notes }, args.json)?;
    Ok(code)
}

/// The pager sees faults only, of all processes: what selects references has no meaning there.
fn refuse_flags_of_qemu(args: &CaptureArgs) -> Result<(), UsageError> {
    let flags = [
        ("--unfiltered", args.unfiltered),
        ("--pages", args.pages.is_some()),
        ("--process", args.process.is_some()),
        ("--max-records", args.max_records.is_some()),
        ("--skip", args.skip > 0),
        ("--time", args.time.is_some()),
        ("--qemu", args.qemu.is_some()),
    ];
    let given: Vec<&str> =
        flags.iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| *flag).collect();
    if given.is_empty() {
        return Ok(());
    }
    let reason =
        "needs a capture under qemu-user; --via fault records every fault of all processes";
    Err(UsageError(format!("{} {reason}", given.join(", "))))
}

fn capture_faults(
    program: Vec<OsString>,
    local: Option<LocalLimit>,
    out: &Path,
    as_json: bool,
) -> anyhow::Result<u8> {
    let missing = |what: &str| UsageError(format!("{what} is missing; see farpool trace --help"));
    let local = local.ok_or_else(|| missing("--local SIZE, which --via fault needs,"))?;
    let mut words = program.into_iter();
    let mut options =
        RunOptions::new(words.next().ok_or_else(|| missing("the program"))?, local.into());
    options.arguments = words.collect();
    let (code, trace) = farpool_run::capture_faults(&options, out)?;
    let code = u8::try_from(code).unwrap_or(crate::EXIT_FAILED);
    let FaultTrace { records, threads, notes } = trace;
    tell(out, &Told { records, threads, processes: 0, code, notes }, as_json)?;
    Ok(code)
}

fn filter(args: &CaptureArgs) -> Filter {
    if let Some(window_accesses) = args.pages {
        return Filter::Pages(PageFilter { window_accesses });
    }
    let level = |level: CacheLevel| if args.unfiltered { CacheLevel::NONE } else { level };
    let (l1, llc) = (level(args.l1), level(args.llc));
    Filter::Caches(CacheFilter {
        l1_bytes: l1.bytes,
        l1_ways: l1.ways,
        llc_bytes: llc.bytes,
        llc_ways: llc.ways,
    })
}

fn find_plugin() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe().context("the executable's path is not known")?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(PLUGIN_NAME), folder.join("../lib/farpool").join(PLUGIN_NAME)];
    let found = places.iter().find(|place| place.exists()).cloned();
    found.ok_or_else(|| {
        anyhow!(
            "{} is missing; `make build` makes it, `make install` installs it",
            places[0].display()
        )
    })
}

/// As for `farpool run`: the program's own code, or 128 + n if signal n ended it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// What is printed about a capture.
struct Told {
    records: u64,
    threads: u64,
    /// Processes that were followed; 0 if that is not known.
    processes: u64,
    /// Exit code of the program.
    code: u8,
    notes: Vec<String>,
}

fn tell(out: &Path, captured: &Told, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let told = json!({
            "trace": out,
            "records": captured.records,
            "threads": captured.threads,
            "processes": captured.processes,
            "program_exit_code": captured.code,
            "notes": captured.notes,
        });
        return Ok(print(&format!("{told}\n"))?);
    }
    tell_people(out, captured.records, captured.threads, &captured.notes);
    Ok(())
}

/// Tells what a new trace holds. The program's own output goes to standard output.
pub fn tell_people(out: &Path, records: u64, threads: u64, notes: &[String]) {
    eprintln!("farpool trace: {records} references of {threads} threads in {}", out.display());
    for note in notes {
        eprintln!("farpool trace: {note}");
    }
}

fn import_trace(args: ImportArgs) -> anyhow::Result<u8> {
    let (format, usual_bytes) = match args.format {
        TraceFormat::Lackey => (Format::Lackey, 64),
        TraceFormat::OracleGeneral => (Format::OracleGeneral, 4096),
        TraceFormat::Vscsi => (Format::Vscsi, 512),
        TraceFormat::Ramulator => (Format::Ramulator, 64),
        TraceFormat::Csv => {
            let columns = CsvColumns {
                block: args.block_column,
                address: args.address_column,
                time: args.time_column,
                time_unit: args.time_unit.into(),
                write: args.write_column,
                thread: args.thread_column,
                object: args.object_column,
                size: args.size_column,
                has_header: !args.no_header,
                has_decimal_seconds: args.time_unit == TimeUnit::DecimalS,
            };
            (Format::Csv(columns), 4096)
        }
    };
    let block_bytes = args.block.map_or(usual_bytes, |size| size.0);
    let options = ImportOptions { format, block_bytes, sized: args.sizes };
    let shown = counter("records read");
    let result =
        import(&args.from, &args.out, &options, &mut |records| shown.set_position(records));
    shown.finish_and_clear();
    let records = result?;
    print(&format!("{records} records in {}\n", args.out.display()))?;
    Ok(0)
}

fn export_trace(args: &ExportArgs) -> anyhow::Result<u8> {
    let records = export::oracle_general(&args.from, &args.out, args.page.0)?;
    print(&format!("{records} requests in {}\n", args.out.display()))?;
    Ok(0)
}

fn info(trace: &Path, as_json: bool) -> anyhow::Result<u8> {
    let reader = TraceReader::open(trace, Columns::BLOCKS)?;
    let records = reader.records();
    if as_json {
        let told = json!({ "trace": trace, "records": records, "info": reader.info() });
        print(&format!("{told}\n"))?;
    } else {
        print(&describe(reader.info(), records))?;
    }
    Ok(0)
}

fn describe(info: &TraceInfo, records: u64) -> String {
    let mut lines = vec![
        ("records", records.to_string()),
        ("block", format!("{} bytes", info.block_bytes)),
        ("clock", format!("{:?}", info.clock).to_lowercase()),
        ("source", info.source.clone()),
    ];
    if !info.program.is_empty() {
        lines.push(("program", info.program.join(" ")));
    }
    let level = |bytes, ways| CacheLevel { bytes, ways }.to_string();
    match info.filter {
        None => {}
        Some(Filter::Caches(CacheFilter { l1_bytes, l1_ways, llc_bytes, llc_ways })) => {
            lines.push(("first level", level(l1_bytes, l1_ways)));
            lines.push(("last level", level(llc_bytes, llc_ways)));
        }
        Some(Filter::Pages(PageFilter { window_accesses })) => {
            lines.push(("pages", format!("once in {window_accesses} accesses of a thread")));
        }
    }
    let processes = info.processes.iter();
    lines.extend(processes.map(|it| ("process", format!("{} {}", it.number, it.program))));
    if let Some(native_ps) = info.native_ps {
        let micros = native_ps / 1_000_000;
        lines.push(("native time", format!("{}.{:06} s", micros / 1_000_000, micros % 1_000_000)));
    }
    if let Some(file_bytes) = info.native_file_bytes {
        lines.push(("files", Size(file_bytes).to_string()));
    }
    lines.extend(info.notes.iter().map(|note| ("note", note.clone())));
    lines.iter().map(|(name, value)| format!("{name:<12} {value}\n")).collect()
}
