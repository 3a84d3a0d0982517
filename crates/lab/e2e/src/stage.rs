//! A rack on hosts of its own: a controller on one of them, protected by a token, and nodes and
//! programs on any.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

use farpool_hosts::Hosts;
use serde_json::Value;
use tempfile::TempDir;

use crate::rack::{Daemon, UNHELD};
use crate::run::{Run, Running};
use crate::{binaries, wait_until};

/// How long to wait for a condition: separate hosts are slower than processes on one host, and a
/// machine under load is slower still.
pub const PATIENCE: Duration = Duration::from_secs(90);
const CONTROL_PORT: u16 = 7080;
const BLADE_PORT: u16 = 7070;
const TOKEN: &str = "a-token-of-this-test";

/// The hosts and their controller. Anything else that runs on them must be dropped before.
#[derive(Debug)]
pub struct Stage {
    control: Option<Daemon>,
    at: usize,
    folder: TempDir,
    hosts: Hosts,
}

impl Stage {
    /// Prepares the hosts; the controller will be on host `at`.
    pub fn new(hosts: Hosts, at: usize) -> Stage {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join("token"), TOKEN).expect("token");
        Stage { control: None, at, folder, hosts }
    }

    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// A directory for the test's files.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// The controller's URL, also before it is started.
    pub fn url(&self) -> String {
        format!("http://{}:{CONTROL_PORT}", self.hosts[self.at].address())
    }

    /// Starts or restarts the controller.
    pub fn start_control(&mut self, more: &[&str]) {
        let listen = format!("{}:{CONTROL_PORT}", self.hosts[self.at].address());
        let store = format!("redb:{}", self.folder().join("control.redb").display());
        let words = ["control", "--listen", &listen, "--store", &store];
        let command = self.command(self.at, &[&words, more].concat());
        self.control = Some(Daemon::start_command(command, &[]));
    }

    /// Kills the controller with SIGKILL.
    pub fn kill_control(&mut self) {
        self.control = None;
    }

    /// A `farpool` command on a host, with the token, in the clear.
    pub fn command(&self, host: usize, arguments: &[&str]) -> Command {
        let mut command = self.hosts[host].command(binaries::program("farpool"));
        command
            .args(arguments)
            .arg("--insecure")
            .arg("--token-file")
            .arg(self.folder().join("token"));
        command
    }

    /// Starts a node on a host that lends this much at one of the host's addresses. Returns when
    /// all of it is offered.
    pub fn node(&self, host: usize, address: Ipv4Addr, donate: &str) -> Daemon {
        let node = self.start_node(host, address, donate);
        self.wait_until_offered(host);
        node
    }

    /// The same on several hosts at once, at the first address of each.
    pub fn nodes(&self, hosts: Range<usize>, donate: &str) -> Vec<Daemon> {
        let start = |host: usize| self.start_node(host, self.hosts[host].address(), donate);
        let nodes = hosts.clone().map(start).collect();
        hosts.for_each(|host| self.wait_until_offered(host));
        nodes
    }

    fn start_node(&self, host: usize, address: Ipv4Addr, donate: &str) -> Daemon {
        let (url, name) = (self.url(), self.hosts[host].name());
        let listen = format!("tcp://{address}:{BLADE_PORT}");
        let words = ["node", "--control", &url, "--name", name, "--donate", donate];
        let more = ["--listen", &listen, "--allow-remote-tcp", "--drain-timeout", "100ms"];
        Daemon::start_command(self.command(host, &[&words[..], &more, &UNHELD].concat()), &[])
    }

    fn wait_until_offered(&self, host: usize) {
        wait_until("the node offers all it donates", PATIENCE, || {
            let node = self.ask(&["node", "show", self.hosts[host].name()]);
            let (lendable, donated) = (&node["lendable_bytes"], &node["donate_bytes"]);
            (lendable.is_u64() && lendable == donated).then_some(())
        });
    }

    /// Runs a `farpool` command against the controller, on the controller's host. Returns its JSON
    /// output.
    ///
    /// # Panics
    /// If the command fails.
    pub fn ask(&self, arguments: &[&str]) -> Value {
        let control = ["--control", &self.url(), "--json"];
        let mut command = self.command(self.at, &[arguments, &control].concat());
        let output = command.stdin(Stdio::null()).output().expect("farpool");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The controller's events, oldest first.
    ///
    /// # Panics
    /// If the command fails.
    pub fn events(&self) -> Vec<Value> {
        let words = ["events", "--control", &self.url(), "--json"];
        let output = self.command(self.at, &words).stdin(Stdio::null()).output().expect("farpool");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
    }

    /// All segments.
    pub fn segments(&self) -> Vec<Value> {
        self.ask(&["segment", "list"])["segments"].as_array().cloned().expect("a list")
    }

    /// Node and state of every segment, sorted.
    pub fn places(&self) -> Vec<(String, String)> {
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let segments = self.segments();
        let places = segments.iter().map(|it| (word(&it["place"]["node"]), word(&it["state"])));
        let mut places: Vec<_> = places.collect();
        places.sort_unstable();
        places
    }

    /// Starts a node that lends nothing. Without a topology the rack knows a host by its node.
    pub fn borrower(&self, host: usize) -> Daemon {
        let (url, name) = (self.url(), self.hosts[host].name());
        let words = ["node", "--control", &url, "--name", name];
        Daemon::start_command(self.command(host, &words), &[])
    }

    /// Ends the programs normally, as if their time were over.
    pub fn end_programs(&self) {
        std::fs::write(self.over(), "").expect("a file");
    }

    fn over(&self) -> std::path::PathBuf {
        self.folder().join("over")
    }

    /// Starts a program on a host that checks every page it reads. It has 96 MiB and more, of which
    /// 24 MiB are local.
    pub fn program(&self, host: usize, seconds: &str) -> Running {
        self.program_with(host, seconds, &["--quota", "256MiB"])
    }

    /// The same with further options of `farpool run`.
    pub fn program_with(&self, host: usize, seconds: &str, options: &[&str]) -> Running {
        let directory = tempfile::tempdir().expect("directory");
        let stats = directory.path().join("stats.json");
        let (url, name) = (self.url(), self.hosts[host].name());
        let words = ["run", "--local", "24MiB", "--pool", &url, "--host", name];
        let mut command =
            self.command(host, &[&words[..], &["--allow-remote-tcp"], options].concat());
        command.arg("--stats").arg(&stats);
        Run::with(command, Some(stats), Some(directory))
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", "2", "--progress", "--seconds", seconds])
            .args(["--seed", "3", "--ops", "discard,pipe,heap,file", "--until"])
            .args([self.over()])
            .patience(Duration::from_secs(300))
            .start()
    }
}
