//! Where a program's memory is while it runs, and the command that puts it there.

use super::lacking;
use super::process::{Finished, RunToEnd, Running, run_to_end, run_undisturbed};
use super::swap::Swap;
use crate::BenchError;
use farpool_hosts::Cgroup;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A blade has this many times what a program needs, so that it is never full.
const BLADE_FACTOR: u64 = 3;
/// Swap has this many times what a program needs: below half full, the kernel also keeps the copies
/// of pages that are back in memory, and writes nothing when they leave again unchanged.
const SWAP_FACTOR: u64 = 2;

/// Where a program's memory is. Limits are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// All local, without Farpool.
    Local,
    /// Under Farpool with its own blade on this machine (shared memory).
    Shm(u64),
    /// Under Farpool with a blade over TCP loopback.
    Tcp(u64),
    /// Under a memory limit of the kernel's, with a swap file on this machine's disk.
    Disk(u64),
    /// Under a memory limit of the kernel's, with swap in compressed memory.
    Zram(u64),
}

/// How `farpool run` gets its pager into a program.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Door {
    /// A preloaded library, which is assumed for reports of older versions.
    #[default]
    Preload,
    /// A sidecar.
    Sidecar,
}

impl Door {
    /// Returns the door that this binary's `farpool run` uses here by default.
    #[must_use]
    pub fn usual(farpool: &Path) -> Self {
        let doctor = Command::new(farpool).args(["doctor", "--json"]).stdin(Stdio::null()).output();
        let report = doctor.map(|doctor| serde_json::from_slice(&doctor.stdout));
        let report: serde_json::Value = report.ok().and_then(Result::ok).unwrap_or_default();
        let checks = report["checks"].as_array().map_or(&[][..], Vec::as_slice);
        let door = checks.iter().find(|check| check["name"] == "door");
        match door {
            Some(check) if check["status"] == "ok" => Self::Sidecar,
            _ => Self::Preload,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Preload => "preload",
            Self::Sidecar => "sidecar",
        }
    }
}

/// Settings that every run of a program needs.
#[derive(Debug, Clone)]
pub struct Stage {
    /// The farpool binary.
    pub farpool: PathBuf,
    /// Folder on a disk, for swap files and whatever a program needs.
    pub folder: PathBuf,
    /// Longest time that any program may take.
    pub patience: Duration,
    /// How Farpool gets into the program.
    pub door: Door,
}

/// A command that starts a program in its place, with what has to outlive the program.
#[derive(Debug)]
pub struct Launch {
    /// The command, to be started with [`Running::start`] or directly.
    pub command: Command,
    // Fields in the order in which they have to be dropped.
    group: Option<Cgroup>,
    swap: Option<Swap>,
    _blade: Option<Blade>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, limit_bytes) = match *self {
            Self::Local => return f.write_str("all local"),
            Self::Shm(limit) => ("farpool, shm", limit),
            Self::Tcp(limit) => ("farpool, TCP", limit),
            Self::Disk(limit) => ("swap to disk", limit),
            Self::Zram(limit) => ("swap to zram", limit),
        };
        write!(f, "{what}, {} local", farpool_units::about_bytes(limit_bytes as f64))
    }
}

impl Place {
    /// Whether the kernel swaps there: that it cannot run a program is a result, too.
    #[must_use]
    pub fn is_swap(self) -> bool {
        matches!(self, Self::Disk(_) | Self::Zram(_))
    }

    /// Whether the program runs under Farpool.
    #[must_use]
    pub fn is_far(self) -> bool {
        matches!(self, Self::Shm(_) | Self::Tcp(_))
    }
}

impl Launch {
    /// Returns the most local memory in bytes that zram has taken for swapped pages. Returns None
    /// without zram.
    #[must_use]
    pub fn zram_bytes(&self) -> Option<u64> {
        self.swap.as_ref().and_then(Swap::memory_bytes)
    }

    /// Turns the error into [`BenchError::OutOfMemory`] if the kernel has killed a program of the
    /// group.
    #[must_use]
    pub fn explained(&self, error: BenchError) -> BenchError {
        let has_killed = || self.group.as_ref().is_some_and(Cgroup::has_killed);
        match error {
            BenchError::Killed { program } | BenchError::Program { program, .. }
                if has_killed() =>
            {
                BenchError::OutOfMemory { program }
            }
            error => error,
        }
    }

    fn of(command: Command) -> Self {
        Self { command, group: None, swap: None, _blade: None }
    }
}

impl Stage {
    /// Sets the place up for a program that needs about `need_bytes` in all.
    ///
    /// # Errors
    /// This machine lacks what the place needs, or does not permit it.
    pub fn launch(
        &self,
        place: Place,
        program: &[OsString],
        need_bytes: u64,
    ) -> Result<Launch, BenchError> {
        let swap_bytes = need_bytes.saturating_mul(SWAP_FACTOR);
        match place {
            Place::Local => Ok(Launch::of(command(program))),
            Place::Shm(limit_bytes) => Ok(self.far(program, limit_bytes, None)),
            Place::Tcp(limit_bytes) => {
                let blade = Blade::start(&self.farpool, need_bytes.saturating_mul(BLADE_FACTOR))?;
                Ok(self.far(program, limit_bytes, Some(blade)))
            }
            Place::Disk(limit_bytes) => {
                grouped(program, limit_bytes, Swap::file(&self.folder, swap_bytes)?)
            }
            Place::Zram(limit_bytes) => {
                grouped(program, limit_bytes, Swap::zram(&self.folder, swap_bytes)?)
            }
        }
    }

    /// Runs a program to its end in its place.
    pub(crate) fn run(
        &self,
        place: Place,
        program: &[OsString],
        input: &[u8],
        need_bytes: u64,
    ) -> Result<Finished, BenchError> {
        self.run_by(run_to_end, place, program, input, need_bytes)
    }

    /// The same, without samples of its memory.
    pub(crate) fn run_undisturbed(
        &self,
        place: Place,
        program: &[OsString],
        need_bytes: u64,
    ) -> Result<Finished, BenchError> {
        self.run_by(run_undisturbed, place, program, b"", need_bytes)
    }

    fn run_by(
        &self,
        run: RunToEnd,
        place: Place,
        program: &[OsString],
        input: &[u8],
        need_bytes: u64,
    ) -> Result<Finished, BenchError> {
        let mut launch = self.launch(place, program, need_bytes)?;
        let name =
            program.first().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        let name = format!("{name} ({place})");
        let finished = run(&name, &mut launch.command, input, self.patience);
        finished.map_err(|error| launch.explained(error))
    }

    /// Returns the file with the statistics of the last run under Farpool.
    #[must_use]
    pub fn stats_file(&self) -> PathBuf {
        self.folder.join("stats.json")
    }

    fn far(&self, program: &[OsString], limit_bytes: u64, blade: Option<Blade>) -> Launch {
        let stats = self.stats_file();
        // A file of the last run must not pass for this one's.
        let _ = std::fs::remove_file(&stats);
        let mut command = Command::new(&self.farpool);
        command.args(["run", "--quiet", "--door", self.door.as_str()]);
        command.args(["--local", &limit_bytes.to_string()]);
        command.arg("--stats").arg(&stats);
        if let Some(blade) = &blade {
            command.args(["--blade", &blade.address]);
        }
        command.arg("--").args(program);
        Launch { _blade: blade, ..Launch::of(command) }
    }
}

fn command(program: &[OsString]) -> Command {
    let mut words = program.iter();
    let mut command = Command::new(words.next().cloned().unwrap_or_default());
    command.args(words);
    command
}

/// Returns a command whose shell joins the group first and then becomes the program, so that no
/// page escapes the limit.
fn grouped(program: &[OsString], limit_bytes: u64, swap: Swap) -> Result<Launch, BenchError> {
    let group = Cgroup::with_limit(&super::own_name(), limit_bytes)
        .map_err(|error| lacking(error.to_string()))?;
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
    command.arg(group.members_file()).args(program);
    Ok(Launch { group: Some(group), swap: Some(swap), ..Launch::of(command) })
}

/// A blade process on a loopback TCP port of the kernel's choice; ended when dropped.
#[derive(Debug)]
pub(crate) struct Blade {
    /// Where it listens, as in `tcp://127.0.0.1:40001`.
    pub address: String,
    _running: Running,
}

impl Blade {
    /// Starts a blade and waits until it reports that it is ready.
    pub(crate) fn start(farpool: &Path, memory_bytes: u64) -> Result<Self, BenchError> {
        let mut command = Command::new(farpool);
        command.args(["blade", "--json", "--listen", "tcp://127.0.0.1:0", "--memory"]);
        command.arg(memory_bytes.next_multiple_of(16 << 20).to_string());
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut running = Running::start("farpool blade", command)?;
        let mut line = String::new();
        if let Some(stdout) = running.stdout() {
            let read = BufReader::new(stdout).read_line(&mut line);
            read.map_err(BenchError::os("wait for the blade"))?;
        }
        let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        match ready["listen"][0].as_str() {
            Some(address) => Ok(Self { address: address.to_owned(), _running: running }),
            None => {
                running.wait(Duration::from_secs(2))?;
                Err(lacking(format!("the blade says {:?} and is not ready", line.trim())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(folder: &Path) -> Stage {
        Stage {
            farpool: PathBuf::from("farpool"),
            folder: folder.to_owned(),
            patience: Duration::from_secs(60),
            door: Door::default(),
        }
    }

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn a_far_program_is_run_by_farpool_with_its_limit() {
        let stage = stage(Path::new("/var/tmp"));
        let launch = stage.launch(Place::Shm(1 << 20), &words(&["prog", "arg"]), 1 << 30);
        let launch = launch.expect("nothing is started yet");
        let args: Vec<_> = launch.command.get_args().map(|a| a.to_string_lossy()).collect();
        let expected = ["run", "--quiet", "--door", "preload", "--local", "1048576", "--stats"];
        assert_eq!(args[..7], expected);
        assert_eq!(args[8..], ["--", "prog", "arg"]);
    }

    /// Makes a real swap file and control group, where the machine lets us.
    #[test]
    fn a_program_under_kernel_swap_keeps_its_data_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder on a disk");
        let script = "a=$(head -c 24000000 /dev/zero | tr '\\0' x); echo ${#a}";
        for place in [Place::Disk(12 << 20), Place::Zram(12 << 20)] {
            let stage = stage(folder.path());
            match stage.run(place, &words(&["sh", "-c", script]), b"", 100 << 20) {
                Ok(done) => assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "24000000"),
                Err(BenchError::Lacking(reason)) => eprintln!("skipped {place:?}: {reason}"),
                Err(error) => panic!("{place:?}: {error}"),
            }
            let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
            assert!(!swaps.contains(&folder.path().display().to_string()), "{swaps}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).map_or(9, Iterator::count), 0);
    }
}
