//! Spoiled streams, as many as a test has time for; fuzz/ goes on from here.

mod exercise;

use proptest::prelude::*;
use proptest::sample::select;

/// Pieces of requests, so that chance comes far.
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
    fn streams_are_executed_within_bounds(bytes in stream(), step_s in 0u8..9) {
        exercise::execute_any(&bytes, step_s);
    }
}
