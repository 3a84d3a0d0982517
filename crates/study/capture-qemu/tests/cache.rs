// SPDX-License-Identifier: GPL-2.0-or-later
//! The cache against a plain list of lines for each set.

use farpool_capture_qemu::cache::{Cache, Outcome};

/// One set: lines with their marks, the most recent last.
type Set = Vec<(u64, bool)>;

fn reference(set: &mut Set, ways: usize, line: u64, is_store: bool) -> Outcome {
    if let Some(at) = set.iter().position(|(held, _)| *held == line) {
        let (_, changed) = set.remove(at);
        set.push((line, changed || is_store));
        return Outcome::Hit;
    }
    let leaving = (set.len() == ways).then(|| set.remove(0));
    set.push((line, is_store));
    Outcome::Miss(leaving.filter(|(_, changed)| *changed).map(|(line, _)| line))
}

#[test]
fn references_and_returned_lines_are_those_of_a_plain_list() {
    for (bytes, ways) in [(64, 1), (512, 2), (4096, 8), (1024, 16)] {
        let mut cache = Cache::new(bytes, ways).unwrap();
        let sets = bytes / 64 / ways as u64;
        let mut model = vec![Set::new(); usize::try_from(sets).unwrap()];
        let mut state = 7u64;
        for step in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let line = (state >> 33) % 100;
            let set = &mut model[usize::try_from(line % sets).unwrap()];
            if state >> 60 == 0 {
                let held = set.iter_mut().find(|(held, _)| *held == line);
                let expected = held.map(|held| held.1 = true).is_some();
                assert_eq!(cache.take_back(line), expected, "step {step}");
            } else {
                let is_store = state >> 62 == 0;
                let expected = reference(set, ways, line, is_store);
                assert_eq!(cache.reference(line, is_store), expected, "step {step}");
                let &(recent, changed) = set.last().unwrap();
                assert_eq!(cache.front(line), recent << 1 | u64::from(changed), "step {step}");
            }
        }
    }
}

#[test]
fn impossible_caches_are_refused() {
    for (bytes, ways) in [(0, 0), (64, 0), (100, 1), (64 * 3, 1), (64 * 8, 3)] {
        assert!(Cache::new(bytes, ways).is_none(), "{bytes} bytes in {ways} ways");
    }
}
