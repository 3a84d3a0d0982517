//! Backups, restores and upgrades of a store, killed at every step.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{Agent, Process, SUPERPAGE, join_client, small};
use farpool_api::{ClientId, ClientReport, SegmentFilter, SegmentId};
use farpool_control::store::backup::restore_redb;
use farpool_control::store::version::{STORE_VERSION, VERSION_KEY, version_of};
use farpool_control::store::{RedbStore, Store, StoreOp};

/// Segments in the backup.
const BEFORE: u128 = 20;
/// Segments after further changes.
const AFTER: u128 = 35;

/// A store with changes after a backup.
struct Changed {
    folder: tempfile::TempDir,
    backup: String,
    /// The highest epoch given, after the backup.
    epoch: u64,
}

impl Changed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start(&folder.path().join("store").display().to_string());
        let api = process.client();
        let mut node = Agent::join(&api, "n0", 1_000 * SUPERPAGE);
        let client = join_client(&api, 1, "n0");
        for number in 1..=BEFORE {
            api.put_segment(SegmentId::from_u128(number), &small(client)).unwrap();
        }
        node.settle(&api);
        let backup = api.backup().unwrap();
        for number in BEFORE + 1..=AFTER {
            api.put_segment(SegmentId::from_u128(number), &small(client)).unwrap();
        }
        node.settle(&api);
        let epoch = node.answer.grants.iter().map(|grant| grant.epoch).max().unwrap();
        std::fs::write(folder.path().join("backup"), &backup).unwrap();
        Self { folder, backup, epoch }
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }
}

/// Starts a controller on a store. Returns it and the number of its segments.
fn started(store: &Path) -> (Process, u128) {
    let process = Process::start(&store.display().to_string());
    let page = process.client().segments(&SegmentFilter::default()).unwrap();
    let count = page.segments.len() as u128;
    (process, count)
}

#[test]
fn a_restore_that_is_killed_at_any_step_leaves_the_old_store_or_the_new_one() {
    let changed = Changed::new();
    let program = std::env::current_exe().unwrap();
    let program = program.parent().unwrap().parent().unwrap().join("examples/store_steps");
    assert!(program.exists(), "cargo build -p farpool-control --examples");
    let mut seen = Vec::new();
    for step in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        std::fs::copy(changed.store(), &store).unwrap();
        let run = || {
            let backup = changed.folder.path().join("backup");
            Command::new(&program).arg(&store).arg(backup).arg(step.to_string()).status().unwrap()
        };
        let is_past = run().success();
        let (process, count) = started(&store);
        assert!(count == BEFORE || count == AFTER, "step {step}: {count} segments");
        seen.push(count);
        drop(process);
        if is_past {
            break;
        }
        // Whatever it left, a restore can be tried again.
        let again = Command::new(&program)
            .arg(&store)
            .arg(changed.folder.path().join("backup"))
            .arg("1000")
            .status();
        assert!(again.unwrap().success());
        assert_eq!(started(&store).1, BEFORE);
    }
    assert!(seen.contains(&AFTER) && seen.last() == Some(&BEFORE), "{seen:?}");
    println!("restores killed at {} steps", seen.len() - 1);
}

#[test]
fn a_restored_store_gives_no_number_again_and_remembers_events() {
    let changed = Changed::new();
    let store = changed.folder.path().join("other");
    let steps = &mut |_: &str| {};
    let backup = &changed.backup;
    restore_redb(&store, backup, false, steps).unwrap();
    let (process, count) = started(&store);
    assert_eq!(count, BEFORE);
    let api = process.client();
    let client = ClientId::from_u128(1);
    let id = SegmentId::from_u128(1_000);
    let fresh = api.put_segment(id, &small(client)).unwrap();
    assert!(fresh.epoch > changed.epoch, "an epoch was given again");
    assert_eq!(
        api.report_client(client, &ClientReport::default()).unwrap().segments.len() as u128,
        BEFORE + 1
    );
    let first = api.events(0).unwrap().next().unwrap().unwrap();
    assert_eq!(first.kind, "node-joined");
    assert!(first.time_unix_ms > 1_700_000_000_000, "the clock's time: {}", first.time_unix_ms);
}

#[test]
fn a_restored_file_is_its_owners_like_the_one_that_it_replaces() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let changed = Changed::new();
    let store = changed.store();
    let rights = |path: &Path| {
        let found = path.metadata().unwrap();
        (found.uid(), found.gid(), found.mode() & 0o777)
    };
    let fresh = changed.folder.path().join("fresh");
    let mut steps = |step: &str| {
        let new = fresh.with_file_name("fresh.restoring");
        let is_there = ["allotted", "made", "written"].contains(&step);
        assert!(!is_there || rights(&new).2 == 0o600, "others may read it: {step}");
    };
    restore_redb(&fresh, &changed.backup, false, &mut steps).unwrap();
    assert_eq!(rights(&fresh).2, 0o600, "it holds keys");
    std::fs::set_permissions(&store, std::fs::Permissions::from_mode(0o640)).unwrap();
    // A service's file, restored by the operator; without the right to give it away, one's own.
    if rustix::process::geteuid().is_root() {
        chown(&store, Some(12_345), Some(23_456)).unwrap();
    }
    let before = rights(&store);
    restore_redb(&store, &changed.backup, true, &mut |_| {}).unwrap();
    assert_eq!(rights(&store), before);
}

/// Makes a store as Farpool 0.2 left it.
fn age(store: &Path) -> usize {
    let mut store = RedbStore::open(store).unwrap();
    let pairs = store.load().unwrap();
    let is_new = |key: &&String| *key == VERSION_KEY || key.starts_with("event/");
    let gone = pairs.iter().map(|(key, _)| key).filter(is_new).cloned().map(StoreOp::Delete);
    store.commit(&gone.collect::<Vec<_>>()).unwrap();
    let pairs = store.load().unwrap();
    assert_eq!(version_of(&pairs).unwrap(), Some(1));
    pairs.len()
}

#[test]
fn an_upgrade_that_is_killed_loses_nothing_and_the_old_version_is_kept() {
    let changed = Changed::new();
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let mut versions = Vec::new();
    for round in 0..40 {
        std::fs::copy(changed.store(), &store).unwrap();
        let records = age(&store);
        let kept = folder.path().join("store.version-1");
        // One of an earlier upgrade, after which somebody went back.
        std::fs::write(&kept, "stale").unwrap();
        let mut child = Command::new(common::serve_program())
            .arg(&store)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // From before it opens the store until long after.
        std::thread::sleep(Duration::from_micros(round * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        let pairs = RedbStore::open(&store).unwrap().load().unwrap();
        let version = version_of(&pairs).unwrap().unwrap();
        versions.push(version);
        if version == STORE_VERSION {
            // The way back: the copy takes the store's place.
            let mut kept = RedbStore::open(&kept).unwrap();
            let kept = kept.load().unwrap();
            assert_eq!((kept.len(), version_of(&kept).unwrap()), (records, Some(1)));
        }
        assert_eq!(started(&store).1, AFTER, "round {round}");
    }
    println!("killed upgrades left these versions: {versions:?}");
}

#[test]
fn a_store_of_the_future_is_refused_and_left_alone() {
    let changed = Changed::new();
    let future = StoreOp::Put(VERSION_KEY.to_owned(), br#"{"store":99}"#.to_vec());
    RedbStore::open(&changed.store()).unwrap().commit(&[future]).unwrap();
    let before = RedbStore::open(&changed.store()).unwrap().load().unwrap();
    let refused = Command::new(common::serve_program()).arg(changed.store()).output().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("99"), "{said}");
    assert_eq!(RedbStore::open(&changed.store()).unwrap().load().unwrap(), before);
}
