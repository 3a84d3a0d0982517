//! Whatever bytes the planner is given, it answers or refuses by name. `fuzz/` does the same for
//! any length of time.

mod exercise;

use proptest::prelude::*;

/// Letters of which much of what a reader understands is made.
const LETTERS: &[u8] = b"0123456789.,;-eE\"\n\t Ttvmcpu_s%";

proptest! {
    #[test]
    fn no_bytes_end_a_reader_otherwise_than_by_name(
        noise in proptest::collection::vec(0..LETTERS.len(), 0..300),
        header in prop::sample::select(vec![
            "", "vm,time,cpu,memory_bytes\n", "vm,step,cpu\n", "time;memory_bytes\n", "vm,cpu_cores\n",
        ]),
        table in prop::sample::select(vec![
            "", "name = \"a\"\ncpu_cores = ", "[[server]]\nname = \"a\"\n", "[server]\nunits = ",
        ]),
    ) {
        let noise: Vec<u8> = noise.into_iter().map(|at| LETTERS[at]).collect();
        exercise::read_any_series(&[header.as_bytes(), &noise].concat());
        exercise::parse_any_catalog(&[table.as_bytes(), &noise].concat());
    }
}
