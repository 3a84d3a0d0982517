//! What a blade lends outlives its process, or is lost and said to be: never wrong.

mod common;

use common::*;
use farpool_blade::{
    BackingKind, BladeConfig, GrantError, GrantId, GrantSpec, GrantStat, Persist, Server, Serving,
};
use farpool_kernel::is_in_memory;
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// A place for a blade that ends and comes back.
struct Home(TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().unwrap())
    }

    /// In DRAM, as a donor's file has to be.
    fn in_memory() -> Home {
        Home(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn memory(&self) -> PathBuf {
        self.0.path().join("memory")
    }

    fn table(&self) -> PathBuf {
        self.0.path().join("memory.table")
    }

    fn config(&self, superpages: u64) -> BladeConfig {
        BladeConfig {
            backing: BackingKind::File(self.memory()),
            persist: Some(Persist::Restart),
            lease: Duration::from_secs(60),
            ..config_of(superpages)
        }
    }

    fn serve(&self, config: BladeConfig) -> Serving {
        let address = Address::Unix(self.0.path().join("blade.sock"));
        Server::bind(&[address], config).unwrap().serve().unwrap()
    }

    fn start(&self) -> Serving {
        self.serve(self.config(4))
    }
}

fn at(blade: &Serving) -> &Address {
    &blade.addresses()[0]
}

fn used_superpages(blade: &Serving) -> u64 {
    blade.stat().totals.used_bytes.get() / SUPERPAGE_BYTES
}

/// Copies the memory's table, as a process that is killed at this moment would leave it.
fn snapshot(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap();
}

#[test]
fn clients_find_what_they_stored_after_a_restart() {
    let home = Home::new();
    let blade = home.start();
    let id = blade.blade().id();
    assert_eq!((blade.blade().past().starts, blade.blade().past().bytes), (1, 0));
    let mut owner = Peer::hello(at(&blade), 1);
    let (segment, _) = owner.segment(2);
    let (shared, token) = owner.segment(1);
    owner.write(segment, 5, &pages(1, 8)).done();
    owner.write(shared, 0, &pages(2, 4)).done();
    owner.ask(&Request::Freeze { segment: shared }).done();
    owner.free(segment, 1, 1).done();
    drop(blade);

    let blade = home.start();
    assert_eq!(blade.blade().id(), id, "to its clients it is the same blade");
    let past = blade.blade().past();
    assert_eq!((past.starts, past.clients, past.segments), (2, 1, 2));
    assert_eq!((past.bytes, &past.loss), (2 * SUPERPAGE_BYTES, &None));
    let mut owner = Peer::hello(at(&blade), 1);
    assert!(owner.read(segment, 5, 8).pages == pages(1, 8));
    assert!(owner.read(shared, 0, 4).pages == pages(2, 4));
    assert_eq!(owner.read(segment, 4096, 1).refused(), Some(ErrorCode::NotAllocated));
    let frozen = owner.write(shared, 0, &pages(3, 1)).refused();
    assert_eq!(frozen, Some(ErrorCode::Frozen));
    let mut child = Peer::hello(at(&blade), 2);
    let attached = child.ask(&Request::Attach { token });
    assert!(matches!(attached.response(), Response::Attached(_)), "{attached:?}");
    assert!(child.read(shared, 0, 4).pages == pages(2, 4));
    let mut stranger = Peer::hello(at(&blade), 3);
    assert_eq!(stranger.read(segment, 5, 1).refused(), Some(ErrorCode::UnknownSegment));
    let (new, _) = stranger.segment(2);
    assert!(new.0 > shared.0, "a segment's id is not used again");
    assert!(stranger.read(new, 0, 256).pages.iter().all(|byte| *byte == 0));
    assert!(stranger.read(new, 4096, 256).pages.iter().all(|byte| *byte == 0));
}

/// A donor's blade: what is granted, and what has ended, is as before; only what is lent takes up
/// memory.
#[test]
fn grants_outlive_the_process_and_ended_ones_stay_ended() {
    const KEY: GrantKey = GrantKey(7);
    let spec = |id, epoch, key| GrantSpec {
        id: GrantId(id),
        epoch,
        key,
        bytes: 2 * SUPERPAGE_BYTES,
        read_bytes_per_s: 1 << 30,
        write_bytes_per_s: u64::MAX,
    };
    let home = Home::in_memory();
    let granting = || home.serve(BladeConfig { require_grants: true, ..home.config(4) });
    let file_bytes = || std::fs::metadata(home.memory()).unwrap().blocks() * 512;
    let come = |blade: &Serving, epoch| {
        let grant = Some(Grant { key: KEY, epoch });
        Peer::hello_with(at(blade), &Hello { grant, ..hello(1) })
    };
    let blade = granting();
    assert_eq!(file_bytes(), 0, "the rest is the donor's own");
    blade.blade().set_grant(&spec(1, 1, KEY)).unwrap();
    blade.blade().set_grant(&spec(2, 5, GrantKey(8))).unwrap();
    blade.blade().revoke_grant(GrantId(2), 5).unwrap();
    let (mut client, _) = come(&blade, 1);
    let (segment, _) = client.segment(2);
    client.write(segment, 9, &pages(1, 8)).done();
    client.free(segment, 1, 1).done();
    wait_until("one superpage takes up memory", || file_bytes() == SUPERPAGE_BYTES);
    let before = (blade.blade().grants(), blade.blade().grant_specs());
    drop(blade);

    let blade = granting();
    assert_eq!(blade.blade().past().bytes, SUPERPAGE_BYTES);
    assert_eq!(file_bytes(), SUPERPAGE_BYTES);
    assert_eq!(blade.blade().grant_specs(), before.1);
    let used = |grants: &[GrantStat]| (grants[0].used_bytes, grants[0].clients, grants.len());
    assert_eq!(used(&blade.blade().grants()), used(&before.0));
    let late = blade.blade().set_grant(&spec(2, 5, GrantKey(8)));
    assert_eq!(late, Err(GrantError::Stale { epoch: 5 }), "its end is remembered");
    let (_, stale) = come(&blade, 2);
    assert!(matches!(stale.response(), Response::Error { .. }), "{stale:?}");
    let (mut client, _) = come(&blade, 1);
    assert!(client.read(segment, 9, 8).pages == pages(1, 8));
    let (more, _) = client.segment(1);
    assert!(client.read(more, 0, 256).pages.iter().all(|byte| *byte == 0));
    let (third, _) = client.create(1);
    let refused = client.allocate(third, 0, 1).refused();
    assert_eq!(refused, Some(ErrorCode::QuotaExceeded), "what was lent is charged");
    let revoked = blade.blade().revoke_grant(GrantId(1), 1).unwrap();
    assert_eq!((revoked.clients, revoked.freed_bytes), (1, 2 * SUPERPAGE_BYTES));
    assert_eq!(file_bytes(), 0);
    drop(blade);
    assert!(granting().blade().grants().is_empty(), "it stays ended");
}

/// A file system of its own, which is taken down with it.
struct Small(TempDir);

impl Small {
    /// None, with a visible reason, if it cannot be mounted.
    fn mount(mib: u64) -> Option<Small> {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={mib}M");
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(Small(folder)),
            tried => {
                println!("SKIP a full file system: mount needs root: {tried:?}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

/// With a full file system a donor refuses memory, and can still free what it has lent: touching
/// memory that is not there would kill it, and so would a table that cannot be written.
#[test]
fn a_donor_whose_file_system_is_full_refuses_memory_and_frees_it() {
    const LENT: u64 = 3; // of 4 superpages that fit, one is left for the table
    let Some(small) = Small::mount(72) else { return };
    let config = BladeConfig {
        backing: BackingKind::File(small.0.path().join("memory")),
        require_grants: true,
        ..Home::in_memory().config(8)
    };
    let address = Address::Unix(small.0.path().join("blade.sock"));
    let blade = Server::bind(&[address], config).unwrap().serve().unwrap();
    let room = blade.blade().lent().unwrap().limit_bytes / SUPERPAGE_BYTES;
    assert_eq!(room, LENT, "what may be offered");
    let spec = GrantSpec {
        id: GrantId(1),
        epoch: 1,
        key: GrantKey(7),
        bytes: 8 * SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    };
    blade.blade().set_grant(&spec).unwrap();
    let grant = Some(Grant { key: GrantKey(7), epoch: 1 });
    let (mut client, _) = Peer::hello_with(at(&blade), &Hello { grant, ..hello(1) });
    let (segment, _) = client.create(8);
    assert_eq!(client.allocate(segment, 0, 8).refused(), Some(ErrorCode::BladeFull));
    for sma in 0..3 {
        assert_eq!(client.allocate(segment, sma, 1).refused(), None, "{sma}");
        client.write(segment, sma * 4096, &pages(1, 256)).done();
    }
    assert_eq!(client.allocate(segment, 3, 1).refused(), Some(ErrorCode::BladeFull));
    assert_eq!(used_superpages(&blade), LENT);
    client.free(segment, 0, 2).done();
    wait_until("two are free", || used_superpages(&blade) == 1);
    assert_eq!(client.allocate(segment, 3, 2).refused(), None);
    assert!(client.read(segment, 3 * 4096, 256).pages.iter().all(|byte| *byte == 0));
    assert!(client.read(segment, 2 * 4096, 256).pages == pages(1, 256));
    drop(blade);
}

#[test]
fn a_client_that_does_not_come_back_loses_its_memory_after_its_lease() {
    let home = Home::new();
    let blade = home.start();
    Peer::hello(at(&blade), 1).segment(3);
    drop(blade);
    let lease = Duration::from_millis(100);
    let blade = home.serve(BladeConfig { lease, ..home.config(4) });
    // Counted at the start: the lease may be over before anybody looks.
    assert_eq!(blade.blade().past().bytes, 3 * SUPERPAGE_BYTES);
    wait_until("the lease has run out", || used_superpages(&blade) == 0);
    drop(blade);
    assert_eq!(used_superpages(&home.start()), 0, "it stays gone");
}

#[test]
fn the_table_is_kept_before_an_answer_is_sent() {
    let (home, copy) = (Home::new(), tempfile::tempdir().unwrap());
    let blade = home.start();
    let mut client = Peer::hello(at(&blade), 1);
    let mut tables = Vec::new();
    let mut keep = || {
        let name = copy.path().join(tables.len().to_string());
        snapshot(&home.table(), &name);
        tables.push(name);
    };
    keep(); // 0: a client without segments
    let (segment, _) = client.create(4);
    keep(); // 1: an empty segment
    assert!(client.allocate(segment, 0, 3).refused().is_none());
    keep(); // 2: three superpages
    client.write(segment, 0, &pages(1, 1)).done();
    client.free(segment, 2, 1).done();
    keep(); // 3: two superpages
    client.ask(&Request::Detach { segment }).done();
    keep(); // 4: none
    client.ask(&Request::Goodbye).done();
    keep(); // 5: no client
    drop(blade);
    let found = tables.iter().map(|table| {
        snapshot(table, &home.table());
        let blade = home.start();
        let past = blade.blade().past();
        assert_eq!(past.loss, None);
        (past.clients, past.segments, past.bytes / SUPERPAGE_BYTES)
    });
    let found: Vec<_> = found.collect();
    assert_eq!(found, [(1, 0, 0), (1, 1, 0), (1, 1, 3), (1, 1, 2), (1, 0, 0), (0, 0, 0)]);
}

/// Memory whose table says that it is lent is lost if the file was made anew: it has only zeros.
#[test]
fn memory_that_was_made_anew_is_lost_and_not_zeros() {
    let home = Home::new();
    let blade = home.start();
    let id = blade.blade().id();
    let mut client = Peer::hello(at(&blade), 1);
    let (segment, _) = client.segment(1);
    client.write(segment, 0, &pages(1, 1)).done();
    drop(blade);
    std::fs::remove_file(home.memory()).unwrap();
    let blade = home.start();
    assert_ne!(blade.blade().id(), id, "its clients are told that it is another blade");
    let loss = blade.blade().past().loss.clone().unwrap();
    assert!(loss.contains("made anew"), "{loss}");
    assert!(loss.contains("memory.table.unusable"), "{loss}");
    let mut client = Peer::hello(at(&blade), 1);
    assert_eq!(client.read(segment, 0, 1).refused(), Some(ErrorCode::UnknownSegment));
}

/// The file is lent from by a blade that keeps no table: the table that lies there is not of that.
#[test]
fn a_blade_without_persistence_sets_the_table_aside() {
    let home = Home::new();
    let first = home.start();
    let id = first.blade().id();
    drop(first);
    let plain = home.serve(BladeConfig { persist: None, ..home.config(4) });
    let loss = plain.blade().past().loss.clone();
    assert!(loss.is_some_and(|it| it.contains("without --persist")), "and it says so");
    drop(plain);
    assert!(!home.table().exists());
    assert!(home.table().with_extension("table.unusable").exists());
    let next = home.start();
    assert_ne!(next.blade().id(), id, "clients are told that it is another blade");
    assert_eq!(next.blade().past().starts, 1);
}

#[test]
fn a_damaged_table_is_not_believed() {
    let home = Home::new();
    let blade = home.start();
    Peer::hello(at(&blade), 1).segment(2);
    drop(blade);
    let mut table = std::fs::read(home.table()).unwrap();
    let middle = table.len() / 2;
    table[middle] ^= 1;
    std::fs::write(home.table(), &table).unwrap();
    let blade = home.start();
    let past = blade.blade().past();
    assert!(past.loss.as_ref().is_some_and(|loss| loss.contains("damaged")), "{past:?}");
    assert_eq!((past.clients, used_superpages(&blade)), (0, 0));
    assert!(std::fs::read(home.0.path().join("memory.table.unusable")).unwrap() == table);
    drop(blade);
    assert_eq!(home.start().blade().past().loss, None, "it is said once");
}

/// A table that was written as a whole, and is that of no blade.
#[test]
fn a_table_that_no_blade_can_have_is_not_believed() {
    let home = Home::new();
    let blade = home.start();
    Peer::hello(at(&blade), 1).segment(2);
    drop(blade);
    rewrite_line(&home.table(), |line| line.replace("\"charged\":1", "\"charged\":2"));
    let blade = home.start();
    let past = blade.blade().past();
    assert!(past.loss.as_ref().is_some_and(|loss| loss.contains("fit together")), "{past:?}");
    assert_eq!(used_superpages(&blade), 0);
}

#[test]
fn what_cannot_outlive_a_process_is_refused() {
    let home = Home::new();
    for backing in [BackingKind::Memfd, BackingKind::Anonymous, BackingKind::Automatic] {
        let refused = refusal(BladeConfig { backing, ..home.config(4) });
        assert!(refused.contains("only memory in a file"), "{refused}");
    }
    if !is_in_memory(File::open(home.0.path()).unwrap()).unwrap() {
        let refused = refusal(BladeConfig { require_grants: true, ..home.config(4) });
        assert!(refused.contains("lies on a disk"), "{refused}");
        std::fs::remove_file(home.memory()).unwrap();
    }
    let blade = home.start();
    let (mut first, mut second) = (Peer::hello(at(&blade), 1), Peer::hello(at(&blade), 2));
    first.segment(3);
    second.segment(1);
    first.ask(&Request::Goodbye).done();
    drop(blade);
    let refused = refusal(home.config(1));
    assert!(refused.contains("as much memory as before"), "{refused}");
    let blade = home.start();
    assert_eq!(used_superpages(&blade), 1, "nothing is lost by the attempt");
}

#[test]
fn more_memory_may_be_lent_after_a_restart() {
    let home = Home::new();
    let blade = home.start();
    let mut client = Peer::hello(at(&blade), 1);
    let (segment, _) = client.segment(4);
    client.write(segment, 3 * 4096, &pages(1, 1)).done();
    drop(blade);
    let blade = home.serve(home.config(6));
    let mut client = Peer::hello(at(&blade), 1);
    assert!(client.read(segment, 3 * 4096, 1).pages == pages(1, 1));
    let (_, _) = Peer::hello(at(&blade), 2).segment(2);
    assert_eq!(used_superpages(&blade), 6);
}

#[test]
fn the_table_stays_short_and_its_owners() {
    let home = Home::new();
    let blade = home.start();
    let mut client = Peer::hello(at(&blade), 1);
    let (kept, _) = client.segment(1);
    client.write(kept, 0, &pages(7, 1)).done();
    let length = || std::fs::metadata(home.table()).unwrap().len();
    let mut longest = 0;
    wait_until("the table is written anew", || {
        for _ in 0..500 {
            let (segment, _) = client.create(1);
            client.ask(&Request::Detach { segment }).done();
        }
        longest = longest.max(length());
        length() < longest
    });
    assert!(longest < 4 << 20, "{longest} bytes");
    let mode = std::fs::metadata(home.table()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it has ids and tokens");
    drop(blade);
    let blade = home.start();
    let mut client = Peer::hello(at(&blade), 1);
    assert!(client.read(kept, 0, 1).pages == pages(7, 1));
    assert_eq!(client.read(kept, 0, 1).pages.len(), PAGE_BYTES);
}

/// The table says when the machine was started; here another start is written into it.
#[test]
fn an_orderly_reboot_is_outlived_where_that_was_asked_for() {
    for (persist, is_kept) in [(Persist::Restart, false), (Persist::Reboot, true)] {
        let home = Home::new();
        let blade = home.serve(BladeConfig { persist: Some(persist), ..home.config(4) });
        Peer::hello(at(&blade), 1).segment(2);
        drop(blade);
        rewrite_boot(&home.table());
        let blade = home.serve(BladeConfig { persist: Some(persist), ..home.config(4) });
        let past = blade.blade().past();
        assert_eq!((past.clients == 1, past.loss.is_none()), (is_kept, is_kept), "{past:?}");
    }
}

fn rewrite_boot(table: &Path) {
    let now = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    rewrite_line(table, |line| line.replace(now.trim(), "00000000-0000-4000-8000-000000000000"));
}

/// Changes one line or more, and their checksums.
fn rewrite_line(table: &Path, change: impl Fn(&str) -> String) {
    let text = std::fs::read_to_string(table).unwrap();
    let lines = text.lines().map(|line| {
        let changed = change(&line[9..]);
        format!("{:08x} {changed}\n", PagesChecksum::of(changed.as_bytes()))
    });
    let changed: String = lines.collect();
    assert_ne!(changed, text);
    std::fs::write(table, changed).unwrap();
}
