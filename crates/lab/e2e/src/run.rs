//! `farpool run` of a program.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use farpool_kernel::lock;

use crate::{binaries, tree, wait_until};

/// The exit code of this crate's programs when they read wrong data.
const WRONG_DATA: i32 = 9;

/// How the pager gets into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The default of `farpool run`: the sidecar if the tests run as root.
    Usual,
    Preload,
    Sidecar,
}

/// A program to be run on far memory, or all-local for comparison.
#[derive(Debug)]
pub struct Run {
    command: Command,
    stats: Option<PathBuf>,
    directory: Option<tempfile::TempDir>,
    patience: Duration,
}

/// How a program ended.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code of `farpool run` (or of the program itself, 128 + n for signal n).
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
    /// The `total` object of the statistics; null for an all-local run.
    pub stats: serde_json::Value,
}

/// A running program.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: Arc<Mutex<Vec<u8>>>,
    stderr: Arc<Mutex<Vec<u8>>>,
    readers: Vec<std::thread::JoinHandle<()>>,
    stats: Option<PathBuf>,
    _directory: Option<tempfile::TempDir>,
    patience: Duration,
}

impl Run {
    /// `farpool run --local LIMIT [options] -- PROGRAM`; options must come before [`Run::program`].
    pub fn far(limit: &str) -> Run {
        Run::farpool(&["run", "--local", limit])
    }

    /// Like [`Run::far`], through this door.
    pub fn through(door: Door, limit: &str) -> Run {
        let run = Run::far(limit);
        match door {
            Door::Usual => run,
            Door::Preload => run.args(["--door", "preload"]),
            Door::Sidecar => run.args(["--door", "sidecar"]),
        }
    }

    /// `farpool attach PID --local LIMIT`: a run that ends when the process ends or is detached
    /// from.
    pub fn attach(pid: u32, limit: &str) -> Run {
        Run::farpool(&["attach", &pid.to_string(), "--local", limit])
    }

    /// `farpool vm run --name NAME --local LIMIT [options] -- PROGRAM`.
    pub fn vm(name: &str, limit: &str) -> Run {
        Run::farpool(&["vm", "run", "--name", name, "--local", limit])
    }

    fn farpool(words: &[&str]) -> Run {
        let directory = tempfile::tempdir().expect("a directory for the statistics");
        let stats = directory.path().join("stats.json");
        let mut command = Command::new(binaries::program("farpool"));
        command.args(words).arg("--stats").arg(&stats);
        Run::with(command, Some(stats), Some(directory))
    }

    /// A program without Farpool.
    pub fn local(program: impl AsRef<OsStr>) -> Run {
        Run::with(Command::new(program), None, None)
    }

    /// Any other command, such as one inside a network namespace.
    pub fn with(
        mut command: Command,
        stats: Option<PathBuf>,
        directory: Option<tempfile::TempDir>,
    ) -> Run {
        command.stdin(Stdio::null());
        Run { command, stats, directory, patience: Duration::from_secs(60) }
    }

    /// Uses a blade.
    #[must_use]
    pub fn blade(self, address: &str) -> Run {
        self.args(["--blade", address])
    }

    /// What is stored beside what is far, as in `2` or `parity`.
    #[must_use]
    pub fn redundancy(self, kind: &str) -> Run {
        self.args(["--redundancy", kind])
    }

    /// The program, after all options.
    #[must_use]
    pub fn program(self, program: impl Into<OsString>) -> Run {
        self.args([OsString::from("--"), program.into()])
    }

    /// One of this crate's programs.
    #[must_use]
    pub fn own_program(self, name: &str) -> Run {
        self.program(binaries::program(name))
    }

    /// Further arguments.
    #[must_use]
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Run {
        self.command.args(arguments);
        self
    }

    /// One further argument.
    #[must_use]
    pub fn arg(self, argument: impl AsRef<OsStr>) -> Run {
        self.args([argument])
    }

    /// A variable for `farpool` and the program.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Run {
        self.command.env(name, value);
        self
    }

    /// The directory to run in.
    #[must_use]
    pub fn directory(mut self, path: &std::path::Path) -> Run {
        self.command.current_dir(path);
        self
    }

    /// How long the program may take.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Run {
        self.patience = patience;
        self
    }

    /// Starts the command.
    pub fn start(mut self) -> Running {
        let mut child = self
            .command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.command));
        let (stdout, stderr) = (Arc::default(), Arc::default());
        let readers =
            vec![collect(child.stdout.take(), &stdout), collect(child.stderr.take(), &stderr)];
        Running {
            child,
            stdout,
            stderr,
            readers,
            stats: self.stats,
            _directory: self.directory,
            patience: self.patience,
        }
    }

    /// Starts the command and waits until it ends.
    pub fn finish(self) -> Outcome {
        self.start().finish()
    }
}

impl Running {
    /// Process id of the keeper (of the program itself in an all-local run).
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What `farpool blades` tells of the blades of this run.
    ///
    /// # Panics
    /// If `farpool` cannot be started.
    pub fn blades(&self) -> String {
        let mut farpool = Command::new(binaries::program("farpool"));
        let output = farpool.args(["blades", &self.pid().to_string()]).output();
        String::from_utf8_lossy(&output.expect("farpool blades").stdout).into_owned()
    }

    /// Process id of the program itself, from the moment it has been executed: children that
    /// `farpool` only forked, such as the one on which it tries to trace, are not the program.
    pub fn program_pid(&self) -> u32 {
        let pid = self.pid();
        wait_until("the program to start", self.patience, || {
            let own = tree::command_line(pid);
            let programs = tree::programs(pid).into_iter().filter(|below| {
                let line = tree::command_line(*below);
                line.is_some() && line != own
            });
            programs.min_by_key(|below| parent_distance(*below, pid))
        })
    }

    /// Standard output of the program and farpool so far.
    pub fn stdout(&self) -> String {
        text(&self.stdout)
    }

    /// Standard error of the program and farpool so far.
    pub fn stderr(&self) -> String {
        text(&self.stderr)
    }

    /// Waits until `text` is in standard output `times` times.
    pub fn wait_for_output(&mut self, text: &str, times: usize) {
        let deadline = std::time::Instant::now() + self.patience;
        while self.stdout().matches(text).count() < times {
            let ended = self.child.try_wait().expect("wait");
            assert!(
                ended.is_none() && std::time::Instant::now() < deadline,
                "{text:?} never came ({ended:?}); stdout: {} stderr: {}",
                self.stdout(),
                self.stderr()
            );
            std::thread::sleep(crate::STEP);
        }
    }

    /// Waits until the program or farpool has written a line with `text` to standard error. Returns
    /// the line.
    pub fn wait_for_line(&self, text: &str) -> String {
        wait_until(&format!("a line with {text:?}"), self.patience, || {
            self.stderr().lines().find(|line| line.contains(text)).map(str::to_owned)
        })
    }

    /// Waits until the program has fetched pages from a blade: only then can the end of a blade
    /// affect it.
    pub fn wait_until_far(&self) {
        wait_until("pages to go out and come back", self.patience, || {
            (self.fetched()? > 0).then_some(())
        });
    }

    /// Waits until pages of the program are far.
    pub fn wait_until_far_pages(&self) {
        wait_until("pages to go out", self.patience, || {
            (self.told()?["total"]["far_pages"].as_u64()? > 0).then_some(())
        });
    }

    /// Pages that the program has fetched on demand so far. Returns None if `farpool stat` does not
    /// list it.
    pub fn fetched(&self) -> Option<u64> {
        self.told()?["total"]["demand_fetches"].as_u64()
    }

    /// The program's entry in `farpool stat --json`. Returns None if it is not listed.
    pub fn told(&self) -> Option<serde_json::Value> {
        let mut farpool = Command::new(binaries::program("farpool"));
        let told = farpool.args(["stat", "--json"]).output().ok()?;
        let told: serde_json::Value = serde_json::from_slice(&told.stdout).ok()?;
        let is_ours = |program: &&serde_json::Value| program["keeper_pid"] == self.pid();
        told["programs"].as_array()?.iter().find(is_ours).cloned()
    }

    /// Waits until the program has fetched more than this many pages.
    pub fn wait_until_fetched(&self, pages: u64) {
        let what = format!("more than {pages} pages to be fetched");
        wait_until(&what, self.patience, || (self.fetched()? > pages).then_some(()));
    }

    /// Pauses the program and all its descendants, so that its memory is not moved, or resumes
    /// them. The keeper is included if `with_keeper`.
    pub fn pause(&self, paused: bool, with_keeper: bool) {
        tree::pause_below(self.pid(), paused);
        if with_keeper {
            tree::signal(self.pid(), if paused { libc::SIGSTOP } else { libc::SIGCONT });
        }
    }

    /// Whether the process is still running.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Waits until the process ends.
    pub fn finish(mut self) -> Outcome {
        let deadline = std::time::Instant::now() + self.patience;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break status;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "not ended after {:?}; stdout: {} stderr: {}{}",
                self.patience,
                self.stdout(),
                self.stderr(),
                tree::describe(self.pid())
            );
            std::thread::sleep(crate::STEP);
        };
        for reader in std::mem::take(&mut self.readers) {
            let _ = reader.join();
        }
        let stats = self.stats.as_ref().and_then(|path| std::fs::read(path).ok());
        let stats =
            stats.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
        Outcome {
            code: code(status),
            stdout: self.stdout(),
            stderr: self.stderr(),
            stats: stats.map_or(serde_json::Value::Null, |stats| stats["total"].clone()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            tree::end(self.pid());
            let _ = self.child.wait();
        }
    }
}

impl Outcome {
    /// A counter of the whole run.
    pub fn counter(&self, name: &str) -> u64 {
        self.stats[name].as_u64().unwrap_or(0)
    }

    /// Checks the exit code.
    ///
    /// # Panics
    /// Unless the exit code is 0.
    pub fn require_success(&self) -> &Outcome {
        assert_eq!(self.code, 0, "stdout: {} stderr: {}", self.stdout, self.stderr);
        self
    }

    /// Checks a program that lost far memory.
    ///
    /// # Panics
    /// Unless it ended because far memory on this blade is lost, with a message that says so, and
    /// read no wrong data.
    pub fn require_lost(&self, blade: &str) -> &Outcome {
        let said = format!("{}: stdout: {} stderr: {}", self.code, self.stdout, self.stderr);
        assert_ne!(self.require_right().code, 0, "{said}");
        let mut lines = self.stderr.lines();
        let is_clear = |line: &str| line.contains("far memory is lost") && line.contains(blade);
        assert!(lines.any(is_clear), "no line names {blade} and what is lost: {said}");
        self
    }

    /// Checks what no program may do, however it ended.
    ///
    /// # Panics
    /// If it read wrong data.
    pub fn require_right(&self) -> &Outcome {
        let said = format!("{}: stdout: {} stderr: {}", self.code, self.stdout, self.stderr);
        assert!(!said.contains("WRONG") && self.code != WRONG_DATA, "{said}");
        self
    }

    /// Checks that far memory was used and none was lost.
    ///
    /// # Panics
    /// Unless pages were written and fetched, and none was lost: a test on memory that fits proves
    /// nothing.
    pub fn require_far(&self) -> &Outcome {
        let (out, back) = (self.counter("pages_written"), self.counter("demand_fetches"));
        assert!(out > 0 && back > 0, "{out} pages written, {back} fetched: nothing was far");
        assert_eq!(self.counter("lost"), 0, "pages were lost: {}", self.stderr);
        self
    }
}

fn parent_distance(pid: u32, root: u32) -> usize {
    tree::descendants(root).iter().filter(|other| tree::descendants(**other).contains(&pid)).count()
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn text(bytes: &Mutex<Vec<u8>>) -> String {
    let bytes = lock(bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn collect(
    stream: Option<impl Read + Send + 'static>,
    into: &Arc<Mutex<Vec<u8>>>,
) -> std::thread::JoinHandle<()> {
    let into = Arc::clone(into);
    std::thread::spawn(move || {
        let Some(stream) = stream else { return };
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            lock(&into).append(&mut line);
        }
    })
}
