//! The audit log of a real controller, and `farpool audit verify`, as an operator uses them.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{ended, farpool};
use farpool_e2e::rack::Daemon;
use serde_json::Value;

/// Bytes of a disk that is soon full: a few dozen lines.
const SMALL_DISK: &str = "8k";
/// More changes than fit on it.
const CHANGES: u32 = 200;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a folder for the test"));
        fs::write(place.token(), "secret\n").expect("a file");
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(place.token(), mode).expect("its mode");
        place
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn token(&self) -> PathBuf {
        self.path().join("token")
    }

    fn flags(&self, log: &Path) -> Vec<String> {
        let store = format!("redb:{}", self.path().join("control.redb").display());
        let (token, log) = (self.token().display().to_string(), log.display().to_string());
        ["control", "--listen", "127.0.0.1:0", "--store", &store]
            .into_iter()
            .chain(["--token-file", &token, "--audit", &log])
            .map(str::to_owned)
            .collect()
    }

    fn start(&self, mut command: Command, log: &Path) -> Daemon {
        let flags = self.flags(log);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        command.env("HOME", self.path());
        Daemon::start_command(command, &flags)
    }

    /// Asks the controller, with its token or without. Returns the exit code and errors.
    fn ask(&self, control: &Daemon, words: &[&str], has_token: bool) -> (i32, String) {
        let mut command = farpool(self.path());
        command.args(words).env("FARPOOL_CONTROL", &control.address);
        if has_token {
            command.env("FARPOOL_TOKEN_FILE", self.token());
        }
        let (code, _, error) = ended(&mut command);
        (code, error)
    }

    fn verify(&self, words: &[&str]) -> (i32, String, String) {
        ended(farpool(self.path()).args(["audit", "verify"]).args(words))
    }
}

#[test]
fn who_changed_what_and_who_was_refused_is_in_the_log_and_what_was_changed_in_it_is_found() {
    let place = Place::new();
    let log = place.path().join("audit.log");
    let file = log.to_str().expect("UTF-8");
    let control = place.start(farpool(place.path()), &log);
    assert_eq!(place.ask(&control, &["tenant", "set", "t", "--promise", "1G"], true).0, 0);
    assert_eq!(place.ask(&control, &["tenant", "list"], true).0, 0, "reading is not recorded");
    assert_eq!(place.ask(&control, &["tenant", "delete", "t"], false).0, 1);
    // A page of another site is refused before its token is looked at.
    let host = control.address.strip_prefix("http://").expect("in the clear");
    let mut page = TcpStream::connect(host).expect("the controller");
    let head =
        format!("PUT /v1/tenants/x HTTP/1.1\r\nHost: {host}\r\nOrigin: http://x.example\r\n");
    write!(page, "{head}Content-Length: 0\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    page.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(control.end(), "it stops");
    let text = fs::read_to_string(&log).expect("the log");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<Value> = lines.collect();
    let told = |line: &Value| {
        let word = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        (word("who"), word("what"), line["outcome"].as_u64())
    };
    let told: Vec<_> = lines.iter().map(told).collect();
    let expected = [
        ("farpool", "the log is opened", 0),
        ("bearer of the token", "PUT /v1/tenants/t", 0),
        ("bearer of the token", "PUT /v1/tenants/t", 201),
        ("nobody known", "DELETE /v1/tenants/t", 401),
        ("nobody known", "PUT /v1/tenants/x", 403),
    ];
    let expected = expected.map(|(who, what, code)| (who.to_owned(), what.to_owned(), Some(code)));
    assert_eq!(told, expected);
    // It was announced, and of what is refused nothing is.
    let intents: Vec<_> = lines.iter().map(|line| line["intent"] == true).collect();
    assert_eq!(intents, [false, true, false, false, false]);
    assert_eq!(lines[2]["outcome_of"], lines[1]["number"]);
    assert!(lines[1]["from"].as_str().is_some_and(|from| from.starts_with("127.0.0.1:")));

    let (code, said, error) = place.verify(&[file]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(said.starts_with("lines 1 to 5 are what was written\nthe last"), "{said}");
    let (_, said, _) = place.verify(&[file, "--json"]);
    let noted: Value = serde_json::from_str(&said).expect("JSON");
    let noted = noted["hash"].as_str().expect("a hash").to_owned();

    let again = place.start(farpool(place.path()), &log);
    assert!(again.end(), "it stops");
    assert_eq!(place.verify(&[file, "--contains", &noted]).0, 0, "it goes on");
    // As a controller leaves it that is killed between the two.
    let until_intent: String = text.split_inclusive('\n').take(2).collect();
    fs::write(&log, until_intent).expect("written");
    let (code, said, _) = place.verify(&[file]);
    let named = "line 2 announces \"PUT /v1/tenants/t\", and no line says what became of it";
    assert!(code == 0 && said.contains(named), "{said}");
    let (_, said, _) = place.verify(&[file, "--json"]);
    assert!(
        said.contains(r#""without_outcome":[{"number":2,"what":"PUT /v1/tenants/t"}]"#),
        "{said}"
    );
    let first_line = text.split_inclusive('\n').next().expect("a line");
    fs::write(&log, first_line).expect("written");
    let (code, _, error) = place.verify(&[file, "--contains", &noted]);
    assert!(code == 1 && error.contains("lines were cut off"), "{code}: {error}");
    fs::write(&log, text.replace("tenants/t", "tenants/u")).expect("written");
    let (code, _, error) = place.verify(&[file]);
    assert!(code == 1 && error.contains("line 2 is broken"), "{code}: {error}");
    let (code, _, error) = ended(farpool(place.path()).args(place.flags(&log)));
    assert!(code == 1 && error.contains("line 2 is broken") && error.contains(file), "{error}");
}

#[test]
fn what_cannot_be_recorded_is_not_changed() {
    let place = Place::new();
    let disk = place.path().join("disk");
    fs::create_dir(&disk).expect("a folder");
    let mut stage = Command::new("unshare");
    let script = "mount -t tmpfs -o size=$1 small \"$2\" && shift 2 && exec \"$@\"";
    stage.args(["--mount", "sh", "-c", script, "sh", SMALL_DISK]).arg(&disk);
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|it| it.success()) {
        farpool_testkit::skip("mount namespaces need root");
        return;
    }
    stage.arg(env!("CARGO_BIN_EXE_farpool"));
    let control = place.start(stage, &disk.join("audit.log"));
    let set = |number: u32| place.ask(&control, &["tenant", "set", &format!("t{number}")], true);
    let refused =
        (0..CHANGES).map(|number| (number, set(number))).find(|(_, (code, _))| *code != 0);
    let (number, (code, error)) = refused.expect("the disk is full at last");
    assert_eq!(code, 5, "{error}");
    assert!(error.contains("audit log cannot be written"), "{error}");
    // At most the change that met the full disk was done without its line.
    let show =
        |number: u32| place.ask(&control, &["tenant", "show", &format!("t{number}")], true).0;
    assert_eq!((show(0), show(number)), (0, 3), "reading goes on, and the last was not set");
    assert_eq!(set(number).0, 5, "and not later");
    assert!(control.end(), "it stops");
}
