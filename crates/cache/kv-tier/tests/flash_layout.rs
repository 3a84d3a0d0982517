//! The layout of a flash file: what was written can be read, and any other bytes are refused.

use farpool_kv_store::key::HashSeed;
use farpool_kv_tier::flash::layout::{
    self, ClosingSum, Geometry, Nonce, Promises, SummaryEntry, Superblock, TableEntry, Use,
};
use farpool_kv_tier::flash::live::{Identity, LiveHeader};
use proptest::prelude::*;

mod exercise_flash;

fn superblock() -> impl Strategy<Value = Superblock> {
    let state = prop::sample::select(vec![Use::Clean, Use::InUse, Use::InMemory, Use::GivenUp]);
    (any::<(u32, u32, u64, i64, [u8; 16], u128, [u8; 16], bool)>(), state).prop_map(
        |(
            (shards, zones_per_shard, format_id, zero_unix_s, boot_id, nonce, seed, is_witnessed),
            state,
        )| {
            Superblock {
                shards,
                zones_per_shard,
                format_id,
                zero_unix_s,
                boot_id,
                state,
                nonce: Nonce(nonce),
                hash_seed: HashSeed::new(seed),
                is_witnessed,
            }
        },
    )
}

proptest! {
    #[test]
    fn a_superblock_is_read_as_it_was_written(superblock in superblock(), flip: (prop::sample::Index, u8)) {
        let mut bytes = superblock.encode();
        prop_assert_eq!(Superblock::decode(&bytes), Ok(superblock));
        bytes[flip.0.index(Superblock::BYTES)] ^= 1 << (flip.1 % 8);
        prop_assert!(Superblock::decode(&bytes).is_err(), "a flipped bit");
    }

    #[test]
    fn the_header_of_a_file_in_memory_is_read_as_it_was_written(
        numbers: (u32, u32, u64, u128, u64, u64), flip: (prop::sample::Index, u8),
    ) {
        let (shards, zones_per_shard, format_id, nonce, device, inode) = numbers;
        let identity = Identity { device, inode };
        let header = LiveHeader { shards, zones_per_shard, format_id, nonce: Nonce(nonce), identity };
        let mut bytes = header.encode();
        prop_assert_eq!(LiveHeader::decode(&bytes), Some(header));
        bytes[flip.0.index(LiveHeader::BYTES)] ^= 1 << (flip.1 % 8);
        prop_assert_eq!(LiveHeader::decode(&bytes), None, "a flipped bit");
    }

    #[test]
    fn a_closing_sum_is_that_of_one_closing(
        nonce: u128, other: u128, format_id: u64, seed: u8, flip: (prop::sample::Index, u8),
    ) {
        prop_assume!(nonce != other);
        let mut control: Vec<u8> = (0..3 * 4096u32).map(|at| (at % 251) as u8 ^ seed).collect();
        let sum = |nonce, control: &[u8]| ClosingSum::new(format_id, Nonce(nonce), control).append(&control[4096..]);
        sum(nonce, &control).write(&mut control);
        prop_assert!(layout::is_as_closed(format_id, Nonce(nonce), &control));
        prop_assert!(!layout::is_as_closed(format_id, Nonce(other), &control), "another closing");
        prop_assert!(!layout::is_as_closed(!format_id, Nonce(nonce), &control), "another file");
        // The bytes between the sum and the page's end are not used.
        let used: Vec<usize> = (0..layout::CLOSING_SUM_AT + 4).chain(4096..control.len()).collect();
        control[used[flip.0.index(used.len())]] ^= 1 << (flip.1 % 8);
        prop_assert!(!layout::is_as_closed(format_id, Nonce(nonce), &control), "a flipped bit");
    }

    #[test]
    fn the_newer_promise_holds_and_a_torn_one_does_not(
        numbers: (u64, u64, u32, u32), generation in 1..u32::MAX - 1, torn in 0..Promises::BYTES,
    ) {
        let (last_cas, flushed_cas, flush_at_s, now_s) = numbers;
        let old = Promises { last_cas, flushed_cas, flush_at_s, now_s, generation };
        let new = Promises { now_s: !now_s, generation: generation + 1, ..old };
        let whole = new.encode();
        // The bytes not written may equal those already there: then nothing is torn.
        prop_assume!(whole[torn..].iter().any(|byte| *byte != 0));
        let mut bytes = [0; 2 * Promises::BYTES];
        bytes[old.slot()..][..Promises::BYTES].copy_from_slice(&old.encode());
        prop_assert_eq!(Promises::newest(&bytes), Some(old));
        bytes[new.slot()..][..torn].copy_from_slice(&whole[..torn]);
        prop_assert_eq!(Promises::newest(&bytes), Some(old), "torn");
        bytes[new.slot()..][..Promises::BYTES].copy_from_slice(&whole);
        prop_assert_eq!(Promises::newest(&bytes), Some(new));
    }

    #[test]
    fn a_summary_is_that_of_its_use_of_the_zone(
        records in prop::collection::vec((any::<u64>(), 0..30_000u32, 1..2000u32), 0..300),
        seal: u32, flip: (prop::sample::Index, u8),
    ) {
        let entries: Vec<SummaryEntry> =
            records.iter().map(|&(hash, unit, bytes)| SummaryEntry { hash, unit, bytes }).collect();
        let mut tail = vec![0xee; layout::summary_bytes(entries.len()) + 100];
        layout::write_summary(&mut tail, &entries, seal);
        let read = layout::read_summary(&tail, entries.len(), seal);
        prop_assert_eq!(read.as_deref(), Some(&entries[..]));
        prop_assert!(layout::read_summary(&tail, entries.len(), !seal).is_none(), "another use");
        prop_assert!(layout::read_summary(&tail, entries.len() + 1, seal).is_none());
        let summary = &mut tail[100..];
        let at = flip.0.index(summary.len());
        summary[at] ^= 1 << (flip.1 % 8);
        prop_assert!(layout::read_summary(&tail, entries.len(), seal).is_none(), "a flipped bit");
    }

    #[test]
    fn a_file_has_room_for_all_its_parts(megabytes in 1..2_000_000u64, shards in 1..64usize) {
        let Some(geometry) = Geometry::fitting(megabytes << 20, shards, 16) else { return Ok(()) };
        prop_assert!(geometry.file_bytes() <= megabytes << 20);
        prop_assert!(geometry.control_at(shards) <= geometry.zones_at(0), "control parts end \
            before zones");
        let more = Geometry { zones_per_shard: geometry.zones_per_shard + 1, shards };
        prop_assert!(more.file_bytes() > megabytes << 20, "no more would fit");
    }

    #[test]
    fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        exercise_flash::decode_any(&bytes);
    }
}

#[test]
fn a_table_entry_that_cannot_be_is_refused() {
    let entry = TableEntry { sequence: 7, is_sealed: true, used_bytes: 100, records: 1 };
    assert_eq!(TableEntry::decode(&entry.encode()), Some(entry));
    let too_long = TableEntry { used_bytes: u32::MAX, ..entry };
    assert_eq!(TableEntry::decode(&too_long.encode()), None);
    let too_many = TableEntry { records: 1 << 30, ..entry };
    assert_eq!(TableEntry::decode(&too_many.encode()), None);
    assert_eq!(TableEntry::decode(&[0; 16]).map(|it| it.is_sealed), None, "never written");
}
