//! Nodes with a rack key over real sockets: who has it is a neighbour, others are not heard.

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::{MIB, Node, Program, options, wait_for};
use farpool_api::Client;
use farpool_peer::{CollaborateError, CollaborateOptions, Collaborator, Observation};

fn line(number: u8) -> String {
    let secret: Vec<u8> = (0..32).map(|at| at ^ number).collect();
    STANDARD.encode(secret)
}

/// Puts these keys into a file that only its owner may read.
fn write(file: &Path, keys: &[u8]) {
    let lines: Vec<String> = keys.iter().map(|number| line(*number) + "\n").collect();
    farpool_kernel::write_secret(file, lines.concat().as_bytes()).unwrap();
}

fn with(file: &Path) -> impl FnOnce(&mut CollaborateOptions) {
    let file = file.to_owned();
    move |options| options.rack_key_file = Some(file)
}

#[test]
fn who_has_the_key_lends_and_borrows_and_others_are_not_heard() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| folder.path().join(name));
    write(&ours, &[1]);
    write(&theirs, &[2]);
    let a = Node::start("a", 1, 10, &[], with(&ours));
    let b = Node::start("b", 2, 85, &[&a], with(&ours));
    let other = Node::start("c", 3, 85, &[&a], with(&theirs));
    let none = Node::start("d", 4, 85, &[&a], |_| {});
    let mut program = Program::start(&b, 1, 60_000);
    program.wish(1, 128 * MIB);
    program.until("memory", |segments| (Program::ready_bytes(segments) == 128 * MIB).then_some(()));
    wait_for("both to be dropped", || (a.status().datagrams.unauthentic >= 4).then_some(()));
    for strange in [&other, &none] {
        assert_eq!(strange.status().peers, []);
    }
    let known: Vec<String> = a.status().peers.into_iter().map(|peer| peer.address).collect();
    assert_eq!(known, [b.address.to_string()]);
    assert_eq!(a.status().rack_keys, b.status().rack_keys);
    assert_ne!(a.status().rack_keys, other.status().rack_keys);
    assert_eq!(none.status().rack_keys, [""; 0]);
}

#[test]
fn keys_are_replaced_while_memory_is_lent() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| folder.path().join(name));
    files.iter().for_each(|file| write(file, &[1]));
    // Renewed often enough for a machine that stands still for some seconds.
    let lease = options("a", folder.path()).lease;
    let a = Node::start("a", 1, 10, &[], with(&files[0]));
    let b = Node::start("b", 2, 85, &[&a], with(&files[1]));
    let mut program = Program::start(&b, 1, 60_000);
    program.wish(1, 128 * MIB);
    program.until("memory", |segments| (Program::ready_bytes(segments) == 128 * MIB).then_some(()));
    let old = a.status().rack_keys;
    for keys in [&[1, 2][..], &[2, 1], &[2]] {
        for (file, node) in files.iter().zip([&a, &b]) {
            let before = node.status().rack_keys;
            write(file, keys);
            wait_for("the keys to be read", || {
                let now = node.status().rack_keys;
                (now.len() == keys.len() && now != before).then_some(())
            });
        }
        // The memory stays for longer than a lease.
        let begun = Instant::now();
        wait_for("a lease to pass", || (begun.elapsed() > lease).then_some(()));
    }
    assert_ne!(a.status().rack_keys, old);
    let (a, b) = (a.status(), b.status());
    assert_eq!((a.lent_bytes, a.grants_revoked, b.grants_lost), (128 * MIB, 0, 0));
    assert_eq!(a.datagrams.unauthentic + b.datagrams.unauthentic, 0);
}

#[test]
fn a_file_that_becomes_unusable_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    write(&file, &[1]);
    let a = Node::start("a", 1, 10, &[], with(&file));
    let keys = a.status().rack_keys;
    // The stream has no end: it is read until the event comes.
    let mut events = Client::new(&a.url, None).unwrap().events(0).unwrap();
    let mut wait_for_event = |text: &str| {
        let found = events.find(|event| event.as_ref().unwrap().detail.contains(text));
        assert!(found.is_some(), "no event says {text}");
    };
    std::fs::remove_file(&file).unwrap();
    wait_for_event("cannot be read");
    assert_eq!(a.status().rack_keys, keys);
    farpool_kernel::write_secret(&file, b"no key\n").unwrap();
    wait_for_event("/dev/urandom");
    assert_eq!(a.status().rack_keys, keys);
    write(&file, &[2, 1]);
    wait_for("the keys to be read", || (a.status().rack_keys.len() == 2).then_some(()));
    assert_eq!(a.status().rack_keys[1..], keys);
}

/// HELLO as nodes of the first version sent it.
fn hello_of_version_1() -> Vec<u8> {
    let mut bytes = b"FACM\x01\x01\x00\x00".to_vec();
    bytes.resize(44, 0);
    bytes
}

#[test]
fn a_node_of_an_older_version_is_told_apart() {
    let a = Node::start("a", 1, 10, &[], |_| {});
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(&hello_of_version_1(), a.address).unwrap();
    wait_for("it to be counted", || (a.status().datagrams.other_version == 1).then_some(()));
    let datagrams = a.status().datagrams;
    assert_eq!((datagrams.damaged, datagrams.unauthentic, datagrams.sent), (0, 0, 0));
}

#[test]
fn beyond_loopback_a_node_needs_a_rack_key_or_a_word_from_its_operator() {
    let folder = tempfile::tempdir().unwrap();
    let remote: SocketAddr = "10.0.0.1:7070".parse().unwrap();
    let with = |change: fn(&mut CollaborateOptions)| {
        let mut options = options("a", folder.path());
        (options.listen, options.allow_remote_tcp) = (remote, true);
        change(&mut options);
        options.check()
    };
    let error = with(|_| {}).unwrap_err();
    assert!(matches!(error, CollaborateError::NoRackKey(at) if at == remote), "{error}");
    let text = error.to_string();
    assert!(text.contains("--rack-key-file") && text.contains("--insecure"), "{text}");
    with(|options| options.insecure = true).unwrap();
    with(|options| options.rack_key_file = Some("/etc/farpool/rack.key".into())).unwrap();
    with(|options| options.listen = "127.0.0.1:7070".parse().unwrap()).unwrap();
    let beside = with(|options| {
        options.blade_listen = Some(options.listen);
        options.listen = "127.0.0.1:7070".parse().unwrap();
    });
    assert!(matches!(beside, Err(CollaborateError::NoRackKey(_))));
}

#[test]
fn a_node_does_not_start_with_a_key_that_others_may_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    write(&file, &[1]);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut options = options("a", folder.path());
    options.rack_key_file = Some(file);
    let seen =
        || Ok(Observation { total_bytes: 1 << 30, available_bytes: 0, pressure_permille: None });
    let error = Collaborator::start(options, seen).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
}

/// What is lent and holds no data comes back, and the program that wants it is told to leave.
#[test]
fn lent_memory_that_holds_no_data_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    write(&file, &[1]);
    let a = Node::start("a", 1, 10, &[], |options| {
        with(&file)(options);
        options.unused = Duration::from_secs(5);
    });
    let b = Node::start("b", 2, 85, &[&a], with(&file));
    let mut program = Program::start(&b, 1, 60_000);
    program.wish(1, 128 * MIB);
    program.until("memory", |segments| (Program::ready_bytes(segments) > 0).then_some(()));
    program.until("a word that it must leave", |segments| segments.is_empty().then_some(()));
    wait_for("A's memory to be free", || (a.status().lent_bytes == 0).then_some(()));
    let status = a.status();
    assert!(status.grants_unused >= 1, "{status:?}");
    assert_eq!(status.grants_cut_off, 0, "it was left in time");
}
