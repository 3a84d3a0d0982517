//! The arguments that `cargo bench` passes to the programs below `benches/`. It starts them in the
//! folder of their package, so a path among the arguments should be absolute.

/// cargo adds it to the arguments when it runs a bench.
const FLAG: &str = "--bench";

/// The arguments that a person gave after `--`.
///
/// Ends the process, without an error, if `cargo bench` did not start it: `cargo test
/// --all-targets` starts benches as well, and a measurement is not a test.
pub fn arguments() -> impl Iterator<Item = String> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if !take_flag(&mut words) {
        println!("nothing is measured without {FLAG}, which `cargo bench` adds");
        std::process::exit(0);
    }
    words.into_iter()
}

/// Takes cargo's flag out. Returns whether it was there.
fn take_flag(words: &mut Vec<String>) -> bool {
    let count = words.len();
    words.retain(|word| word != FLAG);
    words.len() < count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_flag_of_cargo_is_taken_out() {
        let mut words = ["7", "--rounds", "--bench"].map(String::from).to_vec();
        assert!(take_flag(&mut words));
        assert_eq!(words, ["7", "--rounds"]);
        assert!(!take_flag(&mut words), "it is gone");
    }
}
