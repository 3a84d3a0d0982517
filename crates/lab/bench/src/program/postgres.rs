//! PostgreSQL (unmodified) with 20 connections that sort and aggregate at the same time: a tree of
//! processes that fork, held to one limit.
//!
//! The server refuses to run as root. If this process is root, the server is started as the user
//! "postgres" or "nobody".

use super::Held;
use crate::BenchError;
use crate::stage::{Peak, Place, Running, Stage, lacking, run_to_end};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 20;
/// Memory a sort of one connection may take before it goes to files.
const WORK_MEM: &str = "work_mem=64MB";
/// The folder in which Debian keeps programs that are not in PATH.
const DEBIAN_FOLDERS: &str = "/usr/lib/postgresql";

/// Runs the server until all connections are answered. Returns the most memory that its processes
/// held, and the answer.
pub(crate) fn postgres_held(
    stage: &Stage,
    place: Place,
    need_bytes: u64,
    scale: u64,
) -> Result<Held, BenchError> {
    let programs = Programs::find()?;
    let data = stage.folder.join("postgres");
    let _ = std::fs::remove_dir_all(&data);
    std::fs::create_dir_all(&data).map_err(BenchError::os("make a folder for PostgreSQL"))?;
    let as_user = unprivileged(&data)?;
    programs.initialise(&as_user, &data, stage.patience)?;
    let mut server = as_user.clone();
    server.extend([programs.file("postgres"), "-D".into(), data.clone().into()]);
    server.extend(["-k".into(), data.clone().into()]);
    server
        .extend(["-c", "listen_addresses=", "-c", WORK_MEM, "-c", "fsync=off"].map(OsString::from));
    server.extend(["-c", "max_parallel_workers_per_gather=0"].map(OsString::from));
    let mut launch = stage.launch(place, &server, need_bytes)?;
    let command = launch.command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir(&data);
    let mut running = Running::start(&format!("postgres ({place})"), command)?;
    let peak = Peak::watch(running.id());
    let clients = Clients { programs, as_user, data, scale };
    let asked = clients.ask_all(&mut running, stage.patience);
    let peak_bytes = peak.stop();
    running.end();
    match asked {
        Ok(checksum) => Ok(Held { peak_bytes, checksum }),
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(error) => Err(explained(error, place, peak_bytes, running.farpool_said())),
    }
}

/// Returns the error of a failure of server or clients with the memory held until then. If Farpool
/// gave a reason, it replaces what a client reported.
fn explained(
    error: BenchError,
    place: Place,
    peak_bytes: u64,
    farpool_said: Option<String>,
) -> BenchError {
    let program = format!("postgres ({place})");
    let most = format!(
        "; until then its processes held {}",
        farpool_units::about_bytes(peak_bytes as f64)
    );
    match error {
        BenchError::Program { detail, .. } => {
            BenchError::Program { program, detail: farpool_said.unwrap_or(detail) + &most }
        }
        error @ BenchError::TooSlow { .. } => {
            BenchError::Program { program, detail: error.to_string() + &most }
        }
        error => error,
    }
}

/// The folder with initdb, postgres and, usually, psql.
struct Programs {
    folder: PathBuf,
}

impl Programs {
    fn find() -> Result<Self, BenchError> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let debian = std::fs::read_dir(DEBIAN_FOLDERS).into_iter().flatten().flatten();
        let debian = debian.map(|entry| entry.path().join("bin"));
        let has_all =
            |folder: &PathBuf| ["initdb", "postgres"].iter().all(|name| folder.join(name).exists());
        // The distribution's own folder comes first: programs in PATH may be wrappers.
        let found = debian.chain(std::env::split_paths(&path)).find(has_all);
        let missing = || lacking("PostgreSQL is not installed (apt install postgresql)");
        found.map(|folder| Self { folder }).ok_or_else(missing)
    }

    fn file(&self, name: &str) -> OsString {
        let path = self.folder.join(name);
        if path.exists() { path.into() } else { name.into() }
    }

    fn initialise(
        &self,
        as_user: &[OsString],
        data: &Path,
        patience: Duration,
    ) -> Result<(), BenchError> {
        let mut words = as_user.to_vec();
        words.extend([self.file("initdb"), "-D".into(), data.into()]);
        words.extend(["-U", "postgres", "-A", "trust", "--no-sync"].map(OsString::from));
        let command = &mut command(&words);
        run_to_end("initdb", command.current_dir(data), b"", patience).map(drop)
    }
}

/// The clients of a running server.
struct Clients {
    programs: Programs,
    as_user: Vec<OsString>,
    data: PathBuf,
    scale: u64,
}

impl Clients {
    /// Runs the query on all connections. Returns the answer, which has to be the same on each.
    /// Errors if this takes longer than `patience`.
    fn ask_all(&self, server: &mut Running, patience: Duration) -> Result<String, BenchError> {
        let deadline = Instant::now() + patience;
        while run_to_end("psql", &mut self.psql("SELECT 1"), b"", left(deadline)).is_err() {
            server.check_alive()?;
            if Instant::now() > deadline {
                let (program, seconds) = ("its start".to_owned(), patience.as_secs_f64());
                return Err(BenchError::TooSlow { program, seconds });
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let rows = 200_000 / self.scale.min(2);
        let sql = format!(
            "SELECT count(*), max(x) FROM (SELECT md5(i::text) x FROM generate_series(1,{rows}) i \
             ORDER BY 1 OFFSET 0) t"
        );
        let start = |_| Running::start("psql", self.psql(&sql).stdout(Stdio::piped()));
        let clients: Result<Vec<_>, _> = (0..CONNECTIONS).map(start).collect();
        let mut clients = clients?;
        for (done, client) in clients.iter_mut().enumerate() {
            match client.wait(left(deadline)) {
                Err(BenchError::TooSlow { .. }) => {
                    let program = format!("connection {} of {CONNECTIONS}", done + 1);
                    return Err(BenchError::TooSlow { program, seconds: patience.as_secs_f64() });
                }
                ended => ended?,
            }
        }
        the_same(&mut clients)
    }

    fn psql(&self, sql: &str) -> Command {
        let mut words = self.as_user.clone();
        words.extend([self.programs.file("psql"), "-h".into(), self.data.clone().into()]);
        words.extend(["-U", "postgres", "-qAt", "-c", sql].map(OsString::from));
        let mut command = command(&words);
        command.current_dir(&self.data).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Returns the one answer that all clients wrote; they have ended. Errors if the answers differ.
fn the_same(clients: &mut [Running]) -> Result<String, BenchError> {
    let mut answers = Vec::new();
    for client in clients {
        let mut answer = String::new();
        if let Some(mut stdout) = client.stdout() {
            let read = stdout.read_to_string(&mut answer);
            read.map_err(BenchError::os("read what psql wrote"))?;
        }
        answers.push(answer);
    }
    answers.dedup();
    match answers.as_slice() {
        [answer] => Ok(answer.trim().to_owned()),
        _ => {
            let detail = format!("its connections answer the same question with {answers:?}");
            Err(BenchError::WrongData { workload: "postgres", detail })
        }
    }
}

fn command(words: &[OsString]) -> Command {
    let mut command = Command::new(words.first().cloned().unwrap_or_default());
    command.args(words.iter().skip(1));
    command
}

/// Gives the folder to an unprivileged user. Returns the words that, before a command, run it as
/// that user. Returns no words if this process is not root.
fn unprivileged(data: &Path) -> Result<Vec<OsString>, BenchError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Vec::new());
    }
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let has = |user: &&str| passwd.lines().any(|line| line.starts_with(&format!("{user}:")));
    let user = ["postgres", "nobody"].into_iter().find(has);
    let user = user.ok_or_else(|| lacking("there is no user to run PostgreSQL as"))?;
    let chown = Command::new("chown").arg("-R").arg(user).arg(data).status();
    chown.map_err(BenchError::os("give a folder to the PostgreSQL user"))?;
    // The folder above is this run's own; others must be able to pass through it.
    let above = data.parent().unwrap_or(data);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    std::fs::set_permissions(above, mode).map_err(BenchError::os("open a folder"))?;
    // One capability is kept: the pager's userfaultfd needs it where /dev/userfaultfd is root's.
    // Groups are kept: setpriv would drop them after it has changed the user, which is then
    // permitted only to its own thread and not to the pager's, and the C library ends a process
    // whose threads differ in the result.
    let mut words = ["setpriv", "--reuid", user, "--keep-groups"].map(OsString::from).to_vec();
    words
        .extend(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace"].map(OsString::from));
    words.push("--".into());
    Ok(words)
}
