//! Far memory that is damaged where it lies is found, and made anew where there is another copy.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use common::{Blades, allocate, sample};
use farpool_blade::{BackingKind, BladeConfig};
use farpool_pool::{
    Alone, BladeIndex, Damage, DamageOutcome, Lane, Mover, PageError, Pool, PoolConfig, Redundancy,
    SegmentHandle, Step, VERIFY_LIMIT_PAGES, VerifyPoint,
};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};

const SUPERPAGES: u32 = 2;
/// Pages that are written ([`sample`]), in one copy.
const PAGES: u64 = SUPERPAGES as u64 * 5;

/// Blades whose memory is a file that the test can damage, and a pool on them.
struct Trial {
    files: Vec<PathBuf>,
    _folder: tempfile::TempDir,
    _blades: Blades,
    pool: Pool,
    segment: SegmentHandle,
    lane: Lane,
}

impl Trial {
    /// A pool that has written, and lost no blade by it: on a busy machine one may be silent for so
    /// long that it is given up.
    fn new(blades: usize, redundancy: Redundancy) -> Trial {
        let trials = std::iter::repeat_with(|| Trial::begin(blades, redundancy));
        let mut whole = trials.take(10).filter(|trial| trial.pool.lost().is_empty());
        whole.next().expect("a trial with all blades")
    }

    fn begin(blades: usize, redundancy: Redundancy) -> Trial {
        // On a disk that is busy a blade is silent for so long that it is given up.
        let folder = tempfile::tempdir_in("/dev/shm").expect("folder");
        let files: Vec<_> = (0..blades).map(|at| folder.path().join(at.to_string())).collect();
        let mut all = Blades::start(&[]);
        for file in &files {
            let config = BladeConfig {
                memory_bytes: 4 * SUPERPAGE_BYTES,
                backing: BackingKind::File(file.clone()),
                ..BladeConfig::default()
            };
            all.add("tcp", config);
        }
        let config = PoolConfig { seals_pages: true, redundancy, ..common::config(&all) };
        let pool = Pool::connect(config).expect("connect");
        let segment = allocate(&pool, SUPERPAGES);
        let lane = pool.lane().expect("lane");
        let mut trial = Trial { files, _folder: folder, _blades: all, pool, segment, lane };
        trial.write(1);
        trial
    }

    /// Writes the sample with the pattern of `seed + page`.
    fn write(&mut self, seed: u64) {
        write(&mut self.lane, self.segment, seed);
    }

    /// Reads the sample; true if it has the pattern of `seed + page`.
    fn reads(&mut self, seed: u64) -> Result<bool, PageError> {
        reads(&mut self.lane, self.segment, seed)
    }

    /// Flips a bit of one stored page of a blade: that of this position among those written.
    fn damage(&self, blade: usize, position: usize) {
        let file = File::options().read(true).write(true).open(&self.files[blade]).expect("file");
        let mut page = [0; PAGE_BYTES];
        let pages = file.metadata().expect("size").len() / PAGE_BYTES as u64;
        let offsets = (0..pages).map(|page| page * PAGE_BYTES as u64);
        let mut stored = offsets.filter(|offset| {
            file.read_exact_at(&mut page, *offset).expect("read");
            page != [0; PAGE_BYTES]
        });
        let offset = stored.nth(position).expect("so many are stored") + 100;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).expect("read");
        file.write_all_at(&[byte[0] ^ 4], offset).expect("written");
    }

    /// Verifies all far memory once. Returns the pages that are right, and what is not.
    fn verify(&self, limit: usize) -> (u64, Vec<Damage>) {
        pass(&mut Mover::new(&self.pool), limit)
    }

    /// Makes the copies that are missing.
    fn complete(&self) -> u64 {
        let (mut mover, mut made) = (Mover::new(&self.pool), 0);
        while mover.complete_copies(&Alone).expect("made") == Step::Moved {
            made += 1;
        }
        made
    }
}

fn write(lane: &mut Lane, segment: SegmentHandle, seed: u64) {
    common::write(lane, segment, &sample(SUPERPAGES), seed);
}

fn reads(lane: &mut Lane, segment: SegmentHandle, seed: u64) -> Result<bool, PageError> {
    common::reads(lane, segment, &sample(SUPERPAGES), seed)
}

fn pass(mover: &mut Mover<'_>, limit: usize) -> (u64, Vec<Damage>) {
    let (mut pages, mut damages, mut from) = (0, Vec::new(), VerifyPoint::default());
    loop {
        let verified = mover.verify(from, limit);
        pages += verified.pages;
        damages.extend(verified.damages);
        match verified.next {
            Some(next) => from = next,
            None => return (pages, damages),
        }
    }
}

#[test]
fn every_written_page_of_every_copy_is_verified() {
    let trial = Trial::new(2, Redundancy::Copies(2));
    for limit in [1, 3, VERIFY_LIMIT_PAGES, usize::MAX] {
        assert_eq!(trial.verify(limit), (2 * PAGES, Vec::new()), "{limit} at a time");
    }
}

#[test]
fn a_damaged_copy_is_made_anew() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    trial.damage(1, 3);
    let (_, damages) = trial.verify(2);
    let [damage] = damages[..] else { panic!("one is damaged: {damages:?}") };
    assert_eq!((damage.blade, damage.pages), (BladeIndex(1), 1), "{damage:?}");
    assert_eq!(damage.outcome, DamageOutcome::Replaced);
    assert!(!trial.pool.has_all_copies());
    assert_eq!(trial.complete(), 1);
    assert!(trial.pool.has_all_copies());
    assert_eq!(trial.verify(VERIFY_LIMIT_PAGES), (2 * PAGES, Vec::new()));
    assert_eq!(trial.reads(1), Ok(true));
}

/// Of a group every superpage is, also its parity, which nobody reads while no blade is lost.
#[test]
fn what_is_damaged_of_a_group_is_made_anew_of_the_rest() {
    let rows = PAGES / u64::from(SUPERPAGES);
    let mut trial = Trial::new(5, Redundancy::Parity);
    let used: Vec<usize> = (0..5).filter(|it| trial.files[*it].exists()).collect();
    let used: Vec<usize> = used
        .into_iter()
        .filter(|it| trial.pool.superpages_on(BladeIndex(u8::try_from(*it).expect("few"))) > 0)
        .collect();
    assert_eq!(used.len(), 3, "two members and their parity");
    for blade in used {
        trial.damage(blade, 3);
        let (_, damages) = trial.verify(2);
        let [damage] = damages[..] else { panic!("one is damaged: {damages:?}") };
        assert_eq!(usize::from(damage.blade.0), blade, "{damage:?}");
        assert_eq!((damage.pages, damage.outcome), (1, DamageOutcome::Replaced));
        assert!(!trial.pool.has_all_copies());
        // A blade frees memory a moment after the last write to it was answered.
        while !trial.pool.has_all_copies() {
            trial.complete();
        }
        assert_eq!(trial.verify(VERIFY_LIMIT_PAGES), (PAGES + rows, Vec::new()));
        assert_eq!(trial.reads(1), Ok(true));
    }
}

#[test]
fn what_a_read_finds_damaged_is_looked_at_first() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    // Where the last step of a pass begins, which meets nothing of the first superpage.
    let mut mover = Mover::new(&trial.pool);
    let steps = std::iter::successors(Some(VerifyPoint::default()), |at| mover.verify(*at, 1).next);
    let steps: Vec<_> = steps.collect();
    let last = steps[steps.len() - 2];
    drop(mover);
    trial.damage(0, 0);
    // It may be the copy that is read now and then only.
    for _ in 0..200 {
        assert_eq!(trial.reads(1), Ok(true), "the other copy is right");
    }
    assert!(trial.pool.has_suspects());
    let verified = Mover::new(&trial.pool).verify(last, 1);
    let outcomes: Vec<_> = verified.damages.iter().map(|it| (it.blade, it.outcome)).collect();
    assert_eq!(outcomes, [(BladeIndex(0), DamageOutcome::Replaced)]);
    assert!(!trial.pool.has_suspects());
    assert_eq!(trial.complete(), 1);
}

#[test]
fn copies_with_different_damage_are_both_kept_and_told_once_a_pass() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    trial.damage(0, 0);
    trial.damage(1, 1);
    let mut mover = Mover::new(&trial.pool);
    for _ in 0..2 {
        let (_, damages) = pass(&mut mover, 1);
        let kept = damages.iter().filter(|it| it.outcome == DamageOutcome::Kept);
        assert_eq!((kept.count(), damages.len()), (2, 2), "{damages:?}");
    }
    let (lane, segment) = (&mut trial.lane, trial.segment);
    assert_eq!(reads(lane, segment, 1), Ok(true), "each page is right somewhere");
    assert!(trial.pool.has_suspects());
    // However often they are read, the pass goes on and tells of them once.
    let (mut from, mut steps, mut told) = (Some(VerifyPoint::default()), 0, 0);
    while let Some(point) = from {
        let verified = mover.verify(point, 1);
        assert_eq!(reads(lane, segment, 1), Ok(true));
        (from, steps, told) = (verified.next, steps + 1, told + verified.damages.len());
    }
    assert_eq!(told, 2);
    assert_eq!(steps, 2 * PAGES + 1, "a page in each step, and the end");
    trial.write(2);
    assert_eq!(trial.verify(2).1, [], "what is written anew is right");
}

#[test]
fn of_three_copies_two_are_made_anew_of_the_one_that_is_whole() {
    let trial = Trial::new(3, Redundancy::Copies(3));
    trial.damage(0, 0);
    trial.damage(1, 3);
    let (_, damages) = trial.verify(VERIFY_LIMIT_PAGES);
    let outcomes: Vec<_> = damages.iter().map(|it| it.outcome).collect();
    assert_eq!(outcomes, [DamageOutcome::Replaced; 2], "{damages:?}");
    assert_eq!(trial.complete(), 2);
    assert_eq!(trial.verify(VERIFY_LIMIT_PAGES), (3 * PAGES, Vec::new()));
}

/// Its blade refuses to free memory of a segment that is being written.
#[test]
fn a_copy_is_made_anew_while_the_program_writes() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    let is_over = AtomicBool::new(false);
    for _ in 0..10 {
        trial.damage(1, 0);
        is_over.store(false, Relaxed);
        let (pool, segment, lane) = (&trial.pool, trial.segment, &mut trial.lane);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Until then the damage may be written over.
                while !is_over.load(Relaxed) {
                    write(lane, segment, 1);
                }
            });
            let mut mover = Mover::new(pool);
            pass(&mut mover, VERIFY_LIMIT_PAGES);
            while !pool.has_all_copies() {
                let step = mover.complete_copies(&Alone).expect("there is room");
                assert!(step != Step::Empty || pool.has_all_copies(), "a copy is left out");
            }
            is_over.store(true, Relaxed);
        });
        assert_eq!(trial.reads(1), Ok(true));
    }
    assert_eq!(trial.verify(VERIFY_LIMIT_PAGES), (2 * PAGES, Vec::new()));
}

#[test]
fn without_another_copy_damage_is_told_before_it_is_read() {
    let mut trial = Trial::new(1, Redundancy::Copies(1));
    trial.damage(0, 9);
    let (_, damages) = trial.verify(4);
    let [damage] = damages[..] else { panic!("one is damaged: {damages:?}") };
    assert_eq!((damage.pages, damage.outcome), (1, DamageOutcome::Lost));
    assert_eq!(trial.reads(1), Err(PageError::Forged));
    trial.write(2);
    assert_eq!(trial.reads(2), Ok(true));
}

#[test]
fn frozen_memory_is_verified_and_kept() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    let _token = trial.pool.freeze(trial.segment).expect("frozen");
    trial.damage(0, 2);
    let (_, damages) = trial.verify(VERIFY_LIMIT_PAGES);
    let outcomes: Vec<_> = damages.iter().map(|it| it.outcome).collect();
    assert_eq!(outcomes, [DamageOutcome::Kept], "others may use it");
    assert_eq!(trial.reads(1), Ok(true));
}

#[test]
fn memory_that_is_not_sealed_is_left_alone() {
    let blades = Blades::start(&["tcp"]);
    let pool = Pool::connect(common::config(&blades)).expect("connect");
    let segment = allocate(&pool, SUPERPAGES);
    write(&mut pool.lane().expect("lane"), segment, 1);
    assert_eq!(pass(&mut Mover::new(&pool), 8), (0, Vec::new()));
}

/// A page that is written while it is verified is whole before and after.
#[test]
fn nothing_is_taken_for_damaged_while_it_is_written() {
    let mut trial = Trial::new(2, Redundancy::Copies(2));
    let is_over = AtomicBool::new(false);
    let (pool, segment, lane) = (&trial.pool, trial.segment, &mut trial.lane);
    let passes = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seed = 2;
            while !is_over.load(Relaxed) {
                write(lane, segment, seed);
                seed += 1;
            }
        });
        let mut mover = Mover::new(pool);
        // Enough to meet writes at any moment of a read.
        let passes = (0..300).map(|_| pass(&mut mover, VERIFY_LIMIT_PAGES).1).collect::<Vec<_>>();
        is_over.store(true, Relaxed);
        passes
    });
    assert!(passes.iter().all(Vec::is_empty), "{passes:?}");
}
