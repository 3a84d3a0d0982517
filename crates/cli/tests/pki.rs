//! `farpool pki` and `farpool doctor --pki`, as a user runs them.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::{ended, farpool};
use farpool_identity::{Credentials, Files, UnixTime};
use serde_json::Value;

/// A home whose folder `pki` is for the authority.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder for the test"))
    }

    fn pki(&self) -> PathBuf {
        self.0.path().join("pki")
    }

    /// Runs `farpool pki` with these words and the folder. Returns exit code, output and errors.
    fn run(&self, words: &[&str]) -> (i32, String, String) {
        let mut command = farpool(self.0.path());
        ended(command.arg("pki").args(words).env("FARPOOL_PKI_DIR", self.pki()))
    }

    fn ok(&self, words: &[&str]) -> String {
        let (code, text, error) = self.run(words);
        assert_eq!((code, error.as_str()), (0, ""), "{words:?}");
        text
    }

    fn json(&self, words: &[&str]) -> Value {
        let text = self.ok(&[words, &["--json"]].concat());
        serde_json::from_str(&text).expect("JSON")
    }

    #[track_caller]
    fn refused(&self, words: &[&str], expected_code: i32, expected: &str) {
        let (code, _, error) = self.run(words);
        assert_eq!(code, expected_code, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }

    fn doctor(&self, folder: &Path) -> (i32, Value) {
        let mut command = farpool(self.0.path());
        let (code, text, _) = ended(command.args(["doctor", "--json", "--pki"]).arg(folder));
        (code, serde_json::from_str(&text).expect("JSON"))
    }
}

fn load(folder: &Path) -> Result<String, String> {
    let loaded = Credentials::load(Files::in_folder(folder), UnixTime::now());
    loaded.map(|it| it.identity().to_string()).map_err(|error| error.to_string())
}

fn mode(path: &Path) -> u32 {
    path.metadata().expect("it is there").permissions().mode() & 0o777
}

#[test]
fn a_rack_gets_its_certificates() {
    let home = Home::new();
    let text = home.ok(&["init", "--name", "rack1"]);
    assert!(text.contains("the authority of rack rack1"), "{text}");
    assert_eq!((mode(&home.pki()), mode(&home.pki().join("ca.key"))), (0o700, 0o600));
    for (words, folder, identity) in [
        (
            &["--role", "controller", "--name", "c1", "--host", "c1.example"][..],
            "controller-c1",
            "spiffe://rack1/controller/c1",
        ),
        (&["--role", "node", "--name", "a", "--ip", "::1"], "node-a", "spiffe://rack1/node/a"),
        (&["--role", "viewer", "--name", "v"], "viewer-v", "spiffe://rack1/viewer/v"),
        (&["--role", "operator", "--name", "o"], "operator-o", "spiffe://rack1/operator/o"),
        (&["--role", "program", "--tenant", "t"], "program-t", "spiffe://rack1/program/t"),
        (
            &["--role", "program", "--tenant", "t", "--name", "p", "--days", "1"],
            "program-p@t",
            "spiffe://rack1/program/t/p",
        ),
    ] {
        let issued = home.json(&[&["issue"][..], words].concat());
        let folder = home.pki().join(folder);
        assert_eq!(issued["folder"], folder.to_str().expect("text"));
        assert_eq!(issued["identity"], identity);
        assert_eq!(load(&folder).as_deref(), Ok(identity));
        assert_eq!(mode(&folder.join("tls.key")), 0o600);
    }
    let shown = home.json(&["show"]);
    assert_eq!(shown["rack"], "rack1");
    let states = shown["issued"].as_array().expect("a list").iter().map(|it| it["state"].clone());
    assert!(states.eq(std::iter::repeat_n(Value::from("valid"), 6)), "{shown}");
    let text = home.ok(&["show"]);
    assert!(text.contains("controller-c1") && text.contains("c1.example"), "{text}");
}

#[test]
fn no_command_shows_a_key() {
    let home = Home::new();
    let mut all = home.ok(&["init"]);
    all += &home.ok(&["issue", "--role", "node", "--name", "a"]);
    all += &home.ok(&["renew", "a"]);
    all += &home.ok(&["show", "--json"]);
    all += &home.ok(&["revoke", "a"]);
    for key in ["ca.key", "node-a/tls.key"] {
        let pem = fs::read_to_string(home.pki().join(key)).expect("readable");
        let shown = pem.lines().find(|line| all.contains(line));
        assert_eq!(shown, None);
    }
}

#[test]
fn renewals_and_revocations_are_seen() {
    let home = Home::new();
    home.ok(&["init"]);
    let first = home.json(&["issue", "--role", "node", "--name", "a", "--days", "30"]);
    home.ok(&["issue", "--role", "node", "--name", "b"]);
    let renewed = home.json(&["renew", "a"]);
    assert_ne!(renewed["issued"][0]["serial"], first["serial"]);
    let (newest, all) = (home.json(&["show"]), home.json(&["show", "--all"]));
    let count = |shown: &Value| shown["issued"].as_array().expect("a list").len();
    assert_eq!((count(&newest), count(&all)), (2, 3));
    assert_eq!(home.ok(&["renew", "--due"]), "nothing is due\n");

    // One by its number, then what is left by its name.
    let serial = first["serial"].as_str().expect("text");
    let revoked = home.json(&["revoke", serial, "--reason", "key-compromise"]);
    assert_eq!(revoked["revoked"][0]["serial"], first["serial"]);
    let folder = home.pki().join("node-a");
    assert!(load(&folder).is_ok(), "the newer one stays");
    let text = home.ok(&["revoke", "node-a"]);
    assert!(text.contains("revoked node-a") && text.contains("copy "), "{text}");
    assert!(load(&folder).expect_err("revoked").contains("was revoked"));
    assert!(load(&home.pki().join("node-b")).is_ok());
    assert!(home.ok(&["revoke", "node-a"]).contains("were revoked before"));
    let shown = home.json(&["show", "--all"]);
    assert_eq!(shown["issued"][0]["state"], "revoked");
    assert_eq!(shown["issued"][0]["revoked"]["reason"], "key-compromise");
    // The list is one that other programs read.
    if farpool_testkit::have("openssl") {
        let mut command = std::process::Command::new("openssl");
        command.args(["crl", "-noout", "-text", "-CAfile", "ca.crt", "-in", "revoked.crl"]);
        let (code, text, error) = ended(command.current_dir(home.pki()));
        assert!(code == 0 && error.contains("verify OK"), "{error}");
        assert!(text.replace(':', "").to_lowercase().contains(serial), "{text}");
    }
    home.refused(&["renew", "a"], 1, "was revoked");
    home.ok(&["issue", "--role", "node", "--name", "a"]);
    assert!(load(&folder).is_ok());
}

#[test]
fn mistakes_are_refused_with_a_remedy() {
    let home = Home::new();
    let node = ["issue", "--role", "node", "--name", "a"];
    home.refused(&node, 1, "farpool pki init --dir");
    home.refused(&["show"], 1, "farpool pki init --dir");
    home.refused(&["init", "--name", "Rack"], 2, "small letters");
    home.ok(&["init"]);
    home.refused(&["init"], 1, "holds an authority already");
    home.ok(&node);
    home.refused(&node, 1, "farpool pki renew node-a");
    home.ok(&["issue", "--role", "controller", "--name", "a"]);
    home.refused(&["revoke", "a"], 2, "controller-a or node-a");
    home.refused(&["revoke", "x"], 1, "farpool pki show lists what was");
    home.refused(&["renew", "node-a", "x"], 1, "nothing was issued to \"x\"");
    home.refused(&["renew"], 2, "<NAME>");
    home.refused(&["revoke"], 2, "SERIAL|NAME");
    home.refused(&["issue", "--role", "node"], 2, "--name");
    home.refused(&["issue", "--role", "node", "--tenant", "t"], 2, "--name");
    home.refused(&["issue", "--role", "program"], 2, "--tenant");
    home.refused(&["issue", "--role", "program", "--name", "p"], 2, "--tenant");
    home.refused(&["issue", "--role", "admin", "--name", "a"], 2, "operator");
    home.refused(&["issue", "--role", "node", "--name", "a/b"], 2, "letters, digits");
    home.refused(&["issue", "--role", "node", "--name", "x", "--host", "10.0.0.1"], 2, "--ip");
    home.refused(&["issue", "--role", "node", "--name", "x", "--host", "a b"], 2, "neither a name");
    home.refused(&["issue", "--role", "node", "--name", "x", "--days", "0"], 2, "1 to ");
    home.refused(&["issue", "--role", "node", "--name", "x", "--days", "9999"], 2, "1 to ");
    let person = ["issue", "--role", "viewer", "--name", "v", "--ip", "192.0.2.1"];
    home.refused(&person, 2, "answers no connections");
    let shown = home.json(&["show", "--all"]);
    assert_eq!(shown["issued"].as_array().map(Vec::len), Some(2), "nothing else was issued");
}

/// Fifteen commands at once: each waits for the others, and none is lost.
#[test]
fn commands_at_the_same_time_wait_for_each_other() {
    let home = Home::new();
    home.ok(&["init"]);
    std::thread::scope(|scope| {
        for number in 0..15 {
            let home = &home;
            let name = format!("n{number}");
            scope.spawn(move || home.ok(&["issue", "--role", "node", "--name", &name]));
        }
    });
    let shown = home.json(&["show"]);
    assert_eq!(shown["issued"].as_array().map(Vec::len), Some(15));
}

#[track_caller]
fn assert_check(report: &Value, name: &str, status: &str, words: &str) {
    let checks = report["checks"].as_array().expect("a list");
    let check = checks.iter().find(|check| check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("no {name} in {report}"));
    assert_eq!(check["status"], status, "{check}");
    assert!(check.to_string().contains(words), "{check}, without {words}");
}

#[test]
fn doctor_looks_after_certificates() {
    let home = Home::new();
    home.ok(&["init"]);
    home.ok(&["issue", "--role", "node", "--name", "a"]);
    let folder = home.pki().join("node-a");
    let (_, report) = home.doctor(&folder);
    assert_eq!(report["pki_works"], true);
    assert_check(&report, "pki-certificate", "ok", "spiffe://farpool/node/a");
    assert_check(&report, "pki-expiry", "ok", "days left");
    assert_check(&report, "pki-revoked", "ok", "revoked certificates: 0");
    assert_check(&report, "pki-key-mode", "ok", "600");
    assert!(!report.to_string().contains("pki-folder-mode"));

    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    };
    set(&folder.join("tls.key"), 0o640);
    set(&folder.join("ca.crt"), 0o666);
    let (_, report) = home.doctor(&folder);
    assert_eq!(report["pki_works"], true, "it works, although it is not safe");
    assert_check(&report, "pki-key-mode", "wrong", "chmod 600");
    assert_check(&report, "pki-folder-mode", "wrong", "ca.crt");

    let (code, report) = home.doctor(&home.pki());
    assert_eq!((code, &report["pki_works"]), (1, &Value::from(false)));
    assert_check(&report, "pki-certificate", "wrong", "the authority's folder");
    fs::remove_file(folder.join("revoked.crl")).expect("removed");
    let (_, report) = home.doctor(&folder);
    assert_check(&report, "pki-revoked", "info", "no revoked.crl");
    // Without --pki nothing is said of it.
    let (_, text, _) = ended(farpool(home.0.path()).args(["doctor", "--json"]));
    assert!(!text.contains("pki_works") && !text.contains("\"pki-"), "{text}");
}

/// Certificates of another time, as if this host's clock were wrong.
#[test]
fn doctor_tells_of_certificates_that_end_or_have_not_begun() {
    use farpool_identity::authority::{Authority, DAY_S, Request};
    let home = Home::new();
    let now_s = UnixTime::now().as_secs();
    let at = |unix_s| UnixTime::since_unix_epoch(std::time::Duration::from_secs(unix_s));
    let rack = "rack".parse().expect("a name");
    let mut authority = Authority::init(&home.pki(), rack, at(now_s - 100 * DAY_S)).expect("made");
    let mut issue = |name: &str, from_s| {
        let role = farpool_identity::Role::Node(name.parse().expect("a name"));
        let request = Request { role, hosts: Vec::new(), days: 30 };
        authority.issue(request, at(from_s)).expect("issued").folder
    };
    let over = issue("over", now_s - 31 * DAY_S);
    let due = issue("due", now_s - 25 * DAY_S - DAY_S / 2);
    let early = issue("early", now_s + DAY_S);
    drop(authority);
    let (code, report) = home.doctor(&over);
    assert_eq!(code, 1);
    assert_check(&report, "pki-certificate", "wrong", "farpool pki renew");
    let (code, report) = home.doctor(&early);
    assert_eq!(code, 1);
    assert_check(&report, "pki-certificate", "wrong", "timedatectl");
    let (_, report) = home.doctor(&due);
    assert_eq!(report["pki_works"], true);
    assert_check(&report, "pki-expiry", "wrong", "4 days left");
    let renewed = home.json(&["renew", "--due"]);
    let names: Vec<_> = renewed["issued"].as_array().expect("a list").iter().collect();
    assert_eq!(names.len(), 2, "{renewed}");
    assert!(load(&over).is_ok() && load(&due).is_ok());
    let shown = home.json(&["show"]);
    assert_eq!(shown["issued"][0]["state"], "early");
}
