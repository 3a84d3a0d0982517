//! A PostgreSQL server that runs as its own user, in a directory that is deleted with the test.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::jobs::scratch;
use crate::{skip, wait_until};

const USER: &str = "postgres";
/// How long to wait for the server's first answer.
const START_TIME: Duration = Duration::from_secs(40);

/// Its files, its tools, and the user and group that it runs as.
#[derive(Debug)]
pub struct Cluster {
    tools: PathBuf,
    directory: tempfile::TempDir,
    pub user: u32,
    pub group: u32,
}

impl Cluster {
    /// Runs initdb. Returns None, and skips the test with the reason, if PostgreSQL is not
    /// installed, or this is not root.
    ///
    /// # Panics
    /// If initdb fails.
    pub fn make() -> Option<Cluster> {
        let Some(tools) = tools() else {
            skip("PostgreSQL is not installed");
            return None;
        };
        let Some((user, group)) = user_ids(USER) else {
            skip("there is no user postgres");
            return None;
        };
        let directory = scratch();
        if std::os::unix::fs::chown(directory.path(), Some(user), Some(group)).is_err() {
            skip("only root can run PostgreSQL as its own user");
            return None;
        }
        let cluster = Cluster { tools, directory, user, group };
        let mut init = Command::new(cluster.tool("initdb"));
        init.args(["-D", &cluster.data(), "-A", "trust", "--no-sync"]).uid(user).gid(group);
        let init = init.current_dir(cluster.path()).output().expect("initdb");
        assert!(init.status.success(), "{}", String::from_utf8_lossy(&init.stderr));
        Some(cluster)
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn tool(&self, name: &str) -> PathBuf {
        self.tools.join(name)
    }

    fn data(&self) -> String {
        self.path().join("data").to_string_lossy().into_owned()
    }

    fn socket(&self) -> String {
        self.path().to_string_lossy().into_owned()
    }

    /// The server's command line: little shared memory, much private memory per connection.
    pub fn server(&self) -> Vec<String> {
        let program = self.tool("postgres").to_string_lossy().into_owned();
        let (data, socket) = (self.data(), self.socket());
        let words = ["-D", &data, "-k", &socket, "-h", "", "-F"];
        let settings = [
            "shared_buffers=16MB",
            "work_mem=64MB",
            "jit=off",
            "max_parallel_workers_per_gather=0",
        ];
        let settings = settings.iter().flat_map(|setting| ["-c", setting]);
        let words = words.into_iter().chain(settings).map(str::to_owned);
        std::iter::once(program).chain(words).collect()
    }

    /// Runs one of its client programs to the end.
    ///
    /// # Panics
    /// If the client fails.
    pub fn client(&self, name: &str, words: &[&str]) -> Output {
        let mut command = Command::new(self.tool(name));
        command.args(["-h", &self.socket(), "-U", USER]).args(words).stdin(Stdio::null());
        let output = command.output().expect(name);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// A psql command that runs one statement.
    pub fn psql(&self, sql: &str) -> Command {
        let mut command = Command::new(self.tool("psql"));
        command.args(["-h", &self.socket(), "-U", USER, "-At", "-c", sql]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Waits until the server answers.
    pub fn await_answer(&self) {
        wait_until("PostgreSQL to answer", START_TIME, || {
            let output = self.psql("select 1").output().ok()?;
            output.status.success().then_some(())
        });
    }

    /// Runs the same sort on `connections` connections at the same time.
    ///
    /// # Panics
    /// If a client fails or the answers differ.
    pub fn sort_with(&self, connections: usize) {
        let query = "select md5(string_agg(m, '')) from (select md5(i::text) m from \
                     generate_series(1, 60000) i order by md5((i * 7)::text)) s";
        let clients: Vec<_> =
            (0..connections).map(|_| self.psql(query).spawn().expect("psql")).collect();
        let answers: Vec<String> = clients
            .into_iter()
            .map(|client| {
                let output = client.wait_with_output().expect("psql");
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8_lossy(&output.stdout).into_owned()
            })
            .collect();
        let is_right = |answer: &String| *answer == answers[0] && answer.len() == 33;
        assert!(answers.iter().all(is_right), "{answers:?}");
    }
}

/// The directory with the tools of the newest installed PostgreSQL.
fn tools() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let tools =
        versions.map(|entry| entry.path().join("bin")).filter(|path| path.join("initdb").exists());
    tools.max()
}

fn user_ids(name: &str) -> Option<(u32, u32)> {
    let text = std::fs::read_to_string("/etc/passwd").ok()?;
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}
