//! A rack of real processes: a controller, nodes that lend memory, and a client that uses it, while
//! each in turn is stopped, killed or restarted.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{ended, farpool};
use farpool_api::{Client, NodeState, ProblemKind, SegmentState};
use farpool_e2e::far::{Far, User};
use farpool_e2e::rack::Daemon;
use farpool_e2e::{PATIENCE, wait_until};
use farpool_testkit::ports::free_address;
use rustix::process::Signal;

const SUPERPAGE: u64 = 16 << 20;

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder for the test")
}

fn rest(url: &str, token: Option<&str>) -> Client {
    Client::new(url, token).expect("an address")
}

fn start_control(home: &Path, listen: &str, words: &[&str]) -> Daemon {
    let store = format!("redb:{}", home.join("control.redb").display());
    let flags = ["control", "--listen", listen, "--store", &store];
    Daemon::start_command(farpool(home), &[&flags, words].concat())
}

/// Starts a node that lends 64 MiB.
fn start_node(home: &Path, name: &str, url: &str) -> Daemon {
    let flags = ["node", "--control", url, "--donate", "64MiB", "--name", name];
    let listen = ["--listen", "tcp://127.0.0.1:0"];
    let node = Daemon::start_command(farpool(home), &[&flags[..], &listen].concat());
    assert_eq!(node.ready["name"], name);
    node
}

#[test]
fn people_see_and_change_the_rack_through_the_command_line() {
    let home = home();
    let control = start_control(home.path(), "127.0.0.1:0", &[]);
    let ask = |words: &[&str]| {
        let mut command = farpool(home.path());
        ended(command.args(words).env("FARPOOL_CONTROL", &control.address))
    };
    let nodes: Vec<Daemon> = ["n1", "n2", "n3"]
        .iter()
        .map(|name| start_node(home.path(), name, &control.address))
        .collect();
    let (code, text, _) = ask(&["node", "list"]);
    assert_eq!(code, 0);
    for name in ["n1", "n2", "n3"] {
        let line = text.lines().find(|line| line.starts_with(name)).expect("its line");
        assert!(line.contains("up") && line.contains("64MiB"), "{line}");
    }
    let id = "11111111-2222-4333-8444-555555555555";
    let create = ["segment", "create", "--host", "n1", "--size", "20MiB", "--id", id];
    assert_eq!(ask(&create).0, 0);
    assert_eq!(ask(&create).0, 0, "a create may be repeated");
    let other = ["segment", "create", "--host", "n2", "--size", "20MiB", "--id", id];
    assert_eq!(ask(&other).0, 4, "another segment of this id is a conflict");
    wait_until("the segment to be ready", PATIENCE, || {
        let (_, text, _) = ask(&["segment", "show", id, "--json"]);
        let segment: serde_json::Value = serde_json::from_str(&text).ok()?;
        (segment["state"] == "ready" && segment["place"]["bytes"] == 32 << 20).then_some(())
    });
    assert!(ask(&["segment", "list"]).1.contains(id));
    assert_eq!(ask(&["segment", "move", id]).0, 4, "nobody would move its data");
    assert!(ask(&["rack", "show"]).1.contains("n2"));
    assert!(ask(&["rack", "show", "--toml"]).1.contains("n3"));
    assert!(ask(&["circuit", "list"]).1.starts_with("switch"));
    assert!(ask(&["events"]).1.contains("segment-created"));
    let two = ask(&["events", "--follow", "--count", "2"]);
    assert_eq!((two.0, two.1.lines().count()), (0, 2), "{}", two.1);
    assert_eq!(ask(&["segment", "delete", id]).0, 0);
    wait_until("the segment to be gone", PATIENCE, || {
        (ask(&["segment", "show", id]).0 == 3).then_some(())
    });
    assert_eq!(ask(&["node", "drain", "n3", "--wait"]).0, 0);
    assert!(ask(&["node", "show", "n3"]).1.contains("draining"));
    assert!(ask(&["task", "list"]).1.contains("drain"));
    assert_eq!(ask(&["node", "drain", "n3", "--undo"]).0, 0);
    assert_eq!(ask(&["node", "show", "nobody"]).0, 3);
    for node in nodes {
        assert!(node.end(), "it signs off");
    }
    assert_eq!(ask(&["node", "list", "--json"]).1.trim(), r#"{"nodes":[]}"#, "all signed off");
    assert!(control.end(), "it stops");
    let mut command = farpool(home.path());
    let (code, _, error) = ended(command.args(["node", "list", "--control", "http://127.0.0.1:1"]));
    assert_eq!(code, 5, "{error}");
}

#[test]
fn a_drained_node_leaves_when_the_client_has_moved() {
    let home = home();
    let control = start_control(home.path(), "127.0.0.1:0", &[]);
    let first = start_node(home.path(), "n1", &control.address);
    let mut user = User::new(rest(&control.address, None), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(0, 3));
    // To the controller, the client runs on n1, so n1 stays known after it is empty.
    let _second = start_node(home.path(), "n2", &control.address);
    first.signal(Signal::TERM);
    let target = wait_until("a target", PATIENCE, || user.told().target);
    assert_eq!(target.place.node, "n2");
    assert!(far.write(1, 4), "the old place serves until the client has moved");
    let mut there = Far::open(&target.place, target.epoch);
    for page in 0..2 {
        assert!(there.write(page, far.read(page).expect("the old place serves")));
    }
    user.evacuated(target.epoch);
    assert_eq!(first.wait(), Some(0));
    assert_eq!(user.told().place.node, "n2");
    assert_eq!((there.read(0), there.read(1)), (Some(3), Some(4)));
}

#[test]
fn a_controller_that_is_killed_is_not_missed_and_finds_the_truth_again() {
    let home = home();
    let listen = free_address().to_string();
    let mut control = start_control(home.path(), &listen, &[]);
    let url = control.address.clone();
    let _node = start_node(home.path(), "n1", &url);
    let mut user = User::new(rest(&url, None), "n1", 1, 2 * SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    assert!(far.write(0, 1));
    control.kill();
    for page in 0..200 {
        assert!(far.write(page, 2), "client and blade go on");
        assert_eq!(far.read(page), Some(2));
    }
    let mut late = Far::open(&told.place, told.epoch);
    assert!(late.write(0, 7), "whoever has the key may still come");
    let control = start_control(home.path(), &listen, &[]);
    let back = rest(&control.address, None);
    wait_until("the node to report again", PATIENCE, || back.node("n1").ok()?.capacity_bytes);
    let segment = back.segment(user.segment).expect("it is known");
    assert_eq!((segment.state, segment.epoch), (SegmentState::Ready, told.epoch));
    user.ask(back);
    let again = user.told();
    assert_eq!((again.epoch, again.place.key), (told.epoch, told.place.key));
    assert_eq!(far.read(199), Some(2), "nothing was revoked");
    assert_eq!(late.read(0), Some(7));
}

#[test]
fn a_node_that_is_killed_takes_its_segment_with_it_and_the_controller_learns_that() {
    let home = home();
    let control = start_control(home.path(), "127.0.0.1:0", &[]);
    let back = rest(&control.address, None);
    let mut node = start_node(home.path(), "n1", &control.address);
    let user = User::new(rest(&control.address, None), "n1", 1, SUPERPAGE);
    node.kill();
    wait_until("the node to be lost", PATIENCE, || {
        back.node("n1").ok().filter(|node| node.state == NodeState::Lost)
    });
    assert_ne!(back.segment(user.segment).expect("known").state, SegmentState::Lost);
    let _again = start_node(home.path(), "n1", &control.address);
    let segment = back.segment(user.segment).expect("it is known");
    assert_eq!(segment.state, SegmentState::Lost, "another blade has other memory");
    wait_until("the node to be up", PATIENCE, || {
        back.node("n1").ok().filter(|node| node.state == NodeState::Up)
    });
}

#[test]
fn a_node_that_is_cut_off_keeps_serving_and_comes_back() {
    let home = home();
    let control = start_control(home.path(), "127.0.0.1:0", &[]);
    let back = rest(&control.address, None);
    let _node = start_node(home.path(), "n1", &control.address);
    let mut user = User::new(rest(&control.address, None), "n1", 1, SUPERPAGE);
    let told = user.told();
    let mut far = Far::open(&told.place, told.epoch);
    // A stopped controller accepts connections but does not answer: to the node this is like a cut.
    control.signal(Signal::STOP);
    for page in 0..200 {
        assert!(far.write(page, 9));
        assert_eq!(far.read(page), Some(9));
    }
    control.signal(Signal::CONT);
    let before = back.node("n1").expect("it answers").read_bytes_total;
    wait_until("a report with what was read meanwhile", PATIENCE, || {
        let now = back.node("n1").ok()?.read_bytes_total?;
        (now >= 200 * 4096 && Some(now) >= before).then_some(())
    });
    assert_eq!(back.segment(user.segment).expect("known").state, SegmentState::Ready);
    assert_eq!(far.read(0), Some(9));
}

#[test]
fn a_wrong_token_is_refused_everywhere() {
    let home = home();
    let file = |name: &str, text: &str| {
        let path = home.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("text").to_owned()
    };
    let (right, wrong) = (file("right", "open-sesame\n"), file("wrong", "open-barley\n"));
    let control = start_control(home.path(), "127.0.0.1:0", &["--token-file", &right]);
    let node = |token: &str| {
        let mut command = farpool(home.path());
        command.args(["node", "--control", &control.address, "--donate", "64MiB"]);
        command.args(["--listen", "tcp://127.0.0.1:0", "--token-file", token]);
        ended(&mut command)
    };
    let (code, _, error) = node(&wrong);
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("does not accept this node's token"), "{error}");
    let list = |token: &str| {
        let mut command = farpool(home.path());
        let words = ["node", "list", "--control", &control.address, "--token-file", token];
        ended(command.args(words)).0
    };
    assert_eq!(list(&wrong), 1);
    assert_eq!(list(&right), 0);
    let error = rest(&control.address, None).nodes().expect_err("no token");
    assert!(error.is(ProblemKind::Unauthorized), "{error}");
}

#[test]
fn a_second_signal_ends_a_node_that_drains() {
    let home = home();
    let control = start_control(home.path(), "127.0.0.1:0", &[]);
    let node = start_node(home.path(), "n1", &control.address);
    let _user = User::new(rest(&control.address, None), "n1", 1, SUPERPAGE);
    node.signal(Signal::INT);
    let back = rest(&control.address, None);
    wait_until("the drain", PATIENCE, || back.node("n1").ok().filter(|node| node.draining));
    // No client moves the segment, so only the second signal can end the node before 30 s.
    let began = Instant::now();
    node.signal(Signal::INT);
    assert_eq!(node.wait(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(25), "it did not wait for the drain");
    assert!(!back.node("n1").expect("known").draining, "the one that comes after it is used");
}

#[test]
fn racks_are_drawn_and_generated_without_a_controller() {
    let home = home();
    let (code, text, _) =
        ended(farpool(home.path()).args(["rack", "generate", "2", "--trays", "1"]));
    assert_eq!(code, 0);
    let path = home.path().join("rack.toml");
    std::fs::write(&path, text).expect("a file");
    let file = path.to_str().expect("text");
    let (code, drawing, _) = ended(farpool(home.path()).args(["rack", "show", "--topology", file]));
    assert_eq!(code, 0);
    assert!(drawing.contains("r1t0m3"), "{drawing}");
    std::fs::write(&path, "[[rack]]\nnmae = \"x\"\n").expect("a file");
    let (code, _, error) = ended(farpool(home.path()).args(["rack", "show", "--topology", file]));
    assert_eq!(code, 1);
    assert!(error.contains("line") && error.contains("rack.toml"), "{error}");
}

/// A node without a controller that other machines can reach.
const BEYOND_LOOPBACK: [&str; 5] =
    ["node", "--collaborate", "--allow-remote-tcp", "--listen", "tcp://192.0.2.1:7070"];

/// A node whose memory outlives it.
const KEPT: [&str; 5] = ["node", "--control", "http://127.0.0.1:1", "--persist", "/dev/shm/x"];

#[test]
fn mistakes_in_the_racks_commands_exit_with_2() {
    let home = home();
    let mistakes: &[(&[&str], &str)] = &[
        (&["node", "--donate", "1G"], "--control"),
        (&["node", "--control", "ftp://x", "--donate", "1G"], "ftp://x"),
        (&["node", "--donate", "1G", "list"], "cannot be used"),
        (&["node", "--control", "http://x", "--zone", "1"], "cannot be used"),
        (&["node", "--collaborate", "--control", "http://x"], "cannot be used"),
        (&["node", "--donate", "1G", "--join", "10.0.0.7:7070"], "cannot be used"),
        (&["node", "--collaborate", "--listen", "unix:///x"], "--listen tcp://"),
        (
            &["node", "--control", "http://127.0.0.1:1", "--listen", "tcp://0.0.0.0:1"],
            "--allow-remote-tcp",
        ),
        (&["node", "--control", "http://192.0.2.1:7080", "--donate", "1G"], "--insecure"),
        (&["node", "list", "--control", "http://rack:7080"], "--insecure"),
        (&["node", "list", "--control", "https://127.0.0.1:7080"], "--pki DIR"),
        (&["node", "list", "--pki", "/nowhere"], "/nowhere/ca.crt"),
        (&["run", "--local", "1G", "--pool", "http://192.0.2.1:7080", "--", "true"], "--insecure"),
        (&["kv", "--far", "1G", "--pool", "http://192.0.2.1:7080"], "--insecure"),
        (&[&BEYOND_LOOPBACK[..], &[]].concat(), "--rack-key-file"),
        (&[&BEYOND_LOOPBACK[..], &["--rack-key-file", "x", "--insecure"]].concat(), "--insecure"),
        (&["node", "--collaborate", "--borrower-share", "101"], "101"),
        (&["node", "--collaborate", "--unused-after", "0s"], "0s"),
        (&["node", "--collaborate", "--persist", "/dev/shm/x"], "cannot be used"),
        (&["node", "--control", "http://127.0.0.1:1", "--takeover"], "--persist FILE"),
        (&[&KEPT[..], &["--listen", "tcp://127.0.0.1:0"]].concat(), "give --listen a port"),
        (&["control", "--store", "tape:x"], "redb:PATH"),
        (&["control", "--switch", "r0"], "NAME=SOCKET"),
        (&["control", "--listen", "0.0.0.0:0"], "--token-file"),
        (&["control", "--listen", "0.0.0.0:0"], "--pki DIR"),
        (&["control", "--listen", "0.0.0.0:0", "--insecure"], "--token-file"),
        (&["control", "--listen", "0.0.0.0:0", "--allow-remote"], "--token-file"),
        (&["control", "--pki", "/nowhere"], "/nowhere/ca.crt"),
        (&["segment", "show", "7"], "UUID"),
        (&["segment", "create", "--host", "a", "--size", "1G", "--policy", "best"], "least-loaded"),
        (&["rack", "generate", "0"], "0"),
    ];
    for (words, expected) in mistakes {
        let mut command = farpool(home.path());
        let (code, _, error) = ended(command.args(*words).env("XDG_STATE_HOME", home.path()));
        assert_eq!(code, 2, "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?} says {error:?}, without {expected:?}");
    }
}

#[test]
fn a_rack_key_that_others_may_read_is_refused_by_name_with_the_remedy() {
    use std::os::unix::fs::PermissionsExt;
    let home = home();
    let file = home.path().join("rack.key");
    std::fs::write(&file, "nobody shall read this\n").expect("a file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("its mode");
    let path = file.to_str().expect("UTF-8");
    let socket = format!("unix://{}", home.path().join("blade.sock").display());
    let mut command = farpool(home.path());
    command.args(["node", "--collaborate", "--listen", "tcp://127.0.0.1:0", "--listen", &socket]);
    let (code, _, error) = ended(command.args(["--rest", "127.0.0.1:0", "--rack-key-file", path]));
    assert_eq!(code, 1, "{error}");
    assert!(error.contains(&format!("chmod 600 {path}")), "{error}");
    assert!(!error.contains("nobody shall"), "{error}");
}
