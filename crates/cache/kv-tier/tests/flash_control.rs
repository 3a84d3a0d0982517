//! Which bookkeeping is trusted, and that a lost forget bit is noticed.

use farpool_kv_tier::flash::control::Control;
use farpool_kv_tier::flash::layout::{Geometry, Promises, TableEntry, UNIT_BYTES, Use, ZONE_BYTES};
use farpool_kv_tier::flash::opening::{Dropped, Held, Said, Side, Source, Testimony, decide};
use proptest::prelude::*;

const GEOMETRY: Geometry = Geometry { shards: 1, zones_per_shard: 16 };
const UNITS: usize = ZONE_BYTES / UNIT_BYTES;
const STATES: [Use; 4] = [Use::Clean, Use::InUse, Use::InMemory, Use::GivenUp];
const SIDES: [Side; 4] = [Side::Absent, Side::Damaged, Side::Held, Side::Whole];

#[test]
fn nothing_is_believed_that_could_be_older_than_the_zones() {
    for side in SIDES {
        assert_eq!(decide(None, side), Ok(Source::Nothing(None)), "empty, or to be reset");
        for (state, is_same_boot) in STATES.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let wanted = match (state, is_same_boot, side) {
                (Use::Clean, ..) => Ok(Source::Closed),
                (Use::GivenUp, ..) => Ok(Source::Nothing(Some(Dropped::DeviceFailed))),
                // Memory does not outlive the machine, whatever state it appears to be in.
                (_, false, _) => Ok(Source::Nothing(Some(Dropped::MachineDown))),
                (Use::InUse, true, _) => Ok(Source::Pages),
                // If the bookkeeping is in memory, the flash's own pages are as old as its start:
                // never those.
                (_, _, Side::Absent) => Ok(Source::Nothing(Some(Dropped::MemoryGone))),
                (_, _, Side::Damaged) => Ok(Source::Nothing(Some(Dropped::MemoryDamaged))),
                (_, _, Side::Held) => Err(Held),
                (_, _, Side::Whole) => Ok(Source::Memory),
            };
            let testimony = Testimony::Last;
            let said = Said { state, testimony, is_same_boot };
            assert_eq!(decide(Some(said), side), wanted, "{said:?} {side:?}");
        }
    }
}

#[test]
fn an_older_copy_is_believed_only_with_its_own_book_keeping_in_memory() {
    let kinds = [(Testimony::Older, Dropped::OlderCopy), (Testimony::Gone, Dropped::WitnessGone)];
    for ((testimony, why), side) in kinds.into_iter().flat_map(|it| SIDES.map(|side| (it, side))) {
        for (state, is_same_boot) in STATES.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let decided = decide(Some(Said { state, testimony, is_same_boot }), side);
            match state {
                Use::Clean | Use::InUse => assert_eq!(decided, Ok(Source::Nothing(Some(why)))),
                Use::InMemory | Use::GivenUp => {
                    let said = Said { state, testimony: Testimony::Last, is_same_boot };
                    assert_eq!(decided, decide(Some(said), side));
                }
            }
        }
    }
}

fn fresh() -> Control<Vec<u8>> {
    Control::new(vec![0; GEOMETRY.control_bytes()], GEOMETRY, 77)
}

fn over(memory: &[u8]) -> Control<Vec<u8>> {
    Control::new(memory.to_vec(), GEOMETRY, 77)
}

/// Bookkeeping in which these units of zone 3 are forgotten.
fn forgotten(units: &[usize]) -> (Control<Vec<u8>>, Vec<u8>) {
    let mut control = fresh();
    control.open_zone(3, 9);
    units.iter().for_each(|&unit| control.forget(3, unit));
    let memory = memory_of(&control);
    (control, memory)
}

fn memory_of(control: &Control<Vec<u8>>) -> Vec<u8> {
    control.memory().to_vec()
}

/// The position of the bit of a unit of zone 3.
fn bit_of(unit: usize) -> (usize, u8) {
    (GEOMETRY.forget_bits_at() + 3 * UNITS / 8 + unit / 8, 1 << (unit % 8))
}

proptest! {
    #[test]
    fn a_forget_bit_that_is_gone_is_noticed(
        units in prop::collection::btree_set(0..UNITS, 1..40), gone in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let units: Vec<usize> = units.into_iter().collect();
        let (mut control, memory) = forgotten(&units);
        prop_assert!(control.are_forgets_whole(3, 9));
        prop_assert!(units.iter().all(|&unit| control.is_forgotten(3, u32::try_from(unit).unwrap())));
        prop_assert!(!control.are_forgets_whole(3, 10), "another use of the zone");
        prop_assert!(!control.are_forgets_whole(4, 9), "another zone");
        let mut spoiled = memory.clone();
        for index in gone {
            let (at, bit) = bit_of(units[index.index(units.len())]);
            spoiled[at] &= !bit;
        }
        prop_assert!(!over(&spoiled).are_forgets_whole(3, 9), "bits are gone");
        let mut spoiled = memory;
        spoiled[GEOMETRY.sums_at()..].fill(0);
        prop_assert!(!over(&spoiled).are_forgets_whole(3, 9), "bits and sums are gone");
    }

    #[test]
    fn a_kill_between_a_bit_and_its_sum_costs_nothing(
        units in prop::collection::btree_set(0..UNITS, 0..40), last in 0..UNITS, more in 0..UNITS,
    ) {
        prop_assume!(!units.contains(&last) && !units.contains(&more) && last != more);
        let units: Vec<usize> = units.into_iter().collect();
        let (_, mut memory) = forgotten(&units);
        let (at, bit) = bit_of(last);
        memory[at] |= bit;
        let mut control = over(&memory);
        prop_assert!(control.are_forgets_whole(3, 9), "the sum lacks the last");
        prop_assert!(control.is_forgotten(3, u32::try_from(last).unwrap()));
        // It continues from there: the sum includes the bit now, so its loss would be noticed.
        control.forget(3, more);
        prop_assert!(control.are_forgets_whole(3, 9));
        let mut memory = memory_of(&control);
        memory[at] &= !bit;
        prop_assert!(!over(&memory).are_forgets_whole(3, 9), "the mended bit is gone");
    }

    #[test]
    fn a_zone_begins_with_nothing_forgotten(units in prop::collection::vec(0..UNITS, 0..20)) {
        let (mut control, _) = forgotten(&units);
        control.open_zone(3, 10);
        prop_assert!(control.are_forgets_whole(3, 10) && !control.are_forgets_whole(3, 9));
        prop_assert!((0..UNITS).all(|unit| !control.is_forgotten(3, u32::try_from(unit).unwrap())));
    }
}

#[test]
fn numbers_of_uses_do_not_come_again_after_damage() {
    let mut control = fresh();
    let sealed = |sequence| TableEntry { sequence, is_sealed: true, used_bytes: 64, records: 1 };
    (0..8).for_each(|zone| control.write_table(zone, sealed(100 + u32::try_from(zone).unwrap())));
    assert_eq!(control.free_damaged(), 0, "used and unused zones are in order");
    let mut memory = memory_of(&control);
    memory[4096 + 7 * 16] ^= 1;
    let mut damaged = over(&memory);
    assert_eq!(damaged.free_damaged(), 1);
    let entry = damaged.table_entry(7).unwrap();
    assert!(!entry.is_sealed && entry.sequence > 1_000_000, "{entry:?}");
    assert_eq!(damaged.table_entry(6), Some(sealed(106)), "the others stay");
    // Also after beginning empty.
    damaged.begin_empty(3);
    let entries: Vec<TableEntry> = (0..16).filter_map(|zone| damaged.table_entry(zone)).collect();
    assert!(entries.iter().all(|it| !it.is_sealed && it.sequence > entry.sequence), "{entries:?}");
    assert_eq!(damaged.promises(), Some(Promises::default()));
}
