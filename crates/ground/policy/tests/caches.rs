//! Page caches: properties of every policy, and plain models of those that are easy to model.

use farpool_policy::cache::{Belady, CacheKind, CacheVisitor, Future, PageCache};
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGES: u32 = 40;

#[derive(Debug, Clone, Copy)]
enum Step {
    Access(u32),
    Remove(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..PAGES).prop_map(Step::Access),
        // Some pages are referenced more often than others, or all policies would behave alike.
        12 => (0..PAGES / 5).prop_map(Step::Access),
        1 => (0..PAGES).prop_map(Step::Remove),
    ];
    proptest::collection::vec(step, 0..400)
}

/// Evicted pages were resident, referenced ones are resident afterwards, and never more than fit.
struct AsASet<'s> {
    kind: CacheKind,
    capacity: usize,
    steps: &'s [Step],
}

impl CacheVisitor for AsASet<'_> {
    type Output = ();

    fn visit(self, mut cache: impl PageCache + Send + 'static) {
        let Self { kind, capacity, steps } = self;
        let mut resident = BTreeSet::new();
        for step in steps {
            match *step {
                Step::Access(page) => {
                    let mut left = Vec::new();
                    let had_room = resident.len() < capacity;
                    let was_resident = resident.contains(&page);
                    assert_eq!(cache.access(page, &mut |page| left.push(page)), was_resident);
                    for victim in &left {
                        assert!(resident.remove(victim), "{kind}: {victim} was not there");
                        assert_ne!(*victim, page, "{kind}: the page that was asked for left");
                    }
                    resident.insert(page);
                    let may_leave_early = matches!(kind, CacheKind::Slru | CacheKind::TinyLfu);
                    assert!(!had_room || left.is_empty() || may_leave_early, "{kind}: {left:?}");
                }
                Step::Remove(page) => assert_eq!(cache.remove(page), resident.remove(&page)),
            }
            assert_eq!(cache.len(), resident.len(), "{kind}");
            assert!(cache.len() <= capacity, "{kind}");
            assert!((0..PAGES).all(|page| cache.contains(page) == resident.contains(&page)));
        }
    }
}

/// Records which requests hit.
struct Hits<'p>(&'p [u32]);

impl CacheVisitor for Hits<'_> {
    type Output = Vec<bool>;

    fn visit(self, mut cache: impl PageCache + Send + 'static) -> Vec<bool> {
        self.0.iter().map(|page| cache.access(*page, &mut |_| {})).collect()
    }
}

/// Least frequently used: (page, references, when it reached that number).
fn lfu_hits(pages: &[u32], capacity: usize) -> Vec<bool> {
    let mut held: Vec<(u32, u64, usize)> = Vec::new();
    let hit = |(now, page): (usize, &u32)| {
        if let Some(entry) = held.iter_mut().find(|entry| entry.0 == *page) {
            *entry = (*page, entry.1 + 1, now);
            return true;
        }
        if held.len() == capacity {
            let victim = (0..held.len()).min_by_key(|at| (held[*at].1, held[*at].2)).unwrap();
            held.remove(victim);
        }
        held.push((*page, 1, now));
        false
    };
    pages.iter().enumerate().map(hit).collect()
}

/// The optimum, found by looking ahead each time.
fn belady_misses(pages: &[u32], capacity: usize) -> usize {
    let mut held: Vec<u32> = Vec::new();
    let mut misses = 0;
    for (now, page) in pages.iter().enumerate() {
        if held.contains(page) {
            continue;
        }
        misses += 1;
        if held.len() == capacity {
            let next = |page: &u32| pages[now..].iter().position(|other| other == page);
            let furthest = |at: &usize| next(&held[*at]).unwrap_or(usize::MAX);
            let victim = (0..held.len()).max_by_key(furthest).unwrap();
            held.remove(victim);
        }
        held.push(*page);
    }
    misses
}

proptest! {
    #[test]
    fn every_policy_keeps_a_set_of_its_capacity(steps in steps(), capacity in 1usize..50) {
        for kind in CacheKind::ALL {
            kind.visit(PAGES as usize, capacity, 3, AsASet { kind, capacity, steps: &steps });
        }
    }

    #[test]
    fn lfu_is_its_model(pages in proptest::collection::vec(0..PAGES, 0..400), capacity in 1usize..39) {
        let hits = CacheKind::Lfu.visit(PAGES as usize, capacity, 0, Hits(&pages));
        prop_assert_eq!(hits, lfu_hits(&pages, capacity));
    }

    #[test]
    fn belady_is_its_model_and_the_bound_of_all(
        pages in proptest::collection::vec(0..PAGES, 0..300),
        capacity in 1usize..45,
    ) {
        let future = Future::new(&pages, PAGES as usize);
        let room = u32::try_from(capacity).unwrap();
        let mut cache = Belady::new(&future, PAGES as usize, room);
        let mut resident = BTreeSet::new();
        let mut misses = 0;
        for page in &pages {
            let was_resident = resident.contains(page);
            let hit = cache.access(*page, &mut |victim| assert!(resident.remove(&victim)));
            prop_assert_eq!(hit, was_resident);
            misses += usize::from(!hit);
            resident.insert(*page);
            prop_assert!(cache.len() == resident.len() && cache.len() <= capacity);
        }
        prop_assert_eq!(misses, belady_misses(&pages, capacity));
        for kind in CacheKind::ALL {
            let hits = kind.visit(PAGES as usize, capacity, 3, Hits(&pages));
            prop_assert!(hits.iter().filter(|hit| !**hit).count() >= misses, "{}", kind);
        }
    }

    #[test]
    fn belady_forgets_what_is_removed(
        pages in proptest::collection::vec(0..PAGES, 1..200),
        removed in proptest::collection::vec((0usize..200, 0..PAGES), 0..20),
    ) {
        let future = Future::new(&pages, PAGES as usize);
        let mut cache = Belady::new(&future, PAGES as usize, 9);
        let mut resident = BTreeSet::new();
        for (now, page) in pages.iter().enumerate() {
            for (_, page) in removed.iter().filter(|(when, _)| *when == now) {
                prop_assert_eq!(cache.remove(*page), resident.remove(page));
            }
            cache.access(*page, &mut |victim| assert!(resident.remove(&victim)));
            resident.insert(*page);
            prop_assert!((0..PAGES).all(|page| cache.contains(page) == resident.contains(&page)));
        }
    }
}

#[test]
fn one_page_of_room_hits_only_what_was_just_asked_for() {
    let pages = [1, 1, 2, 1, 1, 3, 3, 2];
    for kind in CacheKind::ALL {
        let hits = kind.visit(4, 1, 3, Hits(&pages));
        assert_eq!(hits, [false, true, false, false, true, false, true, false], "{kind}");
    }
}

#[test]
#[should_panic(expected = "a cache holds 1 page or more")]
fn no_room_is_a_programmers_error() {
    CacheKind::Arc.visit(9, 0, 0, Hits(&[]));
}
