//! The control socket: bad input, limits, a clean end. The switch's ports are real interfaces.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use farpool_hosts::{Hosts, Wiring};
use farpool_switch::{
    Circuit, ControlServer, EmulatedSwitch, EmulatedSwitchDriver, MAX_CONNECTIONS, MAX_LINE_BYTES,
    SwitchDriver,
};

/// Longest wait for an answer: one that takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(30);

struct Stage {
    control: ControlServer,
    switch: EmulatedSwitch,
    directory: tempfile::TempDir,
    _hosts: Hosts,
}

fn stage() -> Option<Stage> {
    let hosts = Hosts::builder(5, Wiring::Switch).make();
    let hosts = hosts.map_err(|reason| farpool_testkit::skip(&reason.to_string())).ok()?;
    let side = hosts.switch().expect("wired for a switch");
    let opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()));
    let switch = opened.expect("enter").expect("open");
    let directory = tempfile::tempdir().expect("directory");
    let control = switch.serve(directory.path().join("control")).expect("serve");
    Some(Stage { control, switch, directory, _hosts: hosts })
}

struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects and reads the greeting.
    fn to(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("connect");
        stream.set_read_timeout(Some(PATIENCE)).expect("option");
        let mut client = Self(BufReader::new(stream));
        let greeting = client.line();
        assert!(greeting.starts_with(r#"{"is":"switch","version":1,"name":"s0""#), "{greeting}");
        client
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line");
        line
    }

    fn say(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("send");
    }

    fn ask(&mut self, request: &str) -> String {
        self.say(format!("{request}\n").as_bytes());
        self.line()
    }
}

#[test]
fn what_is_not_understood_is_refused_and_changes_nothing() {
    let Some(mut stage) = stage() else { return };
    let standing = Circuit::new(0, 2).expect("two ports");
    stage.switch.connect(standing).expect("connect");
    let mut client = Client::to(stage.control.path());
    let wrong = [
        "",
        "{}",
        "nonsense",
        "[1,2]",
        r#"{"do":"disconnect"}"#,
        r#"{"do":"disconnect","ports":[0,2],"force":true}"#,
        r#"{"do":"disconnect","ports":[0,2]}{"do":"disconnect","ports":[0,2]}"#,
        r#"{"do":"disconnect","ports":["0","2"]}"#,
        r#"{"do":"connect","ports":[1,-3]}"#,
        r#"{"do":"connect","ports":[1,3.0]}"#,
        r#"{"do":"connect","ports":[1,99999999999]}"#,
        r#"{"do":"connect","ports":[1,1]}"#,
        r#"{"do":"connect","ports":[1,3,4]}"#,
        "{\"do\":\"connect\",\"ports\":[1,\u{0}3]}",
    ];
    for request in wrong {
        let answer = client.ask(request);
        assert!(answer.contains(r#""kind":"malformed""#), "{request:?}: {answer}");
        assert_eq!(stage.switch.circuits().expect("circuits"), [standing], "{request:?}");
    }
    client.say(b"\xff\xfe{\"do\":\"circuits\"}\n");
    assert!(client.line().contains(r#""kind":"malformed""#));
    assert_eq!(
        client.ask(r#"{"do":"circuits"}"#).trim(),
        r#"{"is":"circuits","circuits":[[0,2]]}"#
    );
    let answer = client.ask(r#"{"do":"connect","ports":[2,3]}"#);
    assert!(answer.contains(r#""kind":"port_in_use","port":2,"circuit":[0,2]"#), "{answer}");
}

#[test]
fn a_line_without_end_is_refused_and_half_a_line_is_not_carried_out() {
    let Some(mut stage) = stage() else { return };
    let mut client = Client::to(stage.control.path());
    client.say(&vec![b' '; MAX_LINE_BYTES + 1]);
    assert!(client.line().contains(r#""kind":"too_long""#));
    assert_eq!(client.line(), "", "and closed");
    // Complete except for its end: the line may have been cut.
    let mut client = Client::to(stage.control.path());
    client.say(br#"{"do":"connect","ports":[0,2]}"#);
    client.0.get_ref().shutdown(std::net::Shutdown::Write).expect("shutdown");
    let mut rest = String::new();
    client.0.read_to_string(&mut rest).expect("the end");
    assert_eq!(rest, "");
    assert_eq!(stage.switch.circuits().expect("circuits"), []);
}

#[test]
fn connections_beyond_the_limit_are_told_so_and_places_come_back() {
    let Some(stage) = stage() else { return };
    let mut clients: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| Client::to(stage.control.path())).collect();
    let error = EmulatedSwitchDriver::connect_to(stage.control.path()).expect_err("too many");
    assert!(error.to_string().contains("16 connections"), "{error}");
    assert!(clients[0].ask(r#"{"do":"circuits"}"#).contains("circuits"), "the others go on");
    drop(clients);
    let deadline = std::time::Instant::now() + PATIENCE;
    while EmulatedSwitchDriver::connect_to(stage.control.path()).is_err() {
        assert!(std::time::Instant::now() < deadline, "no place came back");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_socket_is_private_goes_with_its_server_and_is_not_taken_from_another() {
    let Some(stage) = stage() else { return };
    let path = stage.control.path().to_owned();
    let mode = std::fs::metadata(&path).expect("metadata").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let taken = stage.switch.serve(&path).expect_err("it is answered at");
    assert!(taken.to_string().contains("another switch"), "{taken}");
    let mut client = Client::to(&path);
    drop(stage.control);
    assert_eq!(client.line(), "", "closed");
    assert!(!path.exists());
    // The socket of a killed switch is replaced; another kind of file is not.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
    drop(stage.switch.serve(&path).expect("replaced"));
    let file = stage.directory.path().join("file");
    std::fs::write(&file, "precious").expect("write");
    assert!(stage.switch.serve(&file).is_err());
    assert_eq!(std::fs::read(&file).expect("read"), b"precious");
}
