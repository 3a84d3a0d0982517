//! A blade with flash below its memory: what does not fit comes back as it was written, and what
//! flash garbles is refused.

mod common;

use common::flash::*;
use common::*;
use farpool_blade::{BackingKind, BladeConfig, FlashStat};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

struct World {
    blade: TestBlade,
    folder: TempDir,
}

impl World {
    fn start() -> World {
        World::start_with(|_| {})
    }

    fn start_with(change: impl FnOnce(&mut BladeConfig)) -> World {
        let folder = folder();
        let mut config = flash_config(folder.path().join("flash"));
        change(&mut config);
        World { blade: TestBlade::start(config), folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("flash")
    }

    fn stat(&self) -> FlashStat {
        self.blade.flash()
    }
}

#[test]
fn what_does_not_fit_in_memory_comes_back_from_flash() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    (0..BATCHES).for_each(|batch| client.write_batch(segment, batch, 0));
    // Over a socket of the other kind, one page at a time, from all over.
    for page in (0..LENT * 4096).step_by(997) {
        let found = client.read(segment, page, 1);
        let (batch, index) = (page / BATCH, (page % BATCH) as usize);
        let wanted = content(batch, 0);
        assert!(found.pages == wanted[index * PAGE_BYTES..][..PAGE_BYTES], "page {page}");
    }
    for batch in (0..BATCHES).step_by(3) {
        client.write_batch(segment, batch, 1);
    }
    (0..BATCHES).for_each(|batch| {
        client.check_batch(segment, batch, u64::from(batch % 3 == 0));
    });
    let stat = world.stat();
    assert!(stat.memory_used_bytes <= MEMORY * SUPERPAGE_BYTES, "{stat:?}");
    assert!(stat.pages_written > 0 && stat.pages_fetched > 0, "{stat:?}");
    assert_eq!((stat.pages_failed, stat.writes_failed), (0, 0));
    let totals = world.blade.serving.stat().totals;
    assert_eq!(totals.capacity_bytes.get(), u64::from(LENT) * SUPERPAGE_BYTES);
    client.ask(&Request::Goodbye).done();
    wait_until("its memory is free", || world.stat().memory_used_bytes == 0);
    // Nobody finds what another left, in memory or on flash.
    let mut other = world.blade.client(2);
    let (segment, _) = other.segment(LENT);
    for page in (0..LENT * 4096).step_by(509) {
        let found = other.read(segment, page, 1);
        assert!(found.pages.iter().all(|byte| *byte == 0), "page {page} is not zero");
    }
}

#[test]
fn requests_behind_one_for_flash_are_answered_in_order() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    spill(&world, &mut client, segment);
    // Few enough that the answers fit into the socket.
    const COUNT: u32 = 4;
    let part = |batch, round| content(batch, round)[..COUNT as usize * PAGE_BYTES].to_vec();
    let extents = |batch: u32| [Extent::new(PageNumber(batch * BATCH), COUNT)];
    let read = |client: &mut Peer, batch: u32| {
        client.send(&Request::Read { segment, extents: &extents(batch) }, &[])
    };
    // Cold, hot and cold again; a write in between is not overtaken.
    let asked = [0, BATCHES - 1, 20, 21, BATCHES - 2, 22, 23];
    let mut ids: Vec<_> = asked.iter().map(|batch| read(&mut client, *batch)).collect();
    ids.push(client.send(&Request::Write { segment, extents: &extents(24) }, &part(24, 1)));
    ids.push(read(&mut client, 24));
    for (at, id) in ids.into_iter().enumerate() {
        let answer = client.receive().unwrap();
        assert_eq!(answer.header.request_id, id);
        match (at, asked.get(at)) {
            (_, Some(batch)) => assert!(answer.pages == part(*batch, 0), "batch {batch}"),
            (7, None) => answer.done(),
            _ => assert!(answer.pages == part(24, 1), "it was written before"),
        }
    }
}

#[test]
fn what_fits_in_memory_never_goes_to_flash() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    for round in 0..3 {
        (0..96).for_each(|batch| client.write_batch(segment, batch, round));
        (0..96).for_each(|batch| client.check_batch(segment, batch, round));
    }
    assert_eq!((world.stat().pages_written, world.stat().pages_fetched), (0, 0));
}

#[test]
fn discarded_pages_give_their_memory_back() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    (0..64).for_each(|batch| client.write_batch(segment, batch, 0));
    assert_eq!(world.stat().memory_used_bytes, 64 << 20);
    let extents = [Extent::new(PageNumber(256), 16 * 256)];
    client.ask(&Request::Discard { segment, extents: &extents }).done();
    assert_eq!(world.stat().memory_used_bytes, 48 << 20);
    client.check_batch(segment, 0, 0);
    client.check_batch(segment, 17, 0);
    assert!(client.read(segment, 256, 1).pages.iter().all(|byte| *byte == 0));
}

/// Fills the blade, so that the first batches are on flash only.
fn spill(world: &World, client: &mut Peer, segment: SegmentId) {
    (0..BATCHES).for_each(|batch| client.write_batch(segment, batch, 0));
    world.blade.wait_until_quiet();
}

#[test]
fn flash_shows_nothing_of_what_is_there() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    let sentence = b"nobody but its client is to read this sentence. ";
    let page: Vec<u8> =
        sentence.iter().copied().cycle().take(BATCH as usize * PAGE_BYTES).collect();
    for batch in 0..BATCHES {
        client.write(segment, batch * 256, &page).done();
    }
    wait_until("pages are on flash", || world.stat().pages_written > 16 * 4096);
    let bytes = std::fs::read(world.path()).unwrap();
    assert!(bytes.starts_with(b"farpool blade's flash 1\n"));
    assert!(bytes[1 << 20..].iter().any(|byte| *byte != 0), "something was written");
    assert!(!bytes.windows(8).step_by(4).any(|it| it == &sentence[..8]), "it is in clear");
}

/// Spoils the place of one superpage on flash, and checks that its pages are refused or right.
fn check_spoiled(what: &str, spoil: impl FnOnce(&File)) {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    spill(&world, &mut client, segment);
    spoil(&File::options().read(true).write(true).open(world.path()).unwrap());
    let mut refused = 0;
    for batch in 0..BATCHES {
        if !client.has_batch(segment, batch, 0) {
            refused += 1;
            // Written anew, it is as good as before.
            client.write_batch(segment, batch, 0);
        }
    }
    assert!(refused > 0 && refused <= 16, "{what}: {refused} batches are refused");
    assert!(world.stat().pages_failed > 0, "{what}");
    (0..BATCHES).for_each(|batch| client.check_batch(segment, batch, 0));
}

/// Changes one page in each MiB of the superpage that was given out first, which is the first on
/// flash.
fn change_pages(file: &File, change: impl Fn(&mut [u8])) {
    for page in (0..4096).step_by(256) {
        let (mut bytes, at) = (vec![0; PAGE_BYTES], DATA_AT + page * PAGE_BYTES as u64);
        file.read_exact_at(&mut bytes, at).unwrap();
        change(&mut bytes);
        file.write_all_at(&bytes, at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn what_flash_garbles_is_refused() {
    check_spoiled("a flipped bit", |file| change_pages(file, |bytes| bytes[1234] ^= 16));
    check_spoiled("zeros", |file| change_pages(file, |bytes| bytes.fill(0)));
    check_spoiled("another page", |file| {
        let mut other = vec![0; PAGE_BYTES];
        file.read_exact_at(&mut other, DATA_AT + 5 * PAGE_BYTES as u64).unwrap();
        change_pages(file, |bytes| bytes.copy_from_slice(&other));
    });
}

#[test]
fn an_older_state_of_flash_is_refused() {
    let world = World::start();
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    spill(&world, &mut client, segment);
    let older = std::fs::read(world.path()).unwrap();
    // Twice, so that every page has been on flash anew.
    for round in [1, 2] {
        (0..BATCHES).for_each(|batch| client.write_batch(segment, batch, round));
    }
    world.blade.wait_until_quiet();
    std::fs::write(world.path(), older).unwrap();
    let is_refused = |batch: &u32| !client.has_batch(segment, *batch, 2);
    let refused = (0..BATCHES).filter(is_refused).count();
    assert!(refused > BATCHES as usize / 2, "{refused}");
}

#[test]
fn many_clients_at_once_find_what_they_wrote() {
    const CLIENTS: u32 = 6;
    let world = World::start();
    std::thread::scope(|scope| {
        for id in 0..CLIENTS {
            let world = &world;
            scope.spawn(move || {
                let address = if id % 2 == 0 { world.blade.unix() } else { world.blade.tcp() };
                let mut client = Peer::hello(address, u128::from(id) + 1);
                let (segment, _) = client.segment(3);
                let batches: u32 = 3 * 4096 / 16;
                let mut rounds = vec![0; batches as usize];
                let mut random = u64::from(id) + 1;
                for step in 0..6000u64 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let batch = u32::try_from((random >> 33) % u64::from(batches)).unwrap();
                    let round = &mut rounds[batch as usize];
                    let seed = |round| u64::from(id) << 32 | u64::from(batch) << 16 | round;
                    if *round == 0 || random >> 20 & 1 == 0 {
                        *round = step + 1;
                        client.write(segment, batch * 16, &pages(seed(*round), 16)).done();
                    } else {
                        let found = client.read(segment, batch * 16, 16);
                        assert!(found.pages == pages(seed(*round), 16), "{id}: batch {batch}");
                    }
                }
            });
        }
    });
    assert!(world.stat().memory_used_bytes <= MEMORY * SUPERPAGE_BYTES);
}

#[test]
fn writes_faster_than_flash_may_take_wait() {
    const RATE: u64 = 32 << 20;
    let world = World::start_with(|config| {
        config.flash.as_mut().unwrap().write_bytes_per_s = Some(RATE);
    });
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT);
    let begin = std::time::Instant::now();
    // 64 MiB more than fit: about 2 s at that rate.
    (0..192).for_each(|batch| client.write_batch(segment, batch, 0));
    let written_bytes = world.stat().pages_written * PAGE_BYTES as u64;
    let limit_bytes = begin.elapsed().as_secs_f64() * RATE as f64 + (4 << 20) as f64;
    assert!(written_bytes as f64 <= limit_bytes, "{written_bytes} of {limit_bytes}");
    assert!(written_bytes >= 48 << 20, "{written_bytes}");
    (0..192).for_each(|batch| client.check_batch(segment, batch, 0));
}

#[test]
fn a_peer_that_leaves_while_it_waits_harms_nobody() {
    let world = World::start_with(|config| {
        // Nothing can leave memory: who needs more waits.
        config.flash.as_mut().unwrap().write_bytes_per_s = Some(1);
    });
    let mut client = world.blade.client(1);
    let (segment, _) = client.segment(LENT - 1);
    // All memory but a thirty-second, which is left to reads. A burst of the rate may leave first.
    const MOST: u64 = (128 - 4) << 20;
    const LITTLE: u32 = 16;
    let mut page = 0;
    loop {
        if page >= 120 * BATCH {
            world.blade.wait_until_quiet();
        }
        let free = (MOST - world.stat().memory_used_bytes) / PAGE_BYTES as u64;
        if free < u64::from(LITTLE) {
            break;
        }
        let count = free.min(u64::from(BATCH));
        client.write(segment, page, &pages(7, usize::try_from(count).unwrap())).done();
        page += u32::try_from(count).unwrap();
    }
    let mut leaving = world.blade.client(2);
    let (other, _) = leaving.segment(1);
    let extents = [Extent::new(PageNumber(0), LITTLE)];
    let bytes = pages(1, LITTLE as usize);
    leaving.send(&Request::Write { segment: other, extents: &extents }, &bytes);
    drop(leaving);
    wait_until("its memory is free", || world.blade.serving.stat().clients.len() == 1);
    let found = client.read(segment, 0, BATCH);
    assert!(found.pages == pages(7, BATCH as usize));
}

#[test]
fn what_is_of_no_use_as_flash_is_refused_with_words() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let refused = |change: &dyn Fn(&mut BladeConfig), path: &Path| {
        let mut config = flash_config(path.to_owned());
        change(&mut config);
        refusal(config)
    };
    let nothing = |_: &mut BladeConfig| {};
    let small = refused(&|config| config.memory_bytes = 64 << 20, &path("a"));
    assert!(small.contains("needs 128 MiB of memory"), "{small}");
    let larger = refused(&|config| config.memory_bytes = 1 << 30, &path("a"));
    assert!(larger.contains("no larger than memory"), "{larger}");
    let kind = refused(&|config| config.backing = BackingKind::Memfd, &path("a"));
    assert!(kind.contains("memory is anonymous"), "{kind}");
    let grants = refused(&|config| config.require_grants = true, &path("a"));
    assert!(grants.contains("flash is for a blade"), "{grants}");
    assert!(!path("a").exists(), "a refusal leaves nothing");

    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let in_memory = refused(&nothing, &memory.path().join("flash"));
    assert!(in_memory.contains("lies in memory"), "{in_memory}");
    assert_eq!(std::fs::read_dir(memory.path()).unwrap().count(), 0, "it is taken away again");

    std::fs::write(path("letter"), "somebody's letter").unwrap();
    std::fs::set_permissions(path("letter"), PermissionsExt::from_mode(0o600)).unwrap();
    let letter = refused(&nothing, &path("letter"));
    assert!(letter.contains("would be overwritten"), "{letter}");
    assert_eq!(std::fs::read(path("letter")).unwrap(), b"somebody's letter");

    std::fs::write(path("open"), "").unwrap();
    std::fs::set_permissions(path("open"), PermissionsExt::from_mode(0o644)).unwrap();
    let open = refused(&nothing, &path("open"));
    assert!(open.contains("chmod 600"), "{open}");
    assert!(refused(&nothing, Path::new("/dev/null")).contains("no file and no block device"));

    let blade = TestBlade::start(flash_config(path("used")));
    let used = refused(&nothing, &path("used"));
    assert!(used.contains("another process uses the file"), "{used}");
    drop(blade);
    // What an earlier process left is taken over, and is of no use to anybody.
    let blade = TestBlade::start(flash_config(path("used")));
    let mut client = blade.client(1);
    let (segment, _) = client.segment(1);
    assert!(client.read(segment, 0, 256).pages.iter().all(|byte| *byte == 0));
}
