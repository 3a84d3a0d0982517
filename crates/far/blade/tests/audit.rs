//! What a blade notes of those who come, and of those whom it refuses.

mod common;

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::*;
use farpool_audit::AuditLog;
use farpool_blade::{BladeConfig, GrantId, GrantSpec};
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::*;

/// A blade of so many superpages with a log.
fn blade_of(superpages: u64, config: BladeConfig) -> (TestBlade, PathBuf, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit.log");
    let audit = Some(Arc::new(AuditLog::open(&path).expect("a log")));
    let memory_bytes = superpages * SUPERPAGE_BYTES;
    let blade = TestBlade::start(BladeConfig { audit, memory_bytes, ..config });
    (blade, path, folder)
}

/// What was intended and is not known to be done, by the lines on the disk.
fn open_intents(path: &Path) -> Vec<String> {
    let file = std::fs::File::open(path).expect("a log");
    let verified = farpool_audit::verify(BufReader::new(file), None).expect("as written");
    verified.open.into_values().collect()
}

/// What the log says besides that it was opened and what was intended, once the blade has ended:
/// who, what, outcome.
fn told(path: &Path) -> Vec<(String, String, u64)> {
    assert_eq!(open_intents(path), [""; 0]);
    let text = std::fs::read_to_string(path).expect("a log");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines = lines.skip(1).filter(|line: &serde_json::Value| line.get("intent").is_none());
    let lines = lines.map(|line| {
        let text = |name: &str| line[name].as_str().expect("text").to_owned();
        (text("who"), text("what"), line["outcome"].as_u64().expect("a number"))
    });
    lines.collect()
}

#[test]
fn who_came_and_who_was_refused_is_on_the_disk() {
    let (blade, path, _folder) = blade_of(2, config_of(2));
    let mut client = blade.client(1);
    let (segment, own_token) = client.create(8);
    client.allocate(segment, 0, 2);
    let refused = client.allocate(segment, 2, 1).refused().expect("there is no more");
    let token = SegmentToken(7);
    let unknown = client.ask(&Request::Attach { token }).refused().expect("nobody has it");
    // It says what others see of it: all of it is a line of the log.
    let hostile = Hello { name: "a\"}\n{\"number\":9", ..hello(1) };
    let (_peer, answer) = Peer::hello_with(blade.tcp(), &hostile);
    let other = answer.refused().expect("it is a client of this user");
    drop(blade);
    let own = format!("user {}", rustix::process::geteuid().as_raw());
    let host = "somebody of this host".to_owned();
    let all = told(&path);
    let whats: Vec<_> = all.iter().map(|(who, what, code)| (who, what.as_str(), *code)).collect();
    assert_eq!(whats[0], (&own, "hello of Client \"test\"", 0), "{all:?}");
    assert_eq!((whats[1].0, whats[1].2), (&own, u64::from(refused.number())), "{all:?}");
    assert!(whats[1].1.starts_with("allocate 1 x 16 MiB: "), "{all:?}");
    assert_eq!((whats[2].0, whats[2].2), (&own, u64::from(unknown.number())), "{all:?}");
    assert!(whats[2].1.starts_with("attach memory of another client: "), "{all:?}");
    assert_eq!((whats[3].0, whats[3].2), (&host, u64::from(other.number())), "{all:?}");
    assert!(whats[3].1.starts_with("hello of Client \"a\\\"}\\n"), "{all:?}");
    assert_eq!(whats.len(), 4, "{all:?}");
    let text = std::fs::read_to_string(&path).expect("a log");
    let secrets = [format!("{:x}", own_token.0), own_token.0.to_string()];
    assert!(secrets.iter().all(|secret| !text.contains(secret)), "{text}");
}

#[test]
fn what_the_node_orders_is_noted() {
    let (blade, path, _folder) = blade_of(4, BladeConfig { require_grants: true, ..config_of(4) });
    let spec = GrantSpec {
        id: GrantId(77),
        epoch: 3,
        key: GrantKey(0xfeed_beef),
        bytes: SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    };
    blade.serving.blade().set_grant(&spec).expect("set");
    let text = std::fs::read_to_string(&path).expect("a log");
    assert!(text.contains("\"intent\":true"), "it was on the disk before it was done: {text}");
    blade.serving.blade().revoke_grant(spec.id, 3).expect("revoked");
    blade.serving.blade().set_grant(&spec).expect_err("it was revoked");
    for superpages in [4, 2, 2] {
        blade.serving.blade().set_capacity(superpages * SUPERPAGE_BYTES).expect("within its size");
    }
    drop(blade);
    let all = told(&path);
    let whats: Vec<_> = all.iter().map(|(_, what, code)| (what.as_str(), *code == 0)).collect();
    assert_eq!(whats[0], ("set grant 77 of epoch 3", true), "{all:?}");
    assert_eq!(whats[1], ("revoke grant 77 up to epoch 3", true), "{all:?}");
    assert!(whats[2].0.starts_with("set grant 77 of epoch 3: ") && !whats[2].1, "{all:?}");
    assert!(!whats[2].0.contains("the client"), "no client asked: {all:?}");
    assert_eq!(whats[3..], [("lend 33554432 bytes", true)], "only what changed: {all:?}");
    assert!(all.iter().all(|(who, ..)| who == "its node"), "{all:?}");
    let text = std::fs::read_to_string(&path).expect("a log");
    assert!(!text.contains("feedbeef") && !text.contains("4276993775"), "{text}");
}

/// The file's folder is gone, and the file has reached its limit: there is no next one.
#[test]
fn without_its_log_a_blade_takes_no_further_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit.log");
    let log = AuditLog::open_with_limit(&path, 1).expect("a log");
    let blade = TestBlade::start(BladeConfig { audit: Some(Arc::new(log)), ..config_of(2) });
    std::fs::remove_dir_all(folder.path()).expect("removed");
    let mut first = blade.client(1);
    wait_until("a client to be refused", || {
        let (_peer, answer) = Peer::hello_with(blade.unix(), &hello(2));
        answer.refused() == Some(ErrorCode::Backing)
    });
    first.ask(&Request::Ping).done();
    let (segment, _) = first.create(8);
    assert_eq!(first.allocate(segment, 0, 1).refused(), None, "who is there goes on");
    std::fs::create_dir(folder.path()).expect("there again");
    wait_until("clients to be taken again", || {
        let (_peer, answer) = Peer::hello_with(blade.unix(), &hello(3));
        answer.refused().is_none()
    });
    drop(blade);
    assert!(told(&path).iter().any(|(_, what, _)| what.starts_with("hello of Client")));
}
