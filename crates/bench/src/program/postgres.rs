//! PostgreSQL (unmodified) with 20 connections that sort and aggregate at the same time: a tree of
//! processes that fork, held to one limit.
//!
//! The server refuses to run as root; it is started as the user "postgres" or "nobody" then.

use crate::BenchError;
use crate::stage::{Peak, Place, Running, Stage, lacking, run_to_end};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 20;
/// Memory a sort of one connection may take before it goes to files.
const WORK_MEM: &str = "work_mem=64MB";
/// Where Debian keeps programs that are not in PATH.
const DEBIAN_FOLDERS: &str = "/usr/lib/postgresql";

/// Most memory the server's processes held while all connections worked.
pub(crate) fn postgres_peak_bytes(
    stage: &Stage,
    place: Place,
    need_bytes: u64,
    scale: u64,
) -> Result<u64, BenchError> {
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
    let mut running = Running::start("postgres", command)?;
    let peak = Peak::watch(running.id());
    let asked = programs.ask_all(&mut running, &as_user, &data, stage.patience, scale);
    running.end();
    asked.map(|()| peak.stop())
}

/// Folder with initdb, postgres and psql.
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
        // The distribution's own folder first: what stands in PATH may be wrappers.
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

    fn ask_all(
        &self,
        server: &mut Running,
        as_user: &[OsString],
        data: &Path,
        patience: Duration,
        scale: u64,
    ) -> Result<(), BenchError> {
        let psql = |sql: &str| {
            let mut words = as_user.to_vec();
            words.extend([self.file("psql"), "-h".into(), data.into()]);
            words.extend(["-U", "postgres", "-qAt", "-c", sql].map(OsString::from));
            let mut command = command(&words);
            command.current_dir(data).stdin(Stdio::null()).stdout(Stdio::null());
            command
        };
        let deadline = Instant::now() + patience;
        while run_to_end("psql", &mut psql("SELECT 1"), b"", patience).is_err() {
            server.check_alive()?;
            if Instant::now() > deadline {
                return Err(lacking("PostgreSQL did not become ready"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let rows = 200_000 / scale;
        let sql = format!(
            "SELECT count(*), max(x) FROM (SELECT md5(i::text) x FROM generate_series(1,{rows}) i \
             ORDER BY 1 OFFSET 0) t"
        );
        let start = |_| Running::start("psql", &mut psql(&sql));
        let clients: Result<Vec<_>, _> = (0..CONNECTIONS).map(start).collect();
        clients?.iter_mut().try_for_each(|client| client.wait(patience))
    }
}

fn command(words: &[OsString]) -> Command {
    let mut command = Command::new(words.first().cloned().unwrap_or_default());
    command.args(words.iter().skip(1));
    command
}

/// Words to put before a command so that it runs unprivileged; gives that user the folder.
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
    let mut words = ["setpriv", "--reuid", user, "--clear-groups"].map(OsString::from).to_vec();
    words
        .extend(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace"].map(OsString::from));
    words.push("--".into());
    Ok(words)
}
