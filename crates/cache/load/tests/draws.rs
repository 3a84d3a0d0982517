//! Draws have the requested shares, and the same seed gives the same draws.

use farpool_load::workload::{
    Generator, KEY_BYTES_MAX, KeyNumber, Operation, VALUE_BYTES_MAX, Workload,
};

const DRAWS: u32 = 100_000;

#[test]
fn named_workloads_keep_their_shares() {
    for name in ["uniform", "zipf", "zipf:1.5", "friendfeed", "microblog", "twitter:cluster19"] {
        let workload = Workload::named(name, 10_000).unwrap();
        let mut generator = Generator::new(&workload, 1, (0, 1));
        let mut again = Generator::new(&workload, 1, (0, 1));
        let mut other = Generator::new(&workload, 2, (0, 1));
        let (mut sets, mut fresh, mut differ) = (0, 0, 0);
        for _ in 0..DRAWS {
            let draw = generator.draw();
            assert_eq!(draw, again.draw(), "{name}");
            differ += u32::from(draw != other.draw());
            sets += u32::from(draw.operation == Operation::Set);
            fresh += u32::from(draw.key.0 >= workload.keys);
            assert!((8..=KEY_BYTES_MAX).contains(&workload.key_bytes(draw.key)));
            assert!((1..=VALUE_BYTES_MAX).contains(&workload.value_bytes(draw.key)));
        }
        let near =
            |count: u32, share: f64| (f64::from(count) / f64::from(DRAWS) - share).abs() < 0.01;
        assert!(near(sets, workload.mix.set), "{name}: {sets} sets");
        assert!(near(fresh, workload.one_hit), "{name}: {fresh} keys that come once");
        assert!(differ > DRAWS / 100, "{name}: another seed draws the same");
    }
}

#[test]
fn keys_that_come_once_are_nobody_elses() {
    let workload = Workload { one_hit: 1.0, ..Workload::named("uniform", 100).unwrap() };
    let mut seen = std::collections::HashSet::new();
    for number in 0..3 {
        let mut generator = Generator::new(&workload, 1, (number, 3));
        for _ in 0..1000 {
            let KeyNumber(key) = generator.key();
            assert!(key >= 100 && seen.insert(key));
        }
    }
}

#[test]
fn an_unknown_name_is_told_the_known_ones() {
    for name in ["nothing", "zipf:0", "twitter:cluster99", "twitter:5"] {
        let error = Workload::named(name, 10).unwrap_err().to_string();
        assert!(error.contains("cluster"), "{error}");
    }
}
