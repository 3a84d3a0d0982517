//! Secrets that were planted are found nowhere: not in logs, however much is logged, nor in
//! answers, command lines, environments, or files.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use farpool_e2e::pki::make_authority;
use farpool_e2e::ports::{free_address, free_port};
use farpool_e2e::rack::{Daemon, UNHELD};
use farpool_e2e::run::Run;
use farpool_e2e::{PATIENCE, binaries, turn, wait_until};
use memchr::memmem::Finder;

const TOKEN: &str = "planted-token-7f3e9c51d2";
const PASSWORD: &str = "planted-password-90ab4417";
const RACK_KEY: &[u8; 32] = b"planted-rack-key-123456789abcdef";
/// What precedes a P-256 key in PKCS #8: the end of its version, and an octet string of 32 bytes.
const BEFORE_KEY: &[u8] = &[2, 1, 1, 4, 32];
const KEY_BYTES: usize = 32;
/// Where runs of root are.
const RUNS: &str = "/run/farpool";

/// A folder for secrets, and one for everything that is searched.
struct Place {
    secrets: tempfile::TempDir,
    told: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { secrets: temporary(), told: temporary() };
        place.plant("token", TOKEN);
        place.plant("rack.key", &BASE64_STANDARD.encode(RACK_KEY));
        place.plant("users", &format!("user:{PASSWORD}"));
        make_authority(|| place.farpool(), &place.secret("pki"));
        place
    }

    fn plant(&self, name: &str, secret: &str) {
        let line = format!("{secret}\n");
        farpool_kernel::write_secret(&self.secrets.path().join(name), line.as_bytes())
            .expect("a file");
    }

    fn secret(&self, name: &str) -> PathBuf {
        self.secrets.path().join(name)
    }

    /// `farpool`, which logs all it can to a file that is searched.
    fn farpool(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$@\" 2>>\"$LOG\""]).arg(binaries::program("farpool"));
        command.env("LOG", self.told.path().join("log")).env("FARPOOL_LOG", "trace");
        command
    }

    fn start(&self, arguments: &[&str]) -> Daemon {
        Daemon::start_command(self.farpool(), arguments)
    }

    fn note(&self, name: &str, answer: &[u8]) {
        std::fs::write(self.told.path().join(name), answer).expect("a file");
    }

    /// What must not be found, and its name: each secret as it is, in base64 and in hexadecimal.
    fn needles(&self) -> Vec<(String, Vec<u8>)> {
        let mut needles = Vec::new();
        let mut add = |name: &str, secret: &[u8]| {
            let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
            let base64 = BASE64_STANDARD.encode(secret);
            needles.push((name.to_owned(), secret.to_vec()));
            needles.push((format!("{name} in base64"), base64.into_bytes()));
            needles.push((format!("{name} in hexadecimal"), hex.to_uppercase().into_bytes()));
            needles.push((format!("{name} in hexadecimal"), hex.into_bytes()));
        };
        add("the token", TOKEN.as_bytes());
        add("the password", PASSWORD.as_bytes());
        add("the rack key", RACK_KEY);
        for file in ["ca.key", "node-n/tls.key", "program-payroll/tls.key"] {
            let path = self.secret("pki").join(file);
            let pem = std::fs::read_to_string(&path);
            let pem = pem.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let lines: Vec<&str> = pem.lines().filter(|line| !line.starts_with('-')).collect();
            add(&format!("{file} as it is written"), lines[1].as_bytes());
            let der = BASE64_STANDARD.decode(lines.concat()).expect("base64");
            let before = Finder::new(BEFORE_KEY).find(&der).expect("a P-256 key");
            let from = before + BEFORE_KEY.len();
            add(&format!("the key in {file}"), &der[from..from + KEY_BYTES]);
        }
        needles
    }
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("plain text")
}

/// What an HTTP server answers.
fn http(address: &str, path: &str) -> Vec<u8> {
    let address = address.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).expect("it listens");
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("it takes requests");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it answers");
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    answer
}

/// What a cache answers somebody with the password.
fn cache(address: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let login = format!("user {PASSWORD}");
    let requests = format!(
        "set auth 0 0 {}\r\n{login}\r\nstats\r\nstats settings\r\nstats conns\r\nmn\r\nquit\r\n",
        login.len()
    );
    stream.write_all(requests.as_bytes()).expect("it takes requests");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it answers");
    assert!(answer.starts_with(b"STORED"), "{}", String::from_utf8_lossy(&answer));
    answer
}

/// Where a secret is found in the files of a folder.
fn found_in(folder: &Path, needles: &[(String, Vec<u8>)]) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        // What has ended meanwhile tells nothing.
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let bytes = std::fs::read(entry.path()).unwrap_or_default();
                    found.extend(found_in_bytes(&entry.path().display(), &bytes, needles));
                }
                _ => {}
            }
        }
    }
    found
}

fn found_in_bytes(
    place: &impl std::fmt::Display,
    bytes: &[u8],
    needles: &[(String, Vec<u8>)],
) -> Vec<String> {
    let is_there = |(_, needle): &&(String, Vec<u8>)| Finder::new(needle).find(bytes).is_some();
    needles.iter().filter(is_there).map(|(name, _)| format!("{name} is in {place}")).collect()
}

/// Where a secret is found in what everybody may know of processes.
fn found_in_processes(needles: &[(String, Vec<u8>)]) -> Vec<String> {
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").expect("procfs").flatten() {
        for file in ["cmdline", "environ", "comm"] {
            let path = process.path().join(file);
            let bytes = std::fs::read(&path).unwrap_or_default();
            found.extend(found_in_bytes(&path.display(), &bytes, needles));
        }
    }
    found
}

#[test]
fn planted_secrets_are_found_nowhere() {
    let _turn = turn();
    let place = Place::new();
    let (token, rack_key, users) =
        (place.secret("token"), place.secret("rack.key"), place.secret("users"));
    let store = format!("redb:{}", place.told.path().join("store").display());
    let audit = place.told.path().join("audit");
    let listen = free_address().to_string();
    let control = ["control", "--listen", &listen, "--store", &store, "--audit", text(&audit)];
    let control = place.start(&[&control[..], &["--token-file", text(&token)]].concat());
    let url = control.address.clone();
    // A program's far memory is on other hosts than its own.
    let node = |name, donate| {
        let node = ["node", "--control", &url, "--name", name, "--donate", donate];
        let tcp = ["--listen", "tcp://127.0.0.1:0", "--token-file", text(&token)];
        place.start(&[&node[..], &tcp, &UNHELD].concat())
    };
    let _nodes = [node("a", "1GiB"), node("here", "16MiB")];
    let alone = ["node", "--collaborate", "--name", "b", "--listen", "tcp://127.0.0.1:0"];
    let key = ["--rack-key-file", text(&rack_key)];
    let _alone = place.start(&[&alone[..], &key].concat());
    let pki = place.secret("pki");
    let (node_pki, program_pki) = (pki.join("node-n"), pki.join("program-payroll"));
    let blade = ["blade", "--memory", "128MiB", "--listen", "tcp://127.0.0.1:0"];
    let blade = place.start(&[&blade[..], &["--pki", text(&node_pki)]].concat());
    let port = free_port().to_string();
    let kv = place.start(&["kv", "-p", &port, "-t", "1", "-m", "64", "-Y", text(&users)]);

    let stress = |run: Run| {
        let run = run.env("FARPOOL_LOG", "trace").own_program("farpool-stress");
        let mut running = run
            .args(["--mib", "48", "--threads", "1", "--progress", "--seed", "5"])
            .args(["--ops", "discard,heap", "--seconds", "600"])
            .start();
        running.wait_for_output("filled", 1);
        running
    };
    let pooled = || {
        let run = Run::far("16MiB").args(["--pool", &url, "--host", "here", "--rate", "1GiB"]);
        run.arg("--token-file").arg(&token)
    };
    wait_until("the node lends", PATIENCE, || {
        (pooled().program("true").finish().code == 0).then_some(())
    });
    let pooled = stress(pooled());
    let certified = Run::far("16MiB").blade(&blade.address);
    let certified = stress(certified.arg("--pki").arg(&program_pki));

    for path in ["/metrics", "/v1/nodes", "/v1/segments", "/v1/tasks", "/v1/backup"] {
        place.note(&path.replace('/', "_"), &http(&url, path));
    }
    place.note("cache", &cache(&kv.address));
    let mut stat = place.farpool();
    let stat =
        stat.args(["stat", "--json", "--blade", &blade.address]).arg("--pki").arg(&program_pki);
    place.note("stat", &stat.output().expect("farpool stat").stdout);

    let needles = place.needles();
    let mut found = found_in_processes(&needles);
    found.extend(found_in(Path::new(RUNS), &needles));
    for (name, running) in [("pooled", pooled), ("certified", certified)] {
        assert!(running.told().is_some(), "{name} has figures");
        place.note(&format!("{name}.stderr"), running.stderr().as_bytes());
    }
    for (name, needle) in &needles {
        place.note("planted", needle);
        let found = found_in(place.told.path(), &needles);
        assert!(found.iter().any(|it| it.starts_with(name)), "{name} is found where it is");
    }
    std::fs::remove_file(place.told.path().join("planted")).expect("it is there");
    found.extend(found_in(place.told.path(), &needles));
    assert!(found.is_empty(), "{}", found.join("\n"));
    let log = std::fs::read_to_string(place.told.path().join("log")).expect("a log");
    assert!(log.contains("TRACE"), "all is logged");
}
