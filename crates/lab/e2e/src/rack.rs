//! The controller and nodes of one test, as processes.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{PATIENCE, binaries, wait_until};

/// How much of a daemon's log is shown, of its end.
const LOG_SHOWN_BYTES: usize = 4096;
/// The options of a node that shares its processors with its clients and the test itself.
pub const UNHELD: [&str; 2] = ["--busy-rate", "unlimited"];

/// A process that has reported that it is ready. What it logs is shown if the test fails.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: File,
    /// Its ready line.
    pub ready: Value,
    /// The address that it listens on; empty for a node that lends nothing.
    pub address: String,
}

impl Daemon {
    fn start(arguments: &[&str]) -> Daemon {
        Daemon::start_command(Command::new(binaries::program("farpool")), arguments)
    }

    /// Starts it with a command that runs `farpool` elsewhere.
    pub fn start_command(mut command: Command, arguments: &[&str]) -> Daemon {
        let log = tempfile::tempfile().expect("a log");
        let mut child = command
            .args(arguments)
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.try_clone().expect("a log"))
            .spawn()
            .expect("farpool");
        let stdout = child.stdout.take().expect("piped");
        // Wrapped here, before anything can panic, so that the child is always ended.
        let mut daemon = Daemon { child, log, ready: Value::Null, address: String::new() };
        let mut line = String::new();
        let _ = BufReader::new(stdout).read_line(&mut line);
        daemon.ready = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{arguments:?} said {line:?}: {error}"));
        assert_eq!(daemon.ready["event"], "ready", "{line}");
        daemon.address = daemon.ready["listen"][0].as_str().unwrap_or_default().to_owned();
        daemon
    }

    /// A controller that keeps its state in `store`.
    pub fn control(listen: &str, store: &Path) -> Daemon {
        let store = format!("redb:{}", store.display());
        Daemon::start(&["control", "--listen", listen, "--store", &store])
    }

    /// A node that lends this much, however busy the processors are that it shares with the test.
    pub fn node(control: &str, name: &str, donate: &str) -> Daemon {
        let tcp = "tcp://127.0.0.1:0";
        let arguments =
            ["node", "--control", control, "--name", name, "--donate", donate, "--listen", tcp];
        Daemon::start(&[&arguments[..], &UNHELD].concat())
    }

    /// A node whose memory outlives its process; `more` are further options.
    pub fn kept_node(
        control: &str,
        name: &str,
        donate: &str,
        listen: &str,
        memory: &Path,
        more: &[&str],
    ) -> Daemon {
        let mut command = Command::new(binaries::program("farpool"));
        command.args(["node", "--control", control, "--name", name, "--donate", donate]);
        command.args(["--listen", listen, "--persist"]).arg(memory).args(UNHELD);
        Daemon::start_command(command, more)
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it has ended and been waited for.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("it takes the signal");
    }

    /// Waits until it ends. Returns its exit code, or None if a signal killed it.
    pub fn wait(mut self) -> Option<i32> {
        wait_until("the daemon ends", PATIENCE, || self.child.try_wait().expect("a child")).code()
    }

    /// Sends SIGTERM and waits until it ends. Returns whether its exit code is 0.
    pub fn end(self) -> bool {
        self.signal(Signal::TERM);
        self.wait() == Some(0)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let mut text = Vec::new();
            let _ = self.log.rewind().and_then(|()| self.log.read_to_end(&mut text));
            let skipped = text.len().saturating_sub(LOG_SHOWN_BYTES);
            println!("log of {}: {}", self.ready, String::from_utf8_lossy(&text[skipped..]));
        }
    }
}

/// Runs a `farpool` command against the controller.
pub fn ask(control: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(binaries::program("farpool"));
    command.args(arguments).args(["--control", control, "--json"]).stdin(Stdio::null());
    command.output().expect("farpool")
}

/// Runs a `farpool` command against the controller. Returns its JSON output, or null if that is not
/// JSON.
///
/// # Panics
/// If the command fails.
pub fn answer(control: &str, arguments: &[&str]) -> Value {
    let output = ask(control, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}
