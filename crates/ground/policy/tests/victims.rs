//! The exact victim policies against models simple enough to verify by reading.

use farpool_policy::VictimKind;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGES: u32 = 24;

#[derive(Debug, Clone)]
enum Step {
    Insert(u32),
    Touch(u32),
    Remove(u32),
    Victims(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let page = 0..PAGES;
    let step = prop_oneof![
        4 => page.clone().prop_map(Step::Insert),
        4 => page.clone().prop_map(Step::Touch),
        1 => page.prop_map(Step::Remove),
        2 => (0usize..6).prop_map(Step::Victims),
    ];
    proptest::collection::vec(step, 0..200)
}

/// Pages in order of arrival (or of use), oldest first, each with its mark.
#[derive(Debug, Default)]
struct Model {
    queue: Vec<(u32, bool)>,
    /// SIEVE's hand: the number of pages, from the oldest, that it has passed.
    hand: usize,
}

impl Model {
    fn place(&self, page: u32) -> Option<usize> {
        self.queue.iter().position(|(p, _)| *p == page)
    }

    fn touch(&mut self, kind: VictimKind, page: u32) {
        let Some(at) = self.place(page) else { return };
        self.queue[at].1 = true;
        if kind == VictimKind::Lru {
            let entry = self.queue.remove(at);
            self.queue.push(entry);
        }
    }

    fn insert(&mut self, kind: VictimKind, page: u32) {
        if self.place(page).is_some() {
            return self.touch(kind, page);
        }
        self.queue.push((page, false));
        // A hand that had passed everything starts again at the oldest, not at the newcomer.
        if self.hand == self.queue.len() - 1 {
            self.hand = 0;
        }
    }

    fn remove(&mut self, page: u32) -> bool {
        let Some(at) = self.place(page) else {
            return false;
        };
        self.queue.remove(at);
        if at < self.hand {
            self.hand -= 1;
        }
        if self.hand == self.queue.len() {
            self.hand = 0;
        }
        true
    }

    fn victim(&mut self, kind: VictimKind) -> Option<u32> {
        if self.queue.is_empty() {
            return None;
        }
        match kind {
            VictimKind::Clock => {
                while std::mem::take(&mut self.queue[0].1) {
                    self.queue.rotate_left(1);
                }
                Some(self.queue.remove(0).0)
            }
            VictimKind::Sieve => {
                while std::mem::take(&mut self.queue[self.hand].1) {
                    self.hand = (self.hand + 1) % self.queue.len();
                }
                let page = self.queue[self.hand].0;
                let hand = self.hand;
                self.remove(page);
                self.hand = if hand < self.queue.len() { hand } else { 0 };
                Some(page)
            }
            _ => Some(self.queue.remove(0).0),
        }
    }
}

fn check_against_model(kind: VictimKind, steps: &[Step]) {
    let mut policy = kind.build(PAGES as usize, 1);
    let mut model = Model::default();
    let mut out = Vec::new();
    for step in steps {
        match *step {
            Step::Insert(page) => {
                policy.insert(page);
                model.insert(kind, page);
            }
            Step::Touch(page) => {
                policy.touch(page);
                model.touch(kind, page);
            }
            Step::Remove(page) => assert_eq!(policy.remove(page), model.remove(page)),
            Step::Victims(wanted) => {
                out.clear();
                policy.victims(wanted, &mut out);
                let expected: Vec<_> = (0..wanted).map_while(|_| model.victim(kind)).collect();
                assert_eq!(out, expected, "{kind}");
            }
        }
        assert_eq!(policy.len(), model.queue.len());
    }
}

/// For every policy: victims are resident, distinct, as many as asked for and available.
fn check_as_a_set(kind: VictimKind, steps: &[Step]) {
    let mut policy = kind.build(PAGES as usize, 7);
    let mut resident = BTreeSet::new();
    let mut out = Vec::new();
    for step in steps {
        match *step {
            Step::Insert(page) => {
                policy.insert(page);
                resident.insert(page);
            }
            Step::Touch(page) => assert_eq!(policy.touch(page), resident.contains(&page)),
            Step::Remove(page) => assert_eq!(policy.remove(page), resident.remove(&page)),
            Step::Victims(wanted) => {
                out.clear();
                policy.victims(wanted, &mut out);
                assert_eq!(out.len(), wanted.min(resident.len()));
                assert!(out.iter().all(|page| resident.remove(page)), "{kind}: {out:?}");
            }
        }
        assert_eq!(policy.len(), resident.len());
    }
}

proptest! {
    #[test]
    fn the_ordered_policies_do_what_their_models_do(steps in steps()) {
        for kind in [VictimKind::Fifo, VictimKind::Clock, VictimKind::Lru, VictimKind::Sieve] {
            check_against_model(kind, &steps);
        }
    }

    #[test]
    fn victims_are_resident_distinct_and_as_many_as_there_are(steps in steps()) {
        for kind in VictimKind::ALL {
            check_as_a_set(kind, &steps);
        }
    }
}

#[test]
fn random_repeats_itself_for_one_seed_and_differs_between_seeds() {
    let drain = |seed| {
        let mut policy = VictimKind::Random.build(1000, seed);
        (0..1000).for_each(|page| policy.insert(page));
        let mut out = Vec::new();
        policy.victims(1000, &mut out);
        out
    };
    assert_eq!(drain(1), drain(1));
    assert_ne!(drain(1), drain(2));
}
