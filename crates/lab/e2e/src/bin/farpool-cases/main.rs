//! Small programs, each of which does one thing to its far memory that once failed or easily could.
//!
//! `farpool-cases NAME` runs a case. Most cases first touch more memory than the limit (see
//! `ballast`), so that the pager is active and older pages are on the blade. Exit code 0 means that
//! everything was as without Farpool, 9 wrong data, 8 another difference.

#![allow(unreachable_pub, reason = "a program: nothing leaves the crate")]

mod cases;
mod direct;
mod forks;
mod full;
mod memory;
mod merged;
mod programs;
mod rights;
mod unchanged;

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some((_, case)) = cases::ALL.iter().find(|(known, _)| *known == name) else {
        let names: Vec<&str> = cases::ALL.iter().map(|(name, _)| *name).collect();
        eprintln!("farpool-cases: no case {name:?}; there are {}", names.join(", "));
        std::process::exit(2);
    };
    case();
    println!("ok");
}
