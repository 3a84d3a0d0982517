//! `farpool core`: writes a core file of a process, including its far memory.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context;
use farpool_coredump::{Core, Progress, Wish, take};
use serde_json::json;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use crate::args::CoreArgs;
use crate::terminal;

/// Writes the core. When interrupted, removes the file and lets the process continue.
pub fn main(args: &CoreArgs) -> anyhow::Result<u8> {
    let must_end = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let flag = Arc::clone(&must_end);
        signal_hook::flag::register(signal, flag).context("signals cannot be caught")?;
    }
    let bar = terminal::bytes_bar("written");
    let watch = |progress: Progress| {
        if !args.quiet {
            bar.set_length(progress.all_bytes);
            bar.set_position(progress.done_bytes);
        }
        !must_end.load(Relaxed)
    };
    let wish = Wish { pid: args.pid, path: &args.file, whole: args.whole, running: args.running };
    let core = take(wish, watch);
    bar.finish_and_clear();
    report(args, &core?)?;
    Ok(0)
}

fn report(args: &CoreArgs, core: &Core) -> anyhow::Result<()> {
    if core.unreadable_pages > 0 {
        eprintln!(
            "farpool: {} pages of process {} could not be read and are zeros in the core; they \
             were lost with a blade, or are past the end of a file",
            core.unreadable_pages, args.pid
        );
    }
    if !core.is_of_one_moment && !args.running {
        eprintln!(
            "farpool: process {} was resumed before all memory was read, because a page did not \
             arrive while it was stopped: the core is not a consistent snapshot",
            args.pid
        );
    }
    if args.json {
        let told = json!({
            "pid": args.pid,
            "file": args.file,
            "file_bytes": core.bytes,
            "written_bytes": core.written_bytes,
            "threads": core.threads,
            "mappings": core.mappings,
            "unreadable_pages": core.unreadable_pages,
            "stopped_ms": core.stopped.as_secs_f64() * 1000.0,
            "is_of_one_moment": core.is_of_one_moment,
        });
        terminal::print(&format!("{told}\n"))?;
    } else if !args.quiet {
        terminal::print(&format!(
            "{}: {} MiB in {} mappings, {} threads; process {} was stopped for {:.1} ms\n",
            args.file.display(),
            core.written_bytes >> 20,
            core.mappings,
            core.threads,
            args.pid,
            core.stopped.as_secs_f64() * 1000.0,
        ))?;
    }
    Ok(())
}
