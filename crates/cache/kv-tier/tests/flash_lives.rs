//! Lives of a flash that end at every step of opening and closing it, by a kill or with the
//! machine: what is found again was there before, nothing forgotten is found, and no file is left
//! in memory.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use farpool_kv_store::index::Place;
use farpool_kv_store::item::{AccessTime, ItemParts};
use farpool_kv_store::record::{self, Record};
use farpool_kv_tier::flash::layout::{Superblock, Use};
use farpool_kv_tier::flash::opening::Dropped;
use farpool_kv_tier::flash::{
    self, Bookkeeping, Flash, FlashError, FlashFile, FlashMemory, FlashSettings, Step,
};
use farpool_kv_tier::log::Judge;
use tempfile::TempDir;

const NOW_UNIX_S: i64 = 1_700_000_000;
/// Size at which twenty records fill a zone.
const VALUE_BYTES: usize = 100_000;

/// A judge under which nothing is read back or moved.
struct Nobody;

impl Judge for Nobody {
    fn keeps(&mut self, _: u64, _: Place) -> bool {
        false
    }
    fn knows(&mut self, _: u64, _: Place) -> bool {
        true
    }
    fn moved(&mut self, _: u64, _: Place, _: Place) {}
    fn dropped(&mut self, _: &Record<'_>, _: Place) {}
}

fn record_of(hash: u64) -> Vec<u8> {
    let key = format!("key{hash}");
    let value = vec![u8::try_from(hash % 251).unwrap(); VALUE_BYTES];
    let parts = ItemParts { key: key.as_bytes(), value: [&value, b""], ..ItemParts::default() };
    let header = parts.header(AccessTime(0), 0);
    let mut item = vec![0; header.item_bytes()];
    parts.write(header, &mut item);
    let mut out = Vec::new();
    record::push(&mut out, hash, hash, &item);
    out
}

/// A flash, and a folder in memory for its bookkeeping.
struct World {
    disk: TempDir,
    memory: TempDir,
    /// Whether the bookkeeping is to be there.
    is_in_memory: bool,
}

/// The findings in an opened flash.
struct Life {
    file: FlashFile,
    log: Flash,
    found: Vec<(u64, Place)>,
    damaged_zones: u64,
}

impl Life {
    fn hashes(&self) -> BTreeSet<u64> {
        self.found.iter().map(|it| it.0).collect()
    }

    fn append(&mut self, hashes: std::ops::Range<u64>) {
        for hash in hashes {
            let place = self.log.append_or_wait(&record_of(hash), &mut Nobody);
            self.found.push((hash, place.expect("there is room")));
        }
    }

    fn forget(&mut self, hashes: std::ops::Range<u64>) {
        for (_, place) in self.found.iter().filter(|it| hashes.contains(&it.0)) {
            self.log.forget(*place);
        }
    }

    /// Waits for the zones to be written, and returns the file.
    fn finish(mut self) -> FlashFile {
        assert!(flash::close(&mut self.log, &mut Nobody), "the device answers");
        self.file
    }
}

impl World {
    fn new(is_in_memory: bool) -> Self {
        let disk = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        Self { disk, memory, is_in_memory }
    }

    fn path(&self) -> PathBuf {
        self.disk.path().join("flash")
    }

    fn settings_of(&self, path: &Path) -> FlashSettings {
        let books = if self.is_in_memory {
            Bookkeeping::Only(self.memory.path().to_owned())
        } else {
            // This directory is not in memory.
            Bookkeeping::Preferably(vec![self.disk.path().to_owned()])
        };
        let path = path.to_owned();
        FlashSettings { path, bytes: 48 << 20, reset: false, write_bytes_per_s: None, books }
    }

    fn open(&self) -> Life {
        self.open_path(&self.path()).unwrap()
    }

    fn open_path(&self, path: &Path) -> Result<Life, FlashError> {
        let settings = self.settings_of(path);
        let file = FlashFile::open(&settings, 1, NOW_UNIX_S)?;
        assert_eq!(file.book_path().is_some(), self.is_in_memory);
        let mut found = Vec::new();
        let mut take = |it: flash::Recovered| {
            found.push((it.hash, it.place));
            true
        };
        let (log, findings) = FlashMemory::log(&file, 0, &settings, &mut take)?;
        Ok(Life { file, log, found, damaged_zones: findings.damaged_zones })
    }

    /// Opens it and is killed at this step.
    fn open_until(&self, step: Step) {
        let settings = self.settings_of(&self.path());
        let dies = |now: Step| {
            if now == step {
                resume_unwind(Box::new(()));
            }
        };
        let run = || FlashFile::open_telling(&settings, 1, NOW_UNIX_S, &mut { dies });
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "it comes to {step:?}");
    }

    /// A closed flash with 40 items, the first ten of which are forgotten.
    fn filled(is_in_memory: bool) -> Self {
        let world = Self::new(is_in_memory);
        let mut life = world.open();
        assert_eq!(life.file.dropped(), None);
        life.append(1..41);
        life.forget(1..11);
        life.finish().close().unwrap();
        assert_eq!(world.superblock().state, Use::Clean);
        assert_eq!(world.files(), 0, "nothing is left in memory");
        world
    }

    fn witness(&self) -> PathBuf {
        self.disk.path().join("flash.witness")
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.memory.path()).unwrap().count()
    }

    fn the_file(&self) -> PathBuf {
        std::fs::read_dir(self.memory.path()).unwrap().next().unwrap().unwrap().path()
    }

    fn superblock(&self) -> Superblock {
        Superblock::decode(&std::fs::read(self.path()).unwrap()).unwrap()
    }

    /// Simulates a crash of the machine: memory is gone, the device has these bytes.
    fn machine_goes_down(&self, device: &[u8]) {
        for entry in std::fs::read_dir(self.memory.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let mut bytes = device.to_vec();
        let superblock = Superblock { boot_id: [7; 16], ..Superblock::decode(&bytes).unwrap() };
        bytes[..Superblock::BYTES].copy_from_slice(&superblock.encode());
        std::fs::write(self.path(), &bytes).unwrap();
    }

    /// Opens it, expects exactly these items, and closes it cleanly; then the same once more, with
    /// nothing left behind.
    fn expect(&self, wanted: &BTreeSet<u64>, why: &str) {
        for round in 0..2 {
            let life = self.open();
            assert_eq!(&life.hashes(), wanted, "{why}, round {round}");
            assert_eq!(life.damaged_zones, 0, "{why}");
            life.finish().close().unwrap();
            assert_eq!(self.files(), 0, "{why}: a file is left in memory");
        }
    }
}

const OPENING: [Step; 5] =
    [Step::Chosen, Step::Prepared, Step::Named, Step::Witnessed, Step::InUse];
const CLOSING: [Step; 3] = [Step::BookWritten, Step::Witnessed, Step::Closed];

fn set(hashes: std::ops::Range<u64>) -> BTreeSet<u64> {
    hashes.collect()
}

#[test]
fn a_kill_while_a_closed_flash_is_opened_changes_nothing() {
    for (is_in_memory, step) in OPENING.iter().flat_map(|it| [(true, it), (false, it)]) {
        let world = World::filled(is_in_memory);
        world.open_until(*step);
        world.expect(&set(11..41), &format!("killed at {step:?}"));
        // The same again, twice in a row.
        world.open_until(*step);
        world.open_until(*step);
        world.expect(&set(11..41), &format!("killed twice at {step:?}"));
    }
}

#[test]
fn the_machine_may_go_down_while_a_flash_is_opened() {
    for (is_in_memory, step) in OPENING.iter().flat_map(|it| [(true, it), (false, it)]) {
        let world = World::filled(is_in_memory);
        world.open_until(*step);
        let bytes = std::fs::read(world.path()).unwrap();
        world.machine_goes_down(&bytes);
        let is_in_use = *step == Step::InUse;
        let wanted = if is_in_use { BTreeSet::new() } else { set(11..41) };
        world.expect(&wanted, &format!("down at {step:?}"));
    }
}

/// A life that forgets and appends, and is killed: while it runs, or at a step of closing.
fn second_life(world: &World, end: Option<Step>) {
    let mut life = world.open();
    assert_eq!(life.hashes(), set(11..41));
    life.forget(11..21);
    life.append(41..51);
    let file = life.finish();
    let Some(end) = end else { return };
    let dies = |now: Step| {
        if now == end {
            resume_unwind(Box::new(()));
        }
    };
    let run = AssertUnwindSafe(|| file.close_telling(&mut { dies }));
    assert!(catch_unwind(run).is_err(), "it comes to {end:?}");
}

#[test]
fn a_kill_while_it_runs_or_is_closed_forgets_and_loses_nothing() {
    let ends: Vec<_> = [None].into_iter().chain(CLOSING.map(Some)).collect();
    for (is_in_memory, end) in ends.into_iter().flat_map(|it| [(true, it), (false, it)]) {
        let world = World::filled(is_in_memory);
        second_life(&world, end);
        // Its successor is killed at each step of opening.
        OPENING.iter().for_each(|&step| world.open_until(step));
        world.expect(&set(21..51), &format!("killed at {end:?}"));
    }
}

#[test]
fn when_the_machine_goes_down_nothing_forgotten_comes_back() {
    for (is_in_memory, end) in [true, false]
        .into_iter()
        .flat_map(|it| [None].into_iter().chain(CLOSING.map(Some)).map(move |end| (it, end)))
    {
        let world = World::filled(is_in_memory);
        second_life(&world, end);
        let after = std::fs::read(world.path()).unwrap();
        world.machine_goes_down(&after);
        let is_closed = end == Some(Step::Closed);
        let life = world.open();
        let wanted = if is_closed { set(21..51) } else { BTreeSet::new() };
        assert_eq!(life.hashes(), wanted, "down at {end:?}");
        let dropped = (!is_closed).then_some(Dropped::MachineDown);
        assert_eq!(life.file.dropped(), dropped);
    }
}

#[test]
fn book_keeping_that_failed_its_sums_is_never_believed_later() {
    // After the superblock and before the zones.
    const BOOK: std::ops::Range<usize> = 4096..2 << 20;
    for (is_in_memory, step) in OPENING.iter().flat_map(|it| [(true, it), (false, it)]) {
        let world = World::filled(is_in_memory);
        let before = std::fs::read(world.path()).unwrap();
        let mut life = world.open();
        life.forget(11..21);
        life.finish().close().unwrap();
        // The device has lost the forget bits set since then.
        let mut bytes = std::fs::read(world.path()).unwrap();
        bytes[BOOK].copy_from_slice(&before[BOOK]);
        std::fs::write(world.path(), &bytes).unwrap();
        world.open_until(*step);
        assert_eq!(world.open().hashes(), BTreeSet::new(), "killed at {step:?}");
    }
}

#[test]
fn a_file_in_memory_is_believed_only_whole_and_for_its_flash() {
    let world = World::filled(true);
    second_life(&world, None);
    let (flash, book) =
        (std::fs::read(world.path()).unwrap(), std::fs::read(world.the_file()).unwrap());
    let name = world.the_file();
    let spoil: [(&str, &dyn Fn(), Dropped); 5] = [
        ("gone", &|| std::fs::remove_file(&name).unwrap(), Dropped::MemoryGone),
        (
            "cut short",
            &|| std::fs::write(&name, &book[..book.len() / 2]).unwrap(),
            Dropped::MemoryDamaged,
        ),
        (
            "a damaged header",
            &|| {
                // Inverted: the byte there is random, and may be any.
                let mut damaged = book.clone();
                damaged[30] ^= 0xff;
                std::fs::write(&name, damaged).unwrap();
            },
            Dropped::MemoryDamaged,
        ),
        (
            "somebody's letter",
            &|| std::fs::write(&name, b"letter").unwrap(),
            Dropped::MemoryDamaged,
        ),
        (
            "a link",
            &|| {
                let other = name.with_file_name("other");
                std::fs::rename(&name, &other).unwrap();
                std::os::unix::fs::symlink(&other, &name).unwrap();
            },
            Dropped::MemoryGone,
        ),
    ];
    for (what, spoil, why) in spoil {
        std::fs::write(world.path(), &flash).unwrap();
        std::fs::write(&name, &book).unwrap();
        spoil();
        let life = world.open();
        assert_eq!((life.file.dropped(), life.found.len()), (Some(why), 0), "{what}");
        life.finish().close().unwrap();
        for entry in std::fs::read_dir(world.memory.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
    std::fs::write(world.path(), &flash).unwrap();
    std::fs::write(&name, &book).unwrap();
    // It was not modified, so it is trusted.
    world.expect(&set(21..51), "brought back");
}

#[test]
fn a_forget_bit_that_is_gone_costs_its_zone() {
    let world = World::filled(true);
    drop(world.open());
    let mut book = std::fs::read(world.the_file()).unwrap();
    // After superblock, control page, table and sums, one page each.
    let bits = 4096 * 4;
    let at = (bits..book.len()).find(|&at| book[at] != 0).expect("something is forgotten");
    book[at] &= book[at] - 1;
    std::fs::write(world.the_file(), &book).unwrap();
    let life = world.open();
    assert_eq!(life.damaged_zones, 1);
    let found = life.hashes();
    assert!(found.is_subset(&set(11..41)), "{found:?}");
    assert!(found.len() >= 10 && found.len() < 30, "one zone is gone: {found:?}");
}

#[test]
fn a_copy_of_a_flash_in_use_does_not_take_its_book_keeping() {
    let world = World::filled(true);
    let life = world.open();
    let copy = world.disk.path().join("copy");
    std::fs::copy(world.path(), &copy).unwrap();
    let other = world.open_path(&copy).unwrap();
    assert_eq!((other.file.dropped(), other.found.len()), (Some(Dropped::MemoryGone), 0));
    assert_eq!(world.files(), 2, "each has its own");
    assert_eq!(life.hashes(), set(11..41));
    // The first server is killed, and the copy's server starts again: it leaves the first one's
    // file alone.
    drop(life);
    other.finish().close().unwrap();
    world.open_path(&copy).unwrap().finish().close().unwrap();
    world.expect(&set(11..41), "beside a copy");
}

#[test]
fn two_servers_never_share_a_flash_or_its_book_keeping() {
    let world = World::filled(true);
    let life = world.open();
    let refused = world.open_path(&world.path()).map(|_| ()).unwrap_err();
    assert!(matches!(refused, FlashError::InUse { .. }), "{refused}");
    drop(life);
    let held = std::fs::File::open(world.the_file()).unwrap();
    held.lock().unwrap();
    let refused = world.open_path(&world.path()).map(|_| ()).unwrap_err();
    assert!(matches!(refused, FlashError::InUse { .. }), "{refused}");
    assert_eq!(world.files(), 1, "it was left alone");
    drop(held);
    world.expect(&set(11..41), "when it was let go");
}

#[test]
fn an_earlier_flash_that_was_brought_back_does_not_meet_later_book_keeping() {
    let world = World::filled(true);
    let life = world.open();
    let earlier = std::fs::read(world.path()).unwrap();
    life.finish().close().unwrap();
    second_life(&world, None);
    std::fs::write(world.path(), &earlier).unwrap();
    let life = world.open();
    assert_eq!((life.file.dropped(), life.found.len()), (Some(Dropped::MemoryGone), 0));
    assert_eq!(world.files(), 1, "what no flash names any more is gone");
    life.finish().close().unwrap();
    assert_eq!(world.files(), 0);
}

/// After a life in which items were forgotten, ended in every way, its successor is killed at every
/// step; then the file as it was before that life is put back in place.
#[test]
fn an_older_copy_of_a_closed_flash_is_begun_empty() {
    let ends: Vec<_> = [None].into_iter().chain(CLOSING.map(Some)).collect();
    for (is_in_memory, end) in ends.into_iter().flat_map(|it| [(true, it), (false, it)]) {
        for step in [None].into_iter().chain(OPENING.map(Some)) {
            let world = World::filled(is_in_memory);
            let older = std::fs::read(world.path()).unwrap();
            second_life(&world, end);
            if let Some(step) = step {
                world.open_until(step);
            }
            std::fs::write(world.path(), &older).unwrap();
            let life = world.open();
            let why = format!("ended at {end:?}, killed at {step:?}");
            assert_eq!(life.hashes(), BTreeSet::new(), "{why}");
            assert_eq!(life.file.dropped(), Some(Dropped::OlderCopy), "{why}");
            life.finish().close().unwrap();
            world.expect(&BTreeSet::new(), &why);
        }
    }
}

#[test]
fn a_flash_without_its_witness_is_begun_empty_unless_none_could_be_kept() {
    for is_in_memory in [true, false] {
        let world = World::filled(is_in_memory);
        std::fs::remove_file(world.witness()).unwrap();
        let life = world.open();
        assert_eq!((life.file.dropped(), life.found.len()), (Some(Dropped::WitnessGone), 0));
        life.finish().close().unwrap();
        // Both together may go elsewhere.
        let world = World::filled(is_in_memory);
        let other = world.disk.path().join("other");
        std::fs::rename(world.path(), &other).unwrap();
        std::fs::rename(world.witness(), other.with_file_name("other.witness")).unwrap();
        let life = world.open_path(&other).unwrap();
        assert_eq!((life.file.dropped(), life.hashes()), (None, set(11..41)));
    }
    // A name that leaves no room for the witness's.
    let world = World::new(true);
    let long = world.disk.path().join("f".repeat(250));
    let mut life = world.open_path(&long).unwrap();
    life.append(1..41);
    life.finish().close().unwrap();
    assert_eq!(world.open_path(&long).unwrap().hashes(), set(1..41));
    // The process ended when it had made one that names nothing.
    std::fs::remove_file(world.witness()).ok();
    let other = world.disk.path().join("e".repeat(200));
    std::fs::rename(&long, &other).unwrap();
    let mut witness = other.clone().into_os_string();
    witness.push(".witness");
    std::fs::write(&witness, []).unwrap();
    assert_eq!(world.open_path(&other).unwrap().hashes(), set(1..41));
    // Something is in the way of a witness.
    let world = World::new(true);
    std::os::unix::fs::symlink("nowhere", world.witness()).unwrap();
    let refused = world.open_path(&world.path()).map(|_| ()).unwrap_err();
    assert!(matches!(refused, FlashError::Io { .. }), "{refused}");
    assert!(!world.path().exists(), "a refused start leaves nothing behind");
}

#[test]
fn book_keeping_moves_into_memory_and_out_of_it_between_two_lives() {
    let mut world = World::filled(false);
    second_life(&world, None);
    assert_eq!(world.superblock().state, Use::InUse);
    world.is_in_memory = true;
    let life = world.open();
    assert_eq!(world.superblock().state, Use::InMemory);
    assert_eq!(life.hashes(), set(21..51));
    life.finish().close().unwrap();
    world.is_in_memory = false;
    world.expect(&set(21..51), "back in the flash");
    // After a kill it cannot move: the bookkeeping in the flash is outdated.
    world.is_in_memory = true;
    drop(world.open());
    world.is_in_memory = false;
    let life = world.open();
    assert_eq!((life.file.dropped(), life.found.len()), (Some(Dropped::MemoryGone), 0));
}

#[test]
fn a_directory_that_is_not_in_memory_is_refused_when_it_was_asked_for() {
    let world = World::new(true);
    let books = Bookkeeping::Only(world.disk.path().to_owned());
    let settings = FlashSettings { books, ..world.settings_of(&world.path()) };
    let refused = FlashFile::open(&settings, 1, NOW_UNIX_S).map(|_| ()).unwrap_err();
    let FlashError::Bookkeeping { .. } = &refused else { panic!("{refused}") };
    assert!(refused.to_string().contains("tmpfs"), "{refused}");
}

#[test]
fn a_file_of_which_threads_could_use_only_a_part_is_refused() {
    let world = World::new(true);
    let open = |bytes| {
        let settings = FlashSettings { bytes, ..world.settings_of(&world.path()) };
        FlashFile::open(&settings, 2, NOW_UNIX_S).map(|_| ()).unwrap_err()
    };
    let refused = open(5 << 40);
    let FlashError::TooLarge { shards: 2, most, .. } = &refused else { panic!("{refused}") };
    assert!((2 << 40..2 << 40 | 1 << 33).contains(most), "1 TiB a thread and book-keeping: {most}");
    assert!(refused.to_string().contains("more threads"), "{refused}");
    // So much can be used; this disk does not have it.
    let refused = open(*most);
    assert!(!matches!(refused, FlashError::TooLarge { .. }), "{refused}");
}
