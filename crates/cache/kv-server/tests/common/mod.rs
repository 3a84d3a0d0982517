//! Servers for tests: ours, in this process, and the real memcached; their guards end both.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod talk;

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farpool_kv_server::{Compat, Server, ServerError, Settings, Shared};
use tempfile::TempDir;

/// How long a condition may take to become true before the test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Waits until `condition` gives a value.
///
/// # Panics
/// When it has given none within [`PATIENCE`].
pub(crate) fn wait_until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    farpool_testkit::wait_for(what, PATIENCE, condition)
}

/// Our server in this process, on a Unix socket or on TCP.
#[derive(Debug)]
pub(crate) struct Ours {
    pub shared: Arc<Shared>,
    pub socket: PathBuf,
    pub addresses: Vec<SocketAddr>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    _directory: TempDir,
}

impl Ours {
    /// Starts it on a Unix socket of its own; `settings` need no address.
    pub(crate) fn local(settings: Settings) -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("ours");
        Self::start(Settings { socket_path: Some(socket.clone()), ..settings }, directory, socket)
    }

    /// Starts it on a TCP port of its own.
    pub(crate) fn tcp(settings: Settings) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::start(Settings { addresses: vec![address], ..settings }, directory, PathBuf::new())
    }

    fn start(settings: Settings, directory: TempDir, socket: PathBuf) -> Self {
        let server = Server::bind(settings, unix_s()).expect("the server starts");
        let (shared, addresses) = (server.shared(), server.addresses().to_vec());
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { shared, socket, addresses, thread, _directory: directory }
    }

    /// Connects a new client.
    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).expect("the server listens")
    }

    /// Connects a new client over TCP.
    pub(crate) fn connect_tcp(&self) -> std::net::TcpStream {
        let stream = std::net::TcpStream::connect(self.addresses[0]).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        stream
    }

    /// Waits until the server ends, for a reason outside this call.
    pub(crate) fn ended(mut self) -> Result<(), ServerError> {
        self.thread.take().expect("it runs").join().expect("the server does not panic")
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.shared.ask_to_stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server panicked");
        }
    }
}

/// The present Unix time.
pub(crate) fn unix_s() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    i64::try_from(now.as_secs()).expect("the clock is right")
}

/// A real memcached on a Unix socket of its own.
#[derive(Debug)]
pub(crate) struct Memcached {
    child: Child,
    pub socket: PathBuf,
    _directory: TempDir,
}

/// Names a memcached of version 1.6.30 or later, whose answers are those of 1.6.45.
const NEW_MEMCACHED: &str = "FARPOOL_MEMCACHED_NEW";

impl Memcached {
    /// Whether a memcached of version 1.6.18 is installed. If not, says so.
    pub(crate) fn is_there() -> bool {
        Self::is_there_for(Compat::V1_6_18)
    }

    /// The versions for which there is a memcached. Says so for those for which there is none.
    pub(crate) fn versions() -> Vec<Compat> {
        Compat::ALL.into_iter().filter(|&compat| Self::is_there_for(compat)).collect()
    }

    fn program(compat: Compat) -> Option<PathBuf> {
        match compat {
            Compat::V1_6_18 => Some("memcached".into()),
            Compat::V1_6_45 => std::env::var_os(NEW_MEMCACHED).map(PathBuf::from),
        }
    }

    fn is_there_for(compat: Compat) -> bool {
        let output = Self::program(compat).and_then(|it| Command::new(it).arg("-V").output().ok());
        let told = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let found = told.as_deref().and_then(|told| told.strip_prefix("memcached "));
        let patch = found.and_then(|it| it.strip_prefix("1.6.")?.parse::<u32>().ok());
        let (is_there, how) = match compat {
            Compat::V1_6_18 => (patch == Some(18), "apt-get install memcached".to_owned()),
            Compat::V1_6_45 => (patch >= Some(30), format!("{NEW_MEMCACHED}=path/to/memcached")),
        };
        if !is_there {
            let (wanted, found) = (compat.version(), found.unwrap_or("none"));
            println!("SKIPPED: memcached {wanted} is wanted, found {found} ({how})");
        }
        is_there
    }

    /// Starts 1.6.18 with one thread and without UDP.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_for(Compat::V1_6_18, flags)
    }

    /// The same with the memcached for a version.
    pub(crate) fn start_for(compat: Compat, flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let socket = directory.path().join("theirs");
        let user = if rustix::process::geteuid().is_root() { &["-u", "root"][..] } else { &[] };
        let child = Command::new(Self::program(compat).expect("it is there"))
            .args(["-U", "0", "-t", "1", "-s"])
            .arg(&socket)
            .args(user)
            .args(flags)
            .stdin(Stdio::null())
            // `verbosity` makes it print.
            .stderr(Stdio::null())
            .spawn()
            .expect("memcached starts");
        let memcached = Self { child, socket, _directory: directory };
        wait_until("memcached listens", || UnixStream::connect(&memcached.socket).ok());
        memcached
    }

    /// Connects a new client.
    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).expect("memcached listens")
    }

    /// Whether all its threads sleep, so that no request is in progress; or it has ended.
    pub(crate) fn is_idle(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return true;
        };
        threads.flatten().all(|thread| {
            // A thread that has ended meanwhile is idle, too.
            let text = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            text.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['S', 'Z']))
        })
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        // It only has to end; it may have done so already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The resident memory of a process in bytes.
pub(crate) fn resident_bytes(pid: u32) -> usize {
    let path = Path::new("/proc").join(pid.to_string()).join("statm");
    let text = std::fs::read_to_string(path).expect("the process lives");
    let pages: usize = text.split(' ').nth(1).and_then(|it| it.parse().ok()).expect("statm's form");
    pages * rustix::param::page_size()
}
