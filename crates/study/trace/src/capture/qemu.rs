//! Starts the program under qemu-user with the plugin and writes the plugin's records to a trace.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use super::native::NativeRun;
use super::processes::{Children, Processes};
use super::program::Command;
use super::ring::{Counts, News, PROCESSES_MAX, Ring};
use crate::error::TraceError;
use crate::record::{CacheFilter, Clock, Filter, PageFilter, TraceInfo};
use crate::writer::TraceWriter;

/// Bytes of the cache lines that the plugin records.
pub const LINE_BYTES: u64 = 64;

/// How a program is captured, and through which filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuSettings {
    /// qemu-user for this machine's processor.
    pub qemu: PathBuf,
    /// `libfarpool_capture_qemu.so`.
    pub plugin: PathBuf,
    /// What filters the references before the trace.
    pub filter: Filter,
    /// The program's native run, if it was timed.
    pub native: Option<NativeRun>,
    /// Recording ends after this many records; the program goes on.
    pub max_records: Option<u64>,
    /// This many records at the beginning are left out.
    pub skip_records: u64,
    /// Which children are recorded; None follows none.
    pub children: Option<Children>,
}

impl Default for CacheFilter {
    /// A first level of 64 KiB in 8 ways per thread, a last level of 2 MiB in 16: one core's share
    /// of a server's cache.
    fn default() -> Self {
        Self { l1_bytes: 64 << 10, l1_ways: 8, llc_bytes: 2 << 20, llc_ways: 16 }
    }
}

/// Window, in accesses of a thread, in which each of its pages is recorded once: about 2
/// microseconds of native time, less than one fault takes, so that no pager can tell two uses
/// within it apart.
pub const PAGE_WINDOW_ACCESSES: u64 = 4096;

/// How a capture ended.
#[derive(Debug, Clone)]
pub struct Captured {
    /// The program's exit status.
    pub status: ExitStatus,
    /// Records in the trace.
    pub records: u64,
    /// Threads of the program that ran.
    pub threads: u64,
    /// Processes that were followed, if children were; a program that another becomes by `exec`
    /// counts as one more.
    pub processes: u64,
    /// What the trace does not contain, for people.
    pub notes: Vec<String>,
}

/// qemu-user for programs of this machine, from PATH.
#[must_use]
pub fn find_qemu() -> Option<PathBuf> {
    let name = format!("qemu-{}", std::env::consts::ARCH);
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(&name)).find(|file| file.is_file())
}

/// A program that is being recorded.
#[derive(Debug)]
pub struct QemuCapture {
    child: Child,
    ring: Ring,
    writer: TraceWriter,
    max_records: u64,
    /// Records still to leave out, and how many were.
    to_skip: u64,
    skipped: u64,
    is_full: bool,
    native: Option<NativeRun>,
    children: Option<Children>,
    processes: Processes,
    /// The file that the process runs: QEMU's, until the program replaces itself.
    loaded: PathBuf,
    replaced_by: Option<PathBuf>,
}

/// The pause after an empty ring: too short for the ring to fill up.
const PAUSE: Duration = Duration::from_micros(200);

impl QemuCapture {
    /// Starts `command`; its trace will be at `out`.
    ///
    /// # Errors
    /// QEMU cannot be started, or `out` cannot be written.
    pub fn start(
        command: &Command,
        settings: &QemuSettings,
        out: &Path,
    ) -> Result<Self, TraceError> {
        let ring = Ring::create()?;
        let block_bytes = match settings.filter {
            Filter::Caches(_) => LINE_BYTES,
            Filter::Pages(_) => farpool_units::PAGE_BYTES_U64,
        };
        let mut info = TraceInfo::new("qemu-user plugin", block_bytes, Clock::Accesses);
        info.filter = Some(settings.filter);
        info.native_ps = settings.native.map(|native| native.time_ps);
        info.native_file_bytes = settings.native.map(|native| native.file_bytes);
        info.program = std::iter::once(&command.name)
            .chain(&command.arguments)
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let writer = TraceWriter::create(out, info)?;
        let child = std::process::Command::new(&settings.qemu)
            .args(["-cpu", "max", "-plugin"])
            .arg(plugin_argument(settings, &ring.path()))
            .arg("-0")
            .arg(&command.name)
            .arg(&command.file)
            .args(&command.arguments)
            .stdin(Stdio::inherit())
            .spawn()
            .map_err(TraceError::io(&settings.qemu))?;
        let max_records = settings.max_records.unwrap_or(u64::MAX);
        let loaded = settings.qemu.canonicalize().map_err(TraceError::io(&settings.qemu))?;
        Ok(Self {
            child,
            ring,
            writer,
            max_records,
            to_skip: settings.skip_records,
            skipped: 0,
            is_full: false,
            native: settings.native,
            children: settings.children.clone(),
            processes: Processes::default(),
            loaded,
            replaced_by: None,
        })
    }

    /// The process ID, for signals.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Records until the program ends; `progress` is called with the number of records so far.
    ///
    /// # Errors
    /// The disk refuses; then the program is killed and no trace is left.
    pub fn finish(mut self, progress: &mut dyn FnMut(u64)) -> Result<Captured, TraceError> {
        let status = match self.record(progress) {
            Ok(status) => status,
            Err(error) => {
                // The first error is the one reported; a program that cannot be killed has ended.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return Err(error);
            }
        };
        let counts = self.ring.counts();
        let notes = self.notes(status, counts);
        if self.writer.records() == 0 && self.skipped > 0 {
            let reason = format!(
                "{status}, after {} records: all of them were to be left out",
                self.skipped
            );
            return Err(TraceError::Capture(reason));
        }
        if self.writer.records() == 0 {
            return Err(TraceError::Capture(self.why_empty(status)));
        }
        let info = self.writer.info_mut();
        info.notes.clone_from(&notes);
        info.processes = self.processes.recorded();
        let records = self.writer.finish()?;
        Ok(Captured {
            status,
            records,
            threads: counts.threads,
            processes: counts.processes,
            notes,
        })
    }

    fn why_empty(&self, status: ExitStatus) -> String {
        let only = self.children.as_ref().and_then(|children| children.only.as_deref());
        match (only, self.processes.others()) {
            (Some(only), others) if !others.is_empty() => {
                format!("{status}, and no process was called {only}; these ran: {others}")
            }
            _ => format!("{status}, and nothing was recorded: QEMU's message is above"),
        }
    }

    /// Lists what the trace does not contain.
    fn notes(&self, status: ExitStatus, counts: Counts) -> Vec<String> {
        let mut notes = self.processes.notes(&self.ring.path());
        if counts.numbers > PROCESSES_MAX {
            let above = counts.numbers - PROCESSES_MAX;
            notes.push(format!(
                "{above} processes are missing: after {PROCESSES_MAX}, none is recorded"
            ));
        }
        if counts.forks > 0 {
            notes.push(format!("{} forked children ran unrecorded", counts.forks));
        }
        if let Some(other) = &self.replaced_by {
            let other = other.display();
            notes.push(format!(
                "the program replaced itself by {other}, unrecorded; capture that one"
            ));
        } else if counts.execs > 0 {
            notes.push(format!("{} programs started by exec ran unrecorded", counts.execs));
        }
        let is_one_of_several = self.children.as_ref().is_some_and(|it| it.only.is_some());
        if self.native.is_some() && is_one_of_several {
            notes.push("the native time is that of all processes together".to_owned());
        }
        if self.skipped > 0 {
            notes.push(format!(
                "the first {} records were left out; a native time is that of the whole program",
                self.skipped
            ));
        }
        if self.is_full {
            notes.push(format!("recording ended at {} records, as asked", self.max_records));
        }
        if let Some(native) = self.native.filter(|native| native.status != status) {
            notes.push(format!(
                "the native run ended with {}, the captured one with {status}",
                native.status
            ));
        }
        notes
    }

    fn record(&mut self, progress: &mut dyn FnMut(u64)) -> Result<ExitStatus, TraceError> {
        loop {
            let ended = self.child.try_wait().map_err(TraceError::io(Path::new("wait")))?;
            let count = self.drain()?;
            if let Some(status) = ended {
                // Processes that run on need not find out that nobody reads.
                self.ring.stop();
                return Ok(status);
            }
            progress(self.writer.records());
            if count == 0 {
                self.look_for_exec();
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Detects a wrapper that ends in `exec`, leaves QEMU and goes on natively; the user needs to
    /// know.
    fn look_for_exec(&mut self) {
        let link = format!("/proc/{}/exe", self.child.id());
        if self.replaced_by.is_none()
            && let Ok(file) = std::fs::read_link(link)
            && file != self.loaded
        {
            self.replaced_by = Some(file);
        }
    }

    fn drain(&mut self) -> Result<u64, TraceError> {
        let (writer, max_records, is_full) =
            (&mut self.writer, self.max_records, &mut self.is_full);
        let (to_skip, skipped) = (&mut self.to_skip, &mut self.skipped);
        let processes = &mut self.processes;
        let count = self.ring.drain(|news| {
            let record = match news {
                News::Record(record) => record,
                News::Process(begun) => {
                    processes.begin(begun);
                    return Ok(());
                }
            };
            if *to_skip > 0 {
                *to_skip -= 1;
                *skipped += 1;
                return Ok(());
            }
            if writer.records() < max_records {
                return writer.push(record);
            }
            *is_full = true;
            Ok(())
        })?;
        if *is_full {
            self.ring.stop();
        }
        Ok(count)
    }
}

fn plugin_argument(settings: &QemuSettings, ring: &Path) -> OsString {
    let mut argument = settings.plugin.clone().into_os_string();
    argument.push(",ring=");
    argument.push(ring);
    argument.push(match settings.filter {
        Filter::Caches(CacheFilter { l1_bytes, l1_ways, llc_bytes, llc_ways }) => {
            format!(",l1={l1_bytes},l1ways={l1_ways},llc={llc_bytes},llcways={llc_ways}")
        }
        Filter::Pages(PageFilter { window_accesses }) => format!(",pages={window_accesses}"),
    });
    if let Some(Children { only }) = &settings.children {
        argument.push(",children=1");
        if let Some(only) = only {
            argument.push(",only=");
            argument.push(only);
        }
    }
    argument
}
