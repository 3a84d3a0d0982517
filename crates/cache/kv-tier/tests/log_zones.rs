//! Zones that come and go under a log: in every case a read returns what was written or nothing, no
//! memory is touched after it was given back, and what was forgotten stays forgotten.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use farpool_disk::{Ended, Pages};
use farpool_kv_store::index::Place;
use farpool_kv_store::item::{AccessTime, ItemParts};
use farpool_kv_store::record::{self, Record};
use farpool_kv_tier::log::{Judge, Log, Medium, Outcome};
use farpool_units::PAGE_BYTES;
use proptest::prelude::*;

const ZONE_PAGES: usize = 4;

#[derive(Debug)]
enum Under {
    Read { zone: usize, first: usize, count: usize },
    Write { zone: usize },
}

/// A medium in memory whose requests complete when the test says so.
#[derive(Debug, Default)]
struct Memory {
    /// By zone number; None if there is no memory.
    zones: Vec<Option<Vec<u8>>>,
    lost: HashSet<usize>,
    under_way: VecDeque<(u64, Pages, Under)>,
    /// How many requests complete at the next poll.
    ends: usize,
}

impl Medium for Memory {
    const ZONE_PAGES: usize = ZONE_PAGES;
    const ALIGN_BYTES: usize = record::ALIGN_BYTES;
    const RECORD_BYTES_MAX: usize = ZONE_PAGES * PAGE_BYTES / 2;
    const TAIL_BYTES: usize = 0;
    const TAIL_RECORD_BYTES: usize = 0;
    const FREE_ZONES: usize = 2;
    const WRITING_MAX: usize = 2;

    fn zones(&self) -> usize {
        self.zones.len()
    }

    fn start_read(&mut self, pages: Pages, at: (usize, usize), count: usize, token: u64) {
        assert!(self.zones[at.0].is_some(), "a read begins where there is memory");
        self.under_way.push_back((token, pages, Under::Read { zone: at.0, first: at.1, count }));
    }

    fn start_write(&mut self, pages: Pages, zone: usize, token: u64) {
        assert!(self.zones[zone].is_some(), "a write begins where there is memory");
        self.under_way.push_back((token, pages, Under::Write { zone }));
    }

    fn written(&self, token: u64) -> Option<&[u8]> {
        self.under_way.iter().find(|it| it.0 == token).map(|it| it.1.bytes())
    }

    fn poll(&mut self, _now: Option<Instant>, ended: &mut Vec<Ended>) {
        for _ in 0..std::mem::take(&mut self.ends) {
            let Some((token, mut pages, what)) = self.under_way.pop_front() else { return };
            let (Under::Read { zone, .. } | Under::Write { zone }) = what;
            let memory = self.zones[zone].as_mut().expect("memory stays while it is used");
            match what {
                Under::Read { first, count, .. } => pages.bytes_mut()[..count * PAGE_BYTES]
                    .copy_from_slice(&memory[first * PAGE_BYTES..(first + count) * PAGE_BYTES]),
                Under::Write { .. } => memory.copy_from_slice(pages.bytes()),
            }
            let is_ok = !self.lost.contains(&zone);
            ended.push(Ended { token, pages, is_ok });
        }
    }

    fn wait(&self, _limit: Duration) {}

    fn is_lost(&self, zone: usize) -> bool {
        self.lost.contains(&zone)
    }
}

/// A model of the index: where each record is, and whether it was hit.
#[derive(Debug, Default)]
struct Known(HashMap<u64, (Place, bool)>);

impl Judge for Known {
    fn keeps(&mut self, hash: u64, place: Place) -> bool {
        self.0.get(&hash) == Some(&(place, true))
    }

    fn knows(&mut self, hash: u64, place: Place) -> bool {
        self.0.get(&hash).is_some_and(|it| it.0 == place)
    }

    fn moved(&mut self, hash: u64, from: Place, to: Place) {
        assert_eq!(self.0.insert(hash, (to, false)).map(|it| it.0), Some(from));
    }

    fn dropped(&mut self, record: &Record<'_>, place: Place) {
        if self.knows(record.hash, place) {
            self.0.remove(&record.hash);
        }
    }
}

fn record_of(hash: u64) -> Vec<u8> {
    let key = format!("key{hash}");
    let value =
        vec![u8::try_from(hash % 251).unwrap(); usize::try_from(20 + hash * 37 % 7000).unwrap()];
    let parts = ItemParts { key: key.as_bytes(), value: [&value, b""], ..ItemParts::default() };
    let header = parts.header(AccessTime(0), 0);
    let mut item = vec![0; header.item_bytes()];
    parts.write(header, &mut item);
    let mut out = Vec::new();
    record::push(&mut out, hash, hash, &item);
    out
}

#[derive(Debug, Clone)]
enum Step {
    Append,
    Read(prop::sample::Index),
    Hit(prop::sample::Index),
    AddZones(usize),
    Leave(prop::sample::Index),
    Drop(prop::sample::Index),
    Lose(prop::sample::Index),
    EmptyNext,
    Forget,
    End(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        12 => Just(Step::Append),
        6 => at().prop_map(Step::Read),
        3 => at().prop_map(Step::Hit),
        2 => (1usize..6).prop_map(Step::AddZones),
        1 => at().prop_map(Step::Leave),
        1 => at().prop_map(Step::Drop),
        1 => at().prop_map(Step::Lose),
        3 => Just(Step::EmptyNext),
        4 => Just(Step::Forget),
        5 => (0usize..4).prop_map(Step::End),
    ]
}

struct Story {
    log: Log<Memory>,
    known: Known,
    next: u64,
    /// Zones that were told to leave and may still be in use.
    going: HashSet<usize>,
}

impl Story {
    fn do_it(&mut self, step: &Step) {
        let Self { log, known, next, going } = self;
        let pick = |known: &Known, at: &prop::sample::Index| {
            let mut all: Vec<u64> = known.0.keys().copied().collect();
            all.sort_unstable();
            (!all.is_empty()).then(|| *at.get(&all))
        };
        let zones: Vec<usize> = (0..log.medium().zones.len()).collect();
        match step {
            Step::Append => {
                *next += 1;
                if let Some(place) = log.append(&record_of(*next)) {
                    known.0.insert(*next, (place, false));
                }
            }
            Step::Read(at) => {
                if let Some(hash) = pick(known, at) {
                    log.read(known.0[&hash].0, hash);
                }
            }
            Step::Hit(at) => {
                if let Some(hash) = pick(known, at)
                    && let Some(it) = known.0.get_mut(&hash)
                {
                    it.1 = true;
                }
            }
            Step::AddZones(count) => {
                for _ in 0..*count {
                    let zone = log.add_zone().expect("numbers are left");
                    let memory = &mut log.medium_mut().zones;
                    memory.resize(memory.len().max(zone + 1), None);
                    assert!(memory[zone].is_none() && !going.contains(&zone), "the number is free");
                    memory[zone] = Some(vec![0xff; ZONE_PAGES * PAGE_BYTES]);
                }
            }
            Step::Leave(at) | Step::Drop(at) | Step::Lose(at) if !zones.is_empty() => {
                let zone = *at.get(&zones);
                if log.medium().zones[zone].is_none() {
                    return;
                }
                going.insert(zone);
                match step {
                    Step::Leave(_) => log.leave_zone(zone),
                    Step::Drop(_) => log.drop_zone(zone, false),
                    _ => {
                        log.medium_mut().lost.insert(zone);
                        log.drop_zone(zone, true);
                    }
                }
            }
            Step::Leave(_) | Step::Drop(_) | Step::Lose(_) => {}
            Step::EmptyNext => log.empty_next(),
            Step::Forget => {
                let zones = log.to_forget();
                known.0.retain(|_, (place, _)| log.gone_at(*place).is_none());
                log.forgotten(&zones);
            }
            Step::End(count) => log.medium_mut().ends = *count,
        }
    }

    /// Takes completed reads; every record found must be the right one.
    fn look(&mut self) {
        self.log.poll(None, &mut self.known);
        let outcomes = self.log.take_outcomes();
        let mut start = 0;
        for &(hash, _, outcome) in &outcomes.reads {
            if let Outcome::Found { end } = outcome {
                let found = &outcomes.records[start..end];
                start = end;
                assert_eq!(found[4..], record_of(hash)[4..], "record {hash}");
            }
        }
        self.log.return_outcomes(outcomes);
        // Memory of zones that are gone is given back as soon as no request is under way there.
        let Self { log, going, .. } = self;
        let is_used = |memory: &Memory, zone: usize| {
            let of = |it: &Under| match it {
                Under::Read { zone, .. } | Under::Write { zone } => *zone,
            };
            memory.under_way.iter().any(|it| of(&it.2) == zone)
        };
        let free: Vec<usize> = going
            .iter()
            .copied()
            .filter(|&zone| log.has_gone(zone) && !is_used(log.medium(), zone))
            .collect();
        for zone in free {
            going.remove(&zone);
            log.medium_mut().zones[zone] = None;
            log.medium_mut().lost.remove(&zone);
        }
    }

    fn settle(&mut self) {
        for _ in 0..2_000 {
            self.do_it(&Step::EmptyNext);
            self.do_it(&Step::End(8));
            self.look();
            self.do_it(&Step::Forget);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, .. ProptestConfig::default() })]
    #[test]
    fn zones_come_and_go_and_nothing_wrong_is_read(
        first in 0usize..12, steps in prop::collection::vec(step(), 1..500),
    ) {
        let log = Log::growing(Memory::default());
        let mut story = Story { log, known: Known::default(), next: 0, going: HashSet::new() };
        story.do_it(&Step::AddZones(first));
        for step in &steps {
            story.do_it(step);
            story.look();
        }
        story.settle();
        prop_assert!(story.going.is_empty(), "what was told to go has gone: {:?}", story.going);
        // Every record that is left is found, or was in memory that failed.
        let left: Vec<(u64, Place)> = story.known.0.iter().map(|(hash, it)| (*hash, it.0)).collect();
        for (hash, place) in left {
            prop_assert!(story.log.gone_at(place).is_none(), "record {} is forgotten", hash);
            story.log.read(place, hash);
        }
        let reads_gone = story.log.counts().reads_gone;
        story.settle();
        prop_assert_eq!(story.log.counts().reads_gone, reads_gone, "what stays is still there");
        // All zones leave.
        let zones = story.log.medium().zones.len();
        for zone in 0..zones {
            if story.log.medium().zones[zone].is_some() {
                story.going.insert(zone);
                story.log.leave_zone(zone);
            }
        }
        story.settle();
        prop_assert!(story.going.is_empty() && !story.log.has_zones() && !story.log.is_busy());
        prop_assert!(story.log.medium().zones.iter().all(Option::is_none));
        prop_assert_eq!(story.known.0.len(), 0, "nothing points there");
        prop_assert_eq!(story.log.append(&record_of(1)), None);
    }
}

const ZONES: usize = 8;

/// A log with several written zones and no request under way.
fn written() -> Story {
    let log = Log::growing(Memory::default());
    let mut story = Story { log, known: Known::default(), next: 0, going: HashSet::new() };
    story.do_it(&Step::AddZones(ZONES));
    for _ in 0..45 {
        story.do_it(&Step::Append);
        story.do_it(&Step::End(8));
        story.look();
    }
    assert!(!story.log.is_writing() && story.known.0.len() == 45);
    story
}

fn drop_all(story: &mut Story) {
    for zone in 0..ZONES {
        story.going.insert(zone);
        story.log.drop_zone(zone, false);
    }
}

/// While flash is slow nothing is emptied, but the deadline passes nevertheless.
#[test]
fn zones_that_are_dropped_while_they_wait_to_be_emptied_are_forgotten() {
    let mut story = written();
    for zone in 0..ZONES {
        story.going.insert(zone);
        story.log.leave_zone(zone);
    }
    story.look();
    assert!(story.log.to_forget().is_empty(), "some wait to be emptied");
    drop_all(&mut story);
    assert_eq!(story.log.to_forget(), (0..ZONES).collect::<Vec<_>>());
    story.look();
    story.do_it(&Step::Forget);
    assert!(story.known.0.is_empty() && !story.log.is_busy());
    assert_eq!(story.log.add_zone(), Some(0), "the number is free");
}

/// Otherwise the index would be walked repeatedly until the read has ended.
#[test]
fn a_zone_in_which_a_read_is_under_way_is_forgotten_after_that_and_not_before() {
    let mut story = written();
    // The first record is in a written zone.
    let (place, _) = story.known.0[&1];
    story.log.read(place, 1);
    assert_eq!(story.log.medium().under_way.len(), 1);
    drop_all(&mut story);
    let now = story.log.to_forget();
    assert_eq!(now.len(), ZONES - 1, "all others: {now:?}");
    story.do_it(&Step::Forget);
    assert!(story.log.to_forget().is_empty(), "nothing can be done but wait");
    assert!(story.log.is_busy() && !story.log.has_at_hand());
    story.do_it(&Step::End(1));
    story.look();
    assert_eq!(story.log.to_forget().len(), 1);
    story.do_it(&Step::Forget);
    assert!(!story.log.is_busy() && story.known.0.is_empty());
}
