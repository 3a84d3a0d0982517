//! A rack with certificates, by real processes: what docs/operators/security.md tells an operator
//! to type, and what goes wrong without it.

mod common;

use std::path::{Path, PathBuf};

use common::{ended, farpool};
use farpool_e2e::rack::Daemon;
use farpool_e2e::{PATIENCE, wait_until};

/// A home with an authority, and a controller that uses it on all addresses of this machine.
struct Rack {
    home: tempfile::TempDir,
    control: Daemon,
}

impl Rack {
    fn start() -> Self {
        let home = tempfile::tempdir().expect("a folder for the test");
        pki(home.path(), &["init", "--name", "rack1"]);
        let ip = ["--ip", "127.0.0.1", "--ip", "127.0.0.2"];
        let issue = ["issue", "--role", "controller", "--name", "c1"];
        pki(home.path(), &[&issue[..], &ip].concat());
        for name in ["a", "b", "c"] {
            pki(home.path(), &["issue", "--role", "node", "--name", name, "--ip", "127.0.0.1"]);
        }
        pki(home.path(), &["issue", "--role", "program", "--tenant", "payroll"]);
        pki(home.path(), &["issue", "--role", "operator", "--name", "o"]);
        pki(home.path(), &["issue", "--role", "viewer", "--name", "v"]);
        let store = format!("redb:{}", home.path().join("control.redb").display());
        let mut command = farpool(home.path());
        command.args(["control", "--listen", "0.0.0.0:0", "--store", &store, "--pki"]);
        command.arg(folder(home.path(), "controller-c1"));
        let control = Daemon::start_command(command, &[]);
        Self { home, control }
    }

    /// The controller's URL, at an address that its certificate names.
    fn url(&self) -> String {
        self.control.address.replace("0.0.0.0", "127.0.0.2")
    }

    fn folder(&self, label: &str) -> PathBuf {
        folder(self.home.path(), label)
    }

    /// Runs a command with somebody's certificate.
    fn ask(&self, label: &str, words: &[&str]) -> (i32, String, String) {
        let mut command = farpool(self.home.path());
        let command = command.args(words).env("FARPOOL_CONTROL", self.url());
        ended(command.env("FARPOOL_PKI", self.folder(label)))
    }

    /// A node with a certificate, under the name in it.
    fn node(&self, label: &str) -> Daemon {
        let mut command = farpool(self.home.path());
        command.args(["node", "--control", &self.url(), "--donate", "64MiB"]);
        command.args(["--listen", "tcp://127.0.0.1:0", "--pki"]).arg(self.folder(label));
        Daemon::start_command(command, &[])
    }
}

fn folder(home: &Path, label: &str) -> PathBuf {
    home.join("pki").join(label)
}

fn pki(home: &Path, words: &[&str]) {
    let mut command = farpool(home);
    let command = command.arg("pki").args(words).env("FARPOOL_PKI_DIR", home.join("pki"));
    let (code, _, error) = ended(command);
    assert_eq!(code, 0, "{words:?}: {error}");
}

#[test]
fn a_controller_three_nodes_and_a_program_know_each_other_by_certificates() {
    let rack = Rack::start();
    assert!(rack.control.address.starts_with("https://"), "{}", rack.control.address);
    let nodes = ["a", "b", "c"].map(|name| {
        let node = rack.node(&format!("node-{name}"));
        assert_eq!(node.ready["name"], name, "its certificate says its name");
        node
    });
    let (code, text, error) = rack.ask("viewer-v", &["node", "list"]);
    assert_eq!(code, 0, "{error}");
    for name in ["a", "b", "c"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{text}");
    }
    let create = ["segment", "create", "--host", "a", "--size", "16MiB", "--json"];
    let (code, _, error) = rack.ask("viewer-v", &create);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("viewer v may not ask PUT /v1/segments/"), "{error}");
    let (code, _, error) = rack.ask("node-a", &["node", "drain", "b"]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("node a may not ask POST /v1/nodes/b/drain"), "{error}");
    let (code, text, error) = rack.ask("operator-o", &create);
    assert_eq!(code, 0, "{error}");
    let segment: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let id = segment["id"].as_str().expect("an id");
    let (code, _, error) = rack.ask("program-payroll", &["segment", "delete", id]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("tenant payroll") && error.contains(id), "{error}");
    assert_eq!(rack.ask("operator-o", &["segment", "delete", id]).0, 0);
    for node in nodes {
        wait_until("the segment is gone", PATIENCE, || {
            (rack.ask("operator-o", &["segment", "show", id]).0 == 3).then_some(())
        });
        assert!(node.end(), "it signs off");
    }
    assert!(rack.control.end(), "it stops");
}

#[test]
fn a_node_under_another_name_or_without_a_certificate_does_not_start() {
    let rack = Rack::start();
    let mut command = farpool(rack.home.path());
    command.args(["node", "--control", &rack.url(), "--name", "b", "--donate", "64MiB"]);
    command.args(["--listen", "tcp://127.0.0.1:0", "--pki"]).arg(rack.folder("node-a"));
    let (code, _, error) = ended(&mut command);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("node a may not ask PUT /v1/nodes/b"), "{error}");

    // An old node speaks in the clear, and is told why it is refused.
    let plain = rack.url().replace("https://", "http://");
    let mut command = farpool(rack.home.path());
    command.args(["node", "--control", &plain, "--donate", "64MiB"]);
    let (code, _, error) = ended(command.args(["--listen", "tcp://127.0.0.1:0"]));
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("https://") && error.contains("--pki"), "{error}");
}

#[test]
fn a_revoked_operator_is_refused_without_a_restart() {
    let rack = Rack::start();
    assert_eq!(rack.ask("operator-o", &["node", "list"]).0, 0);
    // The operator's own host has the old list: it must be the controller that refuses.
    let copy = rack.folder("copy");
    std::fs::create_dir(&copy).expect("a folder");
    for name in ["tls.crt", "tls.key", "ca.crt", "revoked.crl"] {
        std::fs::copy(rack.folder("operator-o").join(name), copy.join(name)).expect("copied");
    }
    pki(rack.home.path(), &["revoke", "operator-o"]);
    // A connection from before the list was read ends without words; the next one is told why.
    wait_until("it is told", PATIENCE, || {
        let (code, _, error) = rack.ask("copy", &["node", "list"]);
        (code == 5 && error.contains("revoked")).then_some(())
    });
    assert_eq!(rack.ask("viewer-v", &["node", "list"]).0, 0);
}

#[test]
fn a_node_without_a_controller_serves_its_programs_over_tls() {
    let rack = Rack::start();
    let socket = format!("unix://{}", rack.home.path().join("blade.sock").display());
    let mut command = farpool(rack.home.path());
    command.args(["node", "--collaborate", "--rest", "0.0.0.0:0", "--listen"]);
    command.args(["tcp://127.0.0.1:0", "--listen", &socket, "--drain-timeout", "0s", "--pki"]);
    command.arg(rack.folder("node-a"));
    let node = Daemon::start_command(command, &[]);
    let url = node.address.replace("0.0.0.0", "127.0.0.1");
    assert!(url.starts_with("https://"), "{url}");
    let ask = |label: &str, words: &[&str]| {
        let mut command = farpool(rack.home.path());
        let command = command.args(words).args(["--control", &url, "--pki"]);
        ended(command.arg(rack.folder(label)))
    };
    let (code, text, error) = ask("viewer-v", &["node", "list"]);
    assert_eq!(code, 0, "{error}");
    assert!(text.lines().any(|line| line.starts_with('a')), "{text}");
    let (code, _, error) = ask("program-payroll", &["node", "list"]);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("program of tenant payroll may not ask GET /v1/nodes"), "{error}");
}
