//! A `farpool blade` for one test.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::{binaries, tree};

/// How programs reach the blade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Shm,
    Unix,
    Tcp,
}

/// A blade process with a directory of its own.
#[derive(Debug)]
pub struct Blade {
    child: Child,
    socket: PathBuf,
    tcp: String,
    directory: tempfile::TempDir,
    memory: String,
    options: Vec<String>,
}

/// Memory that outlives a blade's process is a file here.
const IN_MEMORY: &str = "/dev/shm";
const TAKEOVER: &str = "--takeover";

impl Blade {
    /// Starts a blade with this much memory (`512MiB`) that listens on a unix socket and on a
    /// loopback port.
    pub fn start(memory: &str) -> Blade {
        Blade::start_with(memory, &[])
    }

    /// Like [`Blade::start`], with further options.
    pub fn start_with(memory: &str, options: &[&str]) -> Blade {
        let command = Command::new(binaries::program("farpool"));
        Blade::start_command(command, memory, "tcp://127.0.0.1:0", options)
    }

    /// Starts a blade whose memory outlives its process; see [`Blade::restart`].
    pub fn start_persistent(memory: &str) -> Blade {
        let directory = tempfile::tempdir_in(IN_MEMORY).expect("a directory in memory");
        let file = directory.path().join("memory");
        let options = ["--persist".to_owned(), format!("--backing=file:{}", file.display())];
        let farpool = Command::new(binaries::program("farpool"));
        Blade::spawn(farpool, directory, memory, "tcp://127.0.0.1:0", options.into())
    }

    /// Like [`Blade::start_with`], by a command that runs `farpool` elsewhere, listening on `tcp`.
    pub fn start_command(command: Command, memory: &str, tcp: &str, options: &[&str]) -> Blade {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        Blade::spawn(command, directory, memory, tcp, options)
    }

    fn spawn(
        mut command: Command,
        directory: tempfile::TempDir,
        memory: &str,
        tcp: &str,
        options: Vec<String>,
    ) -> Blade {
        let socket = directory.path().join("blade.sock");
        let listen = format!("unix://{}", socket.display());
        command.args(["blade", "--json", "--memory", memory, "--listen", &listen, "--listen", tcp]);
        let mut child = command
            .args(&options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("farpool blade");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        let _ = BufReader::new(stdout).read_line(&mut line);
        let address = line.split('"').find(|word| word.starts_with("tcp://"));
        let tcp = address.unwrap_or_else(|| panic!("the blade said {line:?}")).to_owned();
        Blade { child, socket, tcp, directory, memory: memory.to_owned(), options }
    }

    /// Ends the blade's process by a signal, and starts another one at the same addresses with the
    /// same memory and options.
    pub fn restart(&mut self, signal: i32) {
        tree::signal(self.pid(), signal);
        let _ = self.child.wait();
        let directory = std::mem::replace(&mut self.directory, spare_directory());
        let farpool = Command::new(binaries::program("farpool"));
        let options = self.options.clone();
        *self = Blade::spawn(farpool, directory, &self.memory, &self.tcp, options);
    }

    /// Starts another process that takes the blade over while it serves. Returns the exit code of
    /// the one before.
    pub fn take_over(&mut self) -> Option<i32> {
        let directory = std::mem::replace(&mut self.directory, spare_directory());
        let farpool = Command::new(binaries::program("farpool"));
        let options = [&self.options[..], &[TAKEOVER.to_owned()]].concat();
        let mut next = Blade::spawn(farpool, directory, &self.memory, &self.tcp, options);
        next.options.retain(|option| option != TAKEOVER);
        let mut before = std::mem::replace(self, next);
        before.child.wait().expect("a child").code()
    }

    /// The file that has its memory, if it is a [persistent](Blade::start_persistent) one.
    pub fn memory_file(&self) -> PathBuf {
        self.directory.path().join("memory")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its address for a program.
    pub fn address(&self, transport: Transport) -> String {
        match transport {
            Transport::Shm => format!("shm://{}", self.socket.display()),
            Transport::Unix => format!("unix://{}", self.socket.display()),
            Transport::Tcp => self.tcp.clone(),
        }
    }

    /// IP and port.
    pub fn tcp(&self) -> &str {
        self.tcp.trim_start_matches("tcp://")
    }

    /// Kills the blade with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts another blade in its stead, at the same addresses; this one ends if it has not.
    pub fn start_again(&mut self, memory: &str) {
        self.kill();
        let command = Command::new(binaries::program("farpool"));
        let tcp = self.address(Transport::Tcp);
        *self = Blade::start_command(command, memory, &tcp, &[]);
    }

    /// Pauses the blade (SIGSTOP) or resumes it (SIGCONT).
    pub fn pause(&self, paused: bool) {
        tree::signal(self.pid(), if paused { libc::SIGSTOP } else { libc::SIGCONT });
    }

    /// The output of `farpool stat --json` for this blade.
    pub fn stat(&self) -> serde_json::Value {
        let output = Command::new(binaries::program("farpool"))
            .args(["stat", "--json", "--blade", &self.address(Transport::Unix)])
            .output()
            .expect("farpool stat");
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

fn spare_directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

impl Drop for Blade {
    fn drop(&mut self) {
        tree::end(self.child.id());
        let _ = self.child.wait();
    }
}
