//! How a run's redundancy stands on the board.

use farpool_policy::redundancy::{COPIES_LIMIT, Redundancy};

/// The number of parity, which is no number of copies.
const PARITY_NUMBER: u32 = 1 << 8;

pub(crate) fn number_of(redundancy: Redundancy) -> u32 {
    match redundancy {
        Redundancy::Copies(copies) => copies.into(),
        Redundancy::Parity => PARITY_NUMBER,
    }
}

pub(crate) fn of_number(number: u32) -> Option<Redundancy> {
    match u8::try_from(number) {
        Ok(copies @ 1..=COPIES_LIMIT) => Some(Redundancy::Copies(copies)),
        _ => (number == PARITY_NUMBER).then_some(Redundancy::Parity),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stands_for_what_was_written() {
        for text in Redundancy::TEXTS {
            let redundancy = text.parse::<Redundancy>().expect("known");
            assert_eq!(of_number(number_of(redundancy)), Some(redundancy));
        }
        for number in [0, 4, 255, 257] {
            assert_eq!(of_number(number), None, "{number}");
        }
    }
}
