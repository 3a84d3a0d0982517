//! Programs and daemons on the hosts.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use farpool_bench::TenantReport;
use farpool_bench::stage::Running;
use farpool_kernel::lock;

use super::log::Log;
use super::plan::Program;
use super::timeline::Source;
use crate::Error;

/// A program and everything that it prints.
#[derive(Debug)]
pub struct StartedProgram {
    /// Its name for people.
    pub name: String,
    /// What a tenant reads in a second. Zero for other programs, which end by themselves.
    pub pace_bytes_per_s: u64,
    /// Whether it runs under `farpool run`.
    pub is_far: bool,
    /// File of the statistics that `farpool run` writes.
    pub stats: std::path::PathBuf,
    running: Running,
    stdin: Option<ChildStdin>,
    told: Arc<Mutex<Told>>,
}

/// What a program has printed so far.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// A tenant's last line.
    pub report: TenantReport,
    /// Longest time of one read since [`StartedProgram::take_longest_us`] was last called.
    pub longest_us: u64,
    /// All lines on standard error, with newlines.
    pub errors: String,
}

/// A program's part in the scenario.
#[derive(Debug)]
pub struct Role<'a> {
    pub name: &'a str,
    pub host: usize,
    pub is_far: bool,
    pub pace_bytes_per_s: u64,
}

impl StartedProgram {
    /// Starts a program. Each line on its standard error is an event.
    pub fn start(
        role: &Role<'_>,
        mut command: Command,
        stats: std::path::PathBuf,
        log: &Arc<Log>,
    ) -> Result<StartedProgram, Error> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = Running::start_as_given(role.name, &mut command)?;
        let told = Arc::<Mutex<Told>>::default();
        let stdin = running.stdin();
        follow(running.stdout(), {
            let told = Arc::clone(&told);
            move |line| hear(&told, line)
        })?;
        follow(running.stderr(), {
            let (told, log, name) = (Arc::clone(&told), Arc::clone(log), role.name.to_owned());
            move |line| {
                told_of(&told).errors += &format!("{line}\n");
                log.event(Source::Said, &format!("{name}: {line}"));
            }
        })?;
        Ok(StartedProgram {
            name: role.name.to_owned(),
            pace_bytes_per_s: role.pace_bytes_per_s,
            is_far: role.is_far,
            stats,
            running,
            stdin,
            told,
        })
    }

    /// Whether it takes commands.
    pub fn is_tenant(&self) -> bool {
        self.pace_bytes_per_s > 0
    }

    pub fn id(&self) -> u32 {
        self.running.id()
    }

    pub fn told(&self) -> Told {
        told_of(&self.told).clone()
    }

    /// Returns what the program prints, for use in another thread.
    pub fn ear(&self) -> Arc<Mutex<Told>> {
        Arc::clone(&self.told)
    }

    /// Returns the longest time of one read since the last call.
    pub fn take_longest_us(&self) -> u64 {
        std::mem::take(&mut told_of(&self.told).longest_us)
    }

    /// Sends a command to a tenant. Errors are ignored: a tenant that has ended shows it by its
    /// exit code.
    pub fn tell(&mut self, command: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{command}").and_then(|()| stdin.flush());
        }
    }

    /// Closes the program's standard input, which ends a tenant.
    pub fn close(&mut self) {
        self.stdin = None;
    }

    /// Its exit code, once it has ended.
    pub fn exit_code(&mut self) -> Result<Option<i32>, Error> {
        Ok(self.running.exit_code()?)
    }

    /// Counters of the whole run, after its end.
    pub fn statistics(&self) -> Option<serde_json::Value> {
        let text = std::fs::read(&self.stats).ok()?;
        let all: serde_json::Value = serde_json::from_slice(&text).ok()?;
        all.get("total").cloned()
    }
}

/// A daemon. It is ready once it has printed its first line, see [`Daemon::is_ready`].
#[derive(Debug)]
pub struct Daemon {
    pub running: Running,
    ready: Arc<Mutex<Option<String>>>,
}

impl Daemon {
    /// Starts a daemon. Its log goes to a file in `folder`.
    pub fn start(name: &str, mut command: Command, folder: &Path) -> Result<Daemon, Error> {
        let path = folder.join(format!("{name}.log"));
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| Error::at("opening", &path, error))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut running = Running::start_as_given(name, &mut command)?;
        let ready = Arc::<Mutex<Option<String>>>::default();
        follow(running.stdout(), {
            let ready = Arc::clone(&ready);
            move |line| {
                let mut ready = lock(&ready);
                ready.get_or_insert_with(|| line.to_owned());
            }
        })?;
        Ok(Daemon { running, ready })
    }

    pub fn is_ready(&self) -> bool {
        lock(&self.ready).is_some()
    }
}

/// Returns the arguments that start a tenant.
pub fn tenant_words(bytes: u64, bytes_max: u64, pace: u64, seed: u64) -> Vec<String> {
    let words =
        [("--bytes", bytes), ("--bytes-max", bytes_max), ("--pace", pace), ("--seed", seed)];
    let words = words.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_string()]);
    ["demo", "tenant"].map(str::to_owned).into_iter().chain(words).collect()
}

/// Returns the limits of a far program as arguments of `farpool run`.
pub fn limit_words(program: &Program, rate_bytes_per_s: u64) -> Vec<String> {
    let limits = [
        ("--local", program.local_bytes),
        ("--quota", program.quota_bytes),
        ("--rate", rate_bytes_per_s),
    ];
    limits.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_string()]).collect()
}

pub fn told_of(told: &Mutex<Told>) -> MutexGuard<'_, Told> {
    lock(told)
}

fn hear(told: &Mutex<Told>, line: &str) {
    // Programs other than tenants print other lines.
    if let Ok(report) = serde_json::from_str::<TenantReport>(line) {
        let mut told = told_of(told);
        told.longest_us = told.longest_us.max(report.longest_us);
        told.report = report;
    }
}

/// Passes each line of a stream to `hear`, on a thread that ends with the stream.
fn follow(
    stream: Option<impl Read + Send + 'static>,
    mut hear: impl FnMut(&str) + Send + 'static,
) -> Result<(), Error> {
    let Some(stream) = stream else { return Ok(()) };
    let read = move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            hear(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    };
    let thread = std::thread::Builder::new().name("ear".into()).spawn(read);
    thread.map(drop).map_err(|source| Error::Io { what: "starting a thread".into(), source })
}
