//! Pools over real blades, all transports, against a plain model of what each segment holds.

mod common;

use std::collections::BTreeMap;

use common::{Blades, Pages, config, pattern};
use farpool_pool::{
    FrozenToken, Lane, PageError, PageRead, PageWrite, Pool, PoolConfig, PoolError, Redundancy,
    SUPERPAGE_PAGES, Seals, SegmentHandle, SegmentPage,
};
use proptest::prelude::*;

/// How pages are stored.
#[derive(Clone, Copy, Debug)]
enum Storage {
    Plain,
    Sealed,
    Parity,
}

/// Superpages the model uses: few, so that operations meet.
const SUPERPAGES: u32 = 3;

#[derive(Clone, Debug)]
enum Step {
    Create,
    Write {
        segment: usize,
        pages: Vec<(u32, u64)>,
    },
    Read {
        segment: usize,
        pages: Vec<u32>,
    },
    Free {
        segment: usize,
        superpage: u32,
    },
    /// Freeze, and let the other process attach.
    Share {
        segment: usize,
    },
    Thaw {
        segment: usize,
    },
    Detach {
        segment: usize,
    },
}

fn page_number() -> impl Strategy<Value = u32> {
    // Few distinct pages, some of them neighbours, at both ends of a superpage.
    (0..SUPERPAGES, prop_oneof![0u32..20, SUPERPAGE_PAGES - 5..SUPERPAGE_PAGES])
        .prop_map(|(superpage, page)| superpage * SUPERPAGE_PAGES + page)
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let segment = 0usize..6;
    let writes = proptest::collection::vec((page_number(), any::<u64>()), 1..30);
    let reads = proptest::collection::vec(page_number(), 1..30);
    let step = prop_oneof![
        2 => Just(Step::Create),
        8 => (segment.clone(), writes).prop_map(|(segment, pages)| Step::Write { segment, pages }),
        8 => (segment.clone(), reads).prop_map(|(segment, pages)| Step::Read { segment, pages }),
        2 => (segment.clone(), 0..SUPERPAGES)
            .prop_map(|(segment, superpage)| Step::Free { segment, superpage }),
        3 => segment.clone().prop_map(|segment| Step::Share { segment }),
        2 => segment.clone().prop_map(|segment| Step::Thaw { segment }),
        2 => segment.prop_map(|segment| Step::Detach { segment }),
    ];
    (0usize..2, step)
}

/// What a segment holds: superpages with memory, and the pattern of each page written since.
#[derive(Default)]
struct Content {
    superpages: Vec<u32>,
    pages: BTreeMap<u32, u64>,
    frozen: bool,
    users: usize,
}

/// One process: its pool, and which content each of its handles shows.
struct Process {
    pool: Pool,
    lane: Lane,
    segments: Vec<(SegmentHandle, usize)>,
}

struct World {
    seals_pages: bool,
    has_parity: bool,
    processes: [Process; 2],
    contents: Vec<Content>,
}

impl World {
    fn new(blades: &Blades, storage: Storage) -> World {
        let (seals_pages, redundancy) = match storage {
            Storage::Plain => (false, Redundancy::NONE),
            Storage::Sealed => (true, Redundancy::NONE),
            Storage::Parity => (true, Redundancy::Parity),
        };
        let process = || {
            let config = PoolConfig { seals_pages, redundancy, ..config(blades) };
            let pool = Pool::connect(config).expect("connect");
            let lane = pool.lane().expect("lane");
            Process { pool, lane, segments: Vec::new() }
        };
        let has_parity = redundancy == Redundancy::Parity;
        World { seals_pages, has_parity, processes: [process(), process()], contents: Vec::new() }
    }

    fn step(&mut self, who: usize, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Create => self.create(who),
            Step::Write { segment, pages } => self.write(who, *segment, pages)?,
            Step::Read { segment, pages } => self.read(who, *segment, pages)?,
            Step::Free { segment, superpage } => self.free(who, *segment, *superpage),
            Step::Share { segment } => self.share(who, *segment),
            Step::Thaw { segment } => self.thaw(who, *segment),
            Step::Detach { segment } => self.detach(who, *segment),
        }
        Ok(())
    }

    fn pick(&self, who: usize, segment: usize) -> Option<(SegmentHandle, usize)> {
        let segments = &self.processes[who].segments;
        segments.get(segment % segments.len().max(1)).copied()
    }

    fn create(&mut self, who: usize) {
        if self.processes[who].segments.len() < 6 {
            let handle = self.processes[who].pool.create_segment().expect("a free handle");
            self.processes[who].segments.push((handle, self.contents.len()));
            self.contents.push(Content { users: 1, ..Content::default() });
        }
    }

    fn write(
        &mut self,
        who: usize,
        segment: usize,
        pages: &[(u32, u64)],
    ) -> Result<(), TestCaseError> {
        let Some((handle, content)) = self.pick(who, segment) else {
            return Ok(());
        };
        let pages: BTreeMap<u32, u64> = pages.iter().copied().collect();
        let process = &mut self.processes[who];
        let content = &mut self.contents[content];
        for &page in pages.keys() {
            let superpage = page / SUPERPAGE_PAGES;
            let given = process.pool.allocate_superpage(handle, superpage);
            prop_assert_eq!(given.is_err(), content.frozen);
            if !content.frozen && !content.superpages.contains(&superpage) {
                content.superpages.push(superpage);
            }
        }
        let local = Pages::of_patterns(pages.values().copied());
        let writes: Vec<_> = (0u64..)
            .zip(pages.keys())
            .map(|(token, &page)| PageWrite {
                at: SegmentPage { segment: handle, page },
                from: local.at(token),
                token,
            })
            .collect();
        // SAFETY: the pages outlive the wait for their completions.
        unsafe { process.lane.write(&writes) }.expect("submitted");
        for done in common::finish(&mut process.lane, writes.len()) {
            prop_assert_eq!(done, if content.frozen { Err(PageError::Frozen) } else { Ok(()) });
        }
        if !content.frozen {
            content.pages.extend(pages);
        }
        Ok(())
    }

    fn read(&mut self, who: usize, segment: usize, pages: &[u32]) -> Result<(), TestCaseError> {
        let Some((handle, content)) = self.pick(who, segment) else {
            return Ok(());
        };
        let process = &mut self.processes[who];
        let content = &self.contents[content];
        let mut local = Pages::of_patterns(pages.iter().map(|_| !0));
        let reads: Vec<_> = (0u64..)
            .zip(pages)
            .map(|(token, &page)| PageRead {
                at: SegmentPage { segment: handle, page },
                into: local.at_mut(token),
                token,
            })
            .collect();
        // SAFETY: the pages outlive the wait for their completions.
        unsafe { process.lane.read(&reads) }.expect("submitted");
        let done = common::finish(&mut process.lane, reads.len());
        for (token, (page, done)) in (0u64..).zip(pages.iter().zip(done)) {
            if !content.superpages.contains(&(page / SUPERPAGE_PAGES)) {
                // Who shares what was given back and is still in the parity has no seals of it.
                let is_gone = self.has_parity && done == Err(PageError::Forged);
                prop_assert!(is_gone || done == Err(PageError::NotAllocated), "{:?}", done);
                continue;
            }
            if self.seals_pages && !content.pages.contains_key(page) {
                prop_assert_eq!(done, Err(PageError::Forged));
                continue;
            }
            prop_assert_eq!(done, Ok(()));
            let expected = content.pages.get(page).map_or([0; 4096], |&seed| pattern(seed));
            prop_assert!(*local.bytes(token) == expected, "page {} of {:?}", page, handle);
        }
        Ok(())
    }

    fn free(&mut self, who: usize, segment: usize, superpage: u32) {
        let Some((handle, content)) = self.pick(who, segment) else {
            return;
        };
        let content = &mut self.contents[content];
        let freed = self.processes[who].pool.free_superpage(handle, superpage);
        if content.frozen {
            assert!(matches!(freed, Err(PoolError::Frozen(_))), "{freed:?}");
            return;
        }
        freed.expect("freed");
        content.superpages.retain(|&it| it != superpage);
        content.pages.retain(|page, _| page / SUPERPAGE_PAGES != superpage);
    }

    fn share(&mut self, who: usize, segment: usize) {
        let Some((handle, content)) = self.pick(who, segment) else {
            return;
        };
        let other = 1 - who;
        // A segment without memory is on no blade, so there is nothing to share.
        if self.contents[content].superpages.is_empty()
            || self.processes[other].segments.len() >= 6
            || self.processes[other].segments.iter().any(|it| it.1 == content)
        {
            return;
        }
        let token: FrozenToken = self.processes[who].pool.freeze(handle).expect("frozen");
        // As they travel to another process.
        let lacking = self.contents[content].pages.keys().copied();
        let exported = self.processes[who].pool.export_seals(handle, lacking);
        let seals = exported.map(|it| Seals::import(&it).expect("what was exported"));
        let theirs = self.processes[other].pool.attach(&token, seals).expect("attached");
        self.processes[other].segments.push((theirs, content));
        self.contents[content].frozen = true;
        self.contents[content].users += 1;
    }

    fn thaw(&mut self, who: usize, segment: usize) {
        let Some((handle, content)) = self.pick(who, segment) else {
            return;
        };
        let content = &mut self.contents[content];
        let thawed = self.processes[who].pool.thaw(handle).expect("answered");
        assert_eq!(thawed, !content.frozen || content.users == 1, "users {}", content.users);
        content.frozen = !thawed;
    }

    fn detach(&mut self, who: usize, segment: usize) {
        let Some((handle, content)) = self.pick(who, segment) else {
            return;
        };
        self.processes[who].pool.detach(handle).expect("detached");
        self.processes[who].segments.retain(|it| it.0 != handle);
        self.contents[content].users -= 1;
    }
}

/// Frees everything, and checks that the blades have it all again.
fn leave(world: World, blades: &Blades) {
    world.processes.iter().for_each(|it| it.pool.goodbye());
    drop(world); // and with it the descriptors of shared memory
    blades.wait_until_unused();
}

fn play(blades: &Blades, storage: Storage, steps: &[(usize, Step)]) -> Result<(), TestCaseError> {
    let mut world = World::new(blades, storage);
    for (who, step) in steps {
        world.step(*who, step)?;
    }
    leave(world, blades);
    Ok(())
}

macro_rules! model_test {
    ($name:ident, $transports:expr, $storage:expr) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

            #[test]
            fn $name(steps in proptest::collection::vec(step(), 1..60)) {
                play(&Blades::start(&$transports), $storage, &steps)?;
            }
        }
    };
}

model_test!(over_a_unix_socket, ["unix"], Storage::Plain);
model_test!(over_tcp, ["tcp"], Storage::Plain);
model_test!(over_shared_memory, ["shm"], Storage::Plain);
model_test!(over_two_blades, ["shm", "shm"], Storage::Plain);
model_test!(over_blades_of_every_kind, ["unix", "shm", "tcp"], Storage::Plain);
model_test!(sealed_over_tcp, ["tcp"], Storage::Sealed);
model_test!(sealed_over_blades_of_every_kind, ["unix", "shm", "tcp"], Storage::Sealed);
model_test!(
    with_parity_over_blades_of_every_kind,
    ["unix", "shm", "tcp", "unix", "shm"],
    Storage::Parity
);
