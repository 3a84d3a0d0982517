//! Mutated streams, as many as a test has time for; fuzz/ continues from here.

mod exercise;
mod exercise_binary;
mod exercise_keyvault;

use farpool_keyvault::frame::{Header, Opcode, begin, finish};
use proptest::prelude::*;
use proptest::sample::select;

/// Pieces of requests, so that random streams get far.
const PIECES: [&str; 34] = [
    "set ",
    "add ",
    "cas ",
    "append ",
    "get ",
    "gats ",
    "mg ",
    "ms ",
    "md ",
    "ma ",
    "me ",
    "incr ",
    "touch ",
    "delete ",
    "flush_all ",
    "cache_memlimit ",
    "a ",
    "b ",
    "Zm9v ",
    "0 ",
    "1 ",
    "-1 ",
    "4 ",
    "65000 ",
    "70000 ",
    "noreply",
    "b ",
    "N10 ",
    "T5 ",
    "q ",
    "k v t ",
    "\r\n",
    "\n",
    "abcd\r\n",
];

fn stream() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        20 => select(&PIECES[..]).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..6),
    ];
    prop::collection::vec(piece, 0..120).prop_map(|pieces| pieces.concat())
}

/// Frames whose bodies are nearly valid, with random keys, numbers and lengths.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let body = prop_oneof![
        4 => prop::collection::vec(prop_oneof![3 => 0u8..4, 1 => any::<u8>()], 0..60),
        2 => prop::collection::vec(any::<u8>(), 0..300),
        1 => (0u8..6, 1u8..8).prop_map(|(mode, key)| {
            let mut body = vec![mode, key];
            body.resize(24, 0);
            body.extend_from_slice(b"fill12345");
            body
        }),
        2 => select(&["fill80", "fill81", "a"][..]).prop_map(|key| key.as_bytes().to_vec()),
        2 => prop::collection::vec((1u8..4, 0u8..4), 1..6).prop_map(|leases| {
            let mut body = vec![u8::try_from(leases.len()).unwrap(), 0, 0, 0];
            leases.iter().for_each(|(uses, slot)| body.extend_from_slice(&[*slot, uses << 4, 0, 0]));
            body
        }),
        1 => prop::collection::vec(select(&["a", "fill1", "x"][..]), 1..5).prop_map(|keys| {
            let mut body = u16::try_from(keys.len()).unwrap().to_le_bytes().to_vec();
            for key in keys {
                body.push(u8::try_from(key.len()).unwrap());
                body.extend_from_slice(key.as_bytes());
            }
            body
        }),
    ];
    let frame = (select(Opcode::ALL), any::<u32>(), body).prop_map(|(opcode, request, body)| {
        let mut frame = Vec::new();
        let header = Header { length: 0, opcode, status: None, shard: 0, connection: 0, request };
        let start = begin(&mut frame, header);
        frame.extend_from_slice(&body);
        finish(&mut frame, start, true);
        frame
    });
    prop::collection::vec(frame, 0..40).prop_map(|frames| frames.concat())
}

/// Binary requests whose lengths mostly fit, on keys that exist or not.
fn binary_requests() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop_oneof![9 => 0u8..0x25, 1 => any::<u8>()];
    let extras = prop_oneof![
        9 => Just(None),
        1 => prop::collection::vec(any::<u8>(), 0..24).prop_map(Some),
    ];
    let key = prop_oneof![
        9 => select(&["fill80", "fill81", "a", "b", ""][..]).prop_map(|key| key.as_bytes().to_vec()),
        1 => (0usize..300).prop_map(|bytes| vec![b'k'; bytes]),
    ];
    let value = prop_oneof![
        6 => Just(Vec::new()),
        3 => select(&["7", "abc", "18446744073709551615"][..])
            .prop_map(|value| value.as_bytes().to_vec()),
        1 => (0usize..70_000).prop_map(|bytes| vec![b'v'; bytes]),
    ];
    let numbers = (0u8..4, prop_oneof![3 => Just(0u64), 1 => 0u64..99], any::<u32>());
    let request = (opcode, extras, key, value, numbers).prop_map(
        |(opcode, extras, key, value, (number, cas, opaque))| {
            let usual_bytes = match opcode {
                0x01..=0x03 | 0x11..=0x13 => 8,
                0x05 | 0x06 | 0x15 | 0x16 => 20,
                0x1b..=0x1e | 0x23 | 0x24 => 4,
                _ => 0,
            };
            // With the last byte of each 32 bits a small number, or 2^32 - 1 in all.
            let usual = (1..=usual_bytes).map(|at| match number {
                3 => 0xff,
                _ if at % 4 == 0 => number,
                _ => 0,
            });
            let extras = extras.unwrap_or_else(|| usual.collect());
            let mut bytes = vec![0x80, opcode];
            bytes.extend_from_slice(&u16::try_from(key.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(&[u8::try_from(extras.len()).unwrap(), 0, 0, 0]);
            let body = u32::try_from(extras.len() + key.len() + value.len()).unwrap();
            bytes.extend_from_slice(&body.to_be_bytes());
            bytes.extend_from_slice(&opaque.to_be_bytes());
            bytes.extend_from_slice(&cas.to_be_bytes());
            [bytes, extras, key, value].concat()
        },
    );
    prop::collection::vec(request, 0..40).prop_map(|requests| requests.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn pieces_give_the_requests_of_the_whole(
        bytes in stream(),
        cuts in prop::collection::vec(1u8..40, 1..8),
    ) {
        exercise::scan_any(&bytes, &cuts);
    }

    #[test]
    fn streams_are_executed_within_bounds(bytes in stream(), step_s in 0u8..9, policy in any::<u8>()) {
        exercise::execute_any(&bytes, step_s, exercise::policy_of(policy));
    }

    #[test]
    fn binary_pieces_give_the_requests_of_the_whole(
        mut bytes in binary_requests(),
        rules in 0u8..4,
        cuts in prop::collection::vec(1u8..40, 1..8),
        spoil in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        if let Some((at, byte)) = spoil.filter(|_| !bytes.is_empty()) {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        // Long values in short pieces take long.
        bytes.truncate(4 << 10);
        exercise_binary::scan_any(&bytes, rules, &cuts);
    }

    #[test]
    fn binary_streams_are_executed_within_bounds(
        bytes in binary_requests(),
        step_s in 0u8..9,
        policy in any::<u8>(),
    ) {
        exercise_binary::execute_any(&bytes, step_s, exercise::policy_of(policy));
    }

    #[test]
    fn frames_are_answered_within_bounds(
        bytes in frames(),
        policy in any::<u8>(),
        spoil in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let mut bytes = bytes;
        if let Some((at, byte)) = spoil.filter(|_| !bytes.is_empty()) {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        exercise_keyvault::answer_any(&bytes, exercise::policy_of(policy));
    }
}
