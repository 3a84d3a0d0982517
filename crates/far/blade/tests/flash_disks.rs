//! Flash on a real device that is slow, hangs, fails, is full or returns other bytes: a read gives
//! what was written or is refused, nobody waits for what is in memory, and the blade can end.

mod common;

use common::flash::*;
use common::*;
use farpool_testkit::disk::{Disk, Fault, Mounted};
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::*;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = DATA_AT + LENT as u64 * SUPERPAGE_BYTES;
/// Batches that were written last and are still in memory: 64 MiB of 128.
const HOT: std::ops::Range<u32> = BATCHES - 64..BATCHES;
/// Batches that are on flash only.
const COLD: std::ops::Range<u32> = 0..BATCHES - 128;
/// Longer than anything that does not wait for the disk takes.
const SOON: Duration = Duration::from_secs(20);

struct World {
    // Dropped first: it may wait for the disk.
    blade: TestBlade,
    client: Peer,
    segment: SegmentId,
    token: SegmentToken,
    disk: Disk,
}

impl World {
    /// None if there can be no such disk here.
    fn start() -> Option<World> {
        let disk = Disk::start(DISK_BYTES)?;
        let path = disk.device.path().to_owned();
        Some(World::on(disk, path))
    }

    /// A blade with this flash, which is on the disk.
    fn on(disk: Disk, path: PathBuf) -> World {
        let blade = TestBlade::start(flash_config(path));
        let mut client = blade.client(1);
        let (segment, token) = client.segment(LENT);
        World { blade, client, segment, token, disk }
    }

    /// The same, with all that it lends written.
    fn filled() -> Option<World> {
        World::start().map(World::fill_all)
    }

    fn fill_all(mut self) -> World {
        self.fill(0);
        self.blade.wait_until_quiet();
        self
    }

    fn fill(&mut self, round: u64) {
        (0..BATCHES).for_each(|batch| self.client.write_batch(self.segment, batch, round));
    }

    /// Another client that asks for a batch which is on flash only; the segment must be frozen.
    fn ask_for_cold(&self, id: u128) -> Peer {
        let mut peer = self.blade.client(id);
        let attached = peer.ask(&Request::Attach { token: self.token });
        let Response::Attached(Attached { segment, .. }) = attached.response() else {
            panic!("{attached:?}");
        };
        let extents = [Extent::new(PageNumber(COLD.start * BATCH), BATCH)];
        peer.send(&Request::Read { segment, extents: &extents }, &[]);
        peer
    }

    fn count_refused(&mut self, batches: std::ops::Range<u32>, round: u64) -> usize {
        let World { client, segment, .. } = self;
        batches.filter(|batch| !client.has_batch(*segment, *batch, round)).count()
    }
}

#[test]
fn a_disk_that_returns_other_bytes_is_found_out() {
    let Some(mut world) = World::filled() else { return };
    for fault in [Fault::FlipBits, Fault::Zeros, Fault::Elsewhere, Fault::FailReads] {
        world.disk.faults.set_from(fault, DATA_AT);
        let refused = world.count_refused(COLD, 0);
        assert!(refused > COLD.len() / 2, "{fault:?}: {refused}");
        world.disk.faults.set(Fault::None);
        // Flash itself is whole.
        assert_eq!(world.count_refused(0..BATCHES, 0), 0, "{fault:?}");
    }
    assert!(world.blade.flash().pages_failed > 0);
}

#[test]
fn a_disk_that_loses_or_tears_writes_is_found_out() {
    for fault in [Fault::LoseWrites, Fault::TearWrites] {
        let Some(mut world) = World::filled() else { return };
        world.disk.faults.set_from(fault, DATA_AT);
        // Twice, so that every page has gone to flash anew.
        (1..3).for_each(|round| world.fill(round));
        world.blade.wait_until_quiet();
        let refused = world.count_refused(COLD, 2);
        assert!(refused > COLD.len() / 2, "{fault:?}: {refused}");
        world.disk.faults.set(Fault::None);
        world.fill(3);
        assert_eq!(world.count_refused(0..BATCHES, 3), 0, "{fault:?}");
    }
}

#[test]
fn a_disk_that_takes_no_writes_means_refusals_in_time() {
    for fault in [Fault::FailWrites, Fault::Full] {
        let Some(mut world) = World::start() else { return };
        let World { blade, client, segment, disk, .. } = &mut world;
        let segment = *segment;
        disk.faults.set_from(fault, DATA_AT);
        let begin = Instant::now();
        let mut written = 0;
        let refused = loop {
            let answer = client.write(segment, written * BATCH, &content(written, 0));
            match answer.refused() {
                None => written += 1,
                refused => break refused,
            }
        };
        assert_eq!(refused, Some(ErrorCode::Backing), "{fault:?}");
        assert!((100..=128).contains(&written), "{written} MiB are in memory");
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        // What is in memory stays there and is served, and nothing more is lent.
        (0..written).for_each(|batch| client.check_batch(segment, batch, 0));
        client.write_batch(segment, 0, 1);
        client.check_batch(segment, 0, 1);
        client.free(segment, LENT - 1, 1).done();
        wait_until("it is free", || blade.serving.stat().totals.used_bytes.get() < 24 << 24);
        let answer = client.allocate(segment, LENT - 1, 1);
        assert_eq!(answer.refused(), Some(ErrorCode::Backing), "{fault:?}");
        assert!(blade.flash().writes_failed > 0);
        disk.faults.set(Fault::None);
        wait_until("flash takes writes again", || {
            client.write(segment, written * BATCH, &content(written, 0)).refused().is_none()
        });
        (written + 1..BATCHES - 16).for_each(|batch| client.write_batch(segment, batch, 0));
        (1..BATCHES - 16).for_each(|batch| client.check_batch(segment, batch, 0));
        client.check_batch(segment, 0, 1);
    }
}

/// Hangs the disk from this byte on: who does not need it goes on, and the others do after that.
fn check_hanging(mut world: World, first: u64) {
    world.client.ask(&Request::Freeze { segment: world.segment }).done();
    world.disk.faults.set_from(Fault::Hang, first);
    // More than the blade has threads.
    let mut waiting: Vec<_> = (2..10).map(|id| world.ask_for_cold(id)).collect();
    wait_until("the disk is asked", || world.disk.faults.done() > 0);
    let begin = Instant::now();
    assert_eq!(world.count_refused(HOT, 0), 0);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    // One of them has enough.
    drop(waiting.pop());
    world.disk.faults.set(Fault::None);
    for peer in &mut waiting {
        assert!(peer.receive().unwrap().pages == content(0, 0));
    }
}

#[test]
fn a_disk_that_hangs_stops_nobody_else() {
    let Some(world) = World::filled() else { return };
    check_hanging(world, DATA_AT);
}

/// A file system waits for its disk in other places than a device does.
#[test]
fn a_file_on_a_disk_that_hangs_stops_nobody_else() {
    let Some(disk) = Disk::start(2 * DISK_BYTES) else { return };
    let folder = folder();
    let at = folder.path().join("mounted");
    let Some(_mounted) = Mounted::ext4(disk.device.path(), &at) else { return };
    check_hanging(World::on(disk, at.join("flash")).fill_all(), 0);
}

#[test]
fn a_blade_ends_while_its_disk_hangs() {
    let Some(world) = World::filled() else { return };
    let World { blade, mut client, segment, disk, .. } = world;
    disk.faults.set_from(Fault::Hang, DATA_AT);
    client.send(&Request::Read { segment, extents: &[Extent::new(PageNumber(0), BATCH)] }, &[]);
    wait_until("the disk is asked", || disk.faults.done() > 0);
    let begin = Instant::now();
    drop(blade);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    assert!(client.is_closed());
}

#[test]
fn a_slow_disk_delays_only_who_asks_for_it() {
    let Some(mut world) = World::filled() else { return };
    world.disk.faults.set_from(Fault::Slow(Duration::from_millis(300)), DATA_AT);
    world.client.ask(&Request::Freeze { segment: world.segment }).done();
    let mut cold = world.ask_for_cold(2);
    assert_eq!(world.count_refused(HOT, 0), 0);
    assert!(cold.receive().unwrap().pages == content(0, 0));
    assert!(world.disk.faults.done() > 0, "the disk was asked");
}
