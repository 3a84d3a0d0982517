//! Child programs, signals and progress.

use super::tree::tree;
use super::{Peak, lacking};
use crate::BenchError;
use farpool_units::at_most;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a program may take to end after SIGTERM before it is killed: a server under heavy
/// swapping frees its memory slowly.
const END_PATIENCE: Duration = Duration::from_secs(20);
/// How long killed processes may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// How often a waiting loop polls.
const POLL: Duration = Duration::from_millis(5);
/// How much of a failed program's stderr is shown.
const ERROR_TAIL_BYTES: i64 = 600;

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes SIGINT and SIGTERM only set a flag, which every waiting loop checks.
///
/// # Errors
/// The system refuses.
pub fn watch_signals() -> Result<(), BenchError> {
    let flag = STOP.get_or_init(Arc::default);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let registered = signal_hook::flag::register(signal, Arc::clone(flag));
        registered.map_err(BenchError::os("watch for signals"))?;
    }
    Ok(())
}

/// Checks for an interruption, in every loop that takes long.
///
/// # Errors
/// SIGINT or SIGTERM has arrived.
pub fn check_interrupted() -> Result<(), BenchError> {
    match STOP.get() {
        Some(flag) if flag.load(Relaxed) => Err(BenchError::Interrupted),
        _ => Ok(()),
    }
}

/// Reports on stderr what is being done: over the last line on a terminal, else on a line of its
/// own.
pub fn progress(text: &str) {
    let mut out = io::stderr().lock();
    let (start, end) = if out.is_terminal() { ("\r\x1b[K", "") } else { ("", "\n") };
    // It does no harm if progress cannot be shown.
    let _ = write!(out, "{start}{text}{end}").and_then(|()| out.flush());
}

/// Reports on stderr what has been done, on a line that stays.
pub fn progress_done(text: &str) {
    let mut out = io::stderr().lock();
    let start = if out.is_terminal() { "\r\x1b[K" } else { "" };
    let _ = writeln!(out, "{start}{text}");
}

/// A running program in a process group of its own; ended when dropped, with all it started.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    errors: Option<File>,
    ended: Option<ExitStatus>,
}

impl Running {
    /// Starts the program; its stderr is kept for messages.
    ///
    /// # Errors
    /// It is not installed, or cannot be started.
    pub fn start(name: &str, command: &mut Command) -> Result<Self, BenchError> {
        let errors = unnamed_file().map_err(BenchError::os("make a file for error messages"))?;
        let copy = errors.try_clone().map_err(BenchError::os("share a file"))?;
        let mut running = Self::start_as_given(name, command.stderr(copy))?;
        running.errors = Some(errors);
        Ok(running)
    }

    /// Starts the program with its stderr where the command sends it.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_as_given(name: &str, command: &mut Command) -> Result<Self, BenchError> {
        let child = command.process_group(0).spawn();
        let child = child.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                let program = command.get_program().to_string_lossy();
                lacking(format!("{program} is not installed"))
            }
            _ => BenchError::os(format!("start {name}"))(error),
        })?;
        Ok(Self { name: name.to_owned(), child, errors: None, ended: None })
    }

    /// Process id of the program (or of the keeper above it).
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The other end of a piped stdin.
    pub fn stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// The other end of a piped stdout.
    pub fn stdout(&mut self) -> Option<std::process::ChildStdout> {
        self.child.stdout.take()
    }

    /// The other end of a piped stderr.
    pub fn stderr(&mut self) -> Option<std::process::ChildStderr> {
        self.child.stderr.take()
    }

    /// Returns its exit code, or 128 plus the signal's number. Returns None if it still runs.
    ///
    /// # Errors
    /// The system does not report the status.
    pub fn exit_code(&mut self) -> Result<Option<i32>, BenchError> {
        let code = |status: ExitStatus| {
            status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
        };
        Ok(self.poll()?.map(code))
    }

    /// Sends SIGTERM to the program alone and does not wait.
    pub fn ask_to_end(&self) {
        let program = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(program) = program.filter(|_| self.ended.is_none()) {
            // It may have ended meanwhile, which is what is wanted.
            let _ = rustix::process::kill_process(program, Signal::TERM);
        }
    }

    /// Kills the program and all in its group with SIGKILL, and waits for the program.
    pub fn kill(&mut self) {
        if let Ok(None) = self.poll() {
            self.signal(Signal::KILL);
        }
        let _ = self.child.wait();
    }

    /// Checks that the program still runs.
    ///
    /// # Errors
    /// The program has ended already (the error has the end of its stderr), or an interruption.
    pub fn check_alive(&mut self) -> Result<(), BenchError> {
        check_interrupted()?;
        match self.poll()? {
            None => Ok(()),
            Some(status) => Err(self.early_end(status)),
        }
    }

    /// Waits for the program's end.
    ///
    /// # Errors
    /// An exit status other than 0, no end in time, or an interruption.
    pub fn wait(&mut self, patience: Duration) -> Result<(), BenchError> {
        let deadline = Instant::now() + patience;
        loop {
            check_interrupted()?;
            match self.poll()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) if is_killed(status) => {
                    return Err(BenchError::Killed { program: self.name.clone() });
                }
                Some(status) => return Err(self.failure(&status.to_string())),
                None if Instant::now() > deadline => {
                    let (program, seconds) = (self.name.clone(), patience.as_secs_f64());
                    return Err(BenchError::TooSlow { program, seconds });
                }
                None => std::thread::sleep(POLL),
            }
        }
    }

    /// Ends the program and all that it started: SIGTERM first, then SIGKILL for everything left.
    pub fn end(&mut self) {
        let deadline = Instant::now() + END_PATIENCE;
        // Some processes are in groups of their own, as PostgreSQL's are, and lose their parent
        // when it ends.
        let mut all = Vec::new();
        // Errors below mean that the group is gone already, which is what is wanted.
        if let Ok(None) = self.poll() {
            all = tree(self.id());
            self.signal(Signal::TERM);
        }
        while matches!(self.poll(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        if let Ok(None) = self.poll() {
            all.extend(tree(self.id()));
        }
        self.signal(Signal::KILL);
        all.iter().for_each(|process| process.kill());
        let _ = self.child.wait();
        let deadline = Instant::now() + KILL_PATIENCE;
        while all.iter().any(|process| process.is_alive()) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
    }

    fn signal(&self, signal: Signal) {
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, signal);
        }
    }

    fn poll(&mut self) -> Result<Option<ExitStatus>, BenchError> {
        if self.ended.is_none() {
            let status = self.child.try_wait();
            self.ended = status.map_err(BenchError::os(format!("wait for {}", self.name)))?;
        }
        Ok(self.ended)
    }

    /// Returns the first line of Farpool's among all that the program wrote to stderr.
    pub(crate) fn farpool_said(&mut self) -> Option<String> {
        let file = self.errors.as_mut()?;
        file.rewind().ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        text.lines().find(|line| line.starts_with("farpool:")).map(str::to_owned)
    }

    fn early_end(&mut self, status: ExitStatus) -> BenchError {
        match is_killed(status) {
            true => BenchError::Killed { program: self.name.clone() },
            false => self.failure(&format!("it ended early ({status})")),
        }
    }

    fn failure(&mut self, what: &str) -> BenchError {
        let said = self.errors.as_mut().and_then(|file| tail(file).ok()).unwrap_or_default();
        let detail = if said.is_empty() { what.to_owned() } else { format!("{what}: {said}") };
        BenchError::Program { program: self.name.clone(), detail }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

fn is_killed(status: ExitStatus) -> bool {
    status.signal() == Some(libc::SIGKILL)
}

/// The result of a program that ran to its end.
#[derive(Debug)]
pub(crate) struct Finished {
    pub stdout: Vec<u8>,
    pub took: Duration,
    /// Most memory its process tree held, in bytes; see [`Peak`].
    pub peak_bytes: u64,
}

/// [`run_to_end`] or [`run_undisturbed`].
pub(crate) type RunToEnd = fn(&str, &mut Command, &[u8], Duration) -> Result<Finished, BenchError>;

/// Runs a program to its end, with `input` on its stdin, and samples its memory meanwhile.
pub(crate) fn run_to_end(
    name: &str,
    command: &mut Command,
    input: &[u8],
    patience: Duration,
) -> Result<Finished, BenchError> {
    run(name, command, input, patience, Some(Peak::watch))
}

/// The same without samples of its memory, which cost a program with far memory much of its time:
/// [`Finished::peak_bytes`] is 0.
pub(crate) fn run_undisturbed(
    name: &str,
    command: &mut Command,
    input: &[u8],
    patience: Duration,
) -> Result<Finished, BenchError> {
    run(name, command, input, patience, None)
}

fn run(
    name: &str,
    command: &mut Command,
    input: &[u8],
    patience: Duration,
    watch: Option<fn(u32) -> Peak>,
) -> Result<Finished, BenchError> {
    let start = Instant::now();
    let mut running = Running::start(name, command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let peak = watch.map(|watch| watch(running.id()));
    let (stdin, stdout) = (running.stdin(), running.stdout());
    let (waited, stdout) = std::thread::scope(|scope| {
        // A program that does not read all of its input ends with a broken pipe here: its own exit
        // status shows whether that was right.
        scope.spawn(|| stdin.map(|mut pipe| pipe.write_all(input)));
        let output = scope.spawn(|| {
            let mut bytes = Vec::new();
            stdout.map(|mut pipe| pipe.read_to_end(&mut bytes));
            bytes
        });
        let waited = running.wait(patience).map(|()| start.elapsed());
        if waited.is_err() {
            running.end();
        }
        (waited, output.join().unwrap_or_default())
    });
    Ok(Finished { took: waited?, stdout, peak_bytes: peak.map_or(0, Peak::stop) })
}

/// Creates a file that no other process sees and that is gone when closed.
fn unnamed_file() -> io::Result<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    Ok(File::from(rustix::fs::memfd_create("farpool-stage-errors", flags)?))
}

/// Returns the last [`ERROR_TAIL_BYTES`] of a file, on one line.
fn tail(file: &mut File) -> io::Result<String> {
    let len: i64 = at_most(file.metadata()?.len());
    file.seek(io::SeekFrom::End(-len.min(ERROR_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_gets_its_input_and_gives_its_output() {
        let input = vec![b'x'; 1 << 20];
        let finished = run_to_end("wc", &mut shell("wc -c"), &input, Duration::from_secs(10));
        let finished = finished.expect("wc runs");
        assert_eq!(String::from_utf8_lossy(&finished.stdout).trim(), "1048576");
    }

    #[test]
    fn a_failure_is_told_with_what_the_program_said() {
        let run = |script, patience| run_to_end("job", &mut shell(script), b"", patience);
        let failed = run("echo no such thing >&2; exit 3", Duration::from_secs(10));
        let message = failed.expect_err("it exits with 3").to_string();
        assert!(message.contains("exit status: 3: no such thing"), "{message}");
        let slow = run("sleep 100", Duration::from_millis(50)).expect_err("it is too slow");
        assert!(slow.to_string().contains("not done after"), "{slow}");
        let missing = run_to_end("x", &mut Command::new("/no/such"), b"", Duration::ZERO);
        assert!(matches!(missing, Err(BenchError::Lacking(_))));
    }

    #[test]
    fn ending_a_program_ends_what_it_started() {
        ends_with_the_program("sleep 1000 & echo $!; wait");
    }

    #[test]
    fn ending_a_program_ends_also_what_has_a_session_of_its_own() {
        ends_with_the_program("setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' & wait");
    }

    /// Checks that the process whose id the script prints ends with the program.
    fn ends_with_the_program(script: &str) {
        let mut command = shell(script);
        let mut running =
            Running::start("parent", command.stdout(Stdio::piped())).expect("sh starts");
        let mut line = String::new();
        let mut stdout = io::BufReader::new(running.stdout().expect("it is piped"));
        io::BufRead::read_line(&mut stdout, &mut line).expect("it says the child's id");
        drop(running);
        // The orphan is reaped by init at some time; until then it is a zombie, which has no
        // memory.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", line.trim()));
        assert!(stat.map_or(true, |s| s.contains(") Z ")), "the child of the child lives");
    }
}
