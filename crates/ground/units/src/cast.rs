//! Conversions between integer types that define what happens to a value that does not fit.
//!
//! A conversion that falls back to zero or to a limit turns an impossible value into a plausible
//! wrong one. Here the caller chooses: [`exactly`] where the value must fit, [`at_most`] where the
//! limit is as good as the value.

use std::fmt::Display;

/// The integer types of this module.
pub trait Number: Copy + Display + PartialOrd + Default {
    const MIN: Self;
    const MAX: Self;
}

macro_rules! numbers {
    ($($number:ty)*) => {
        $(impl Number for $number {
            const MIN: Self = <$number>::MIN;
            const MAX: Self = <$number>::MAX;
        })*
    };
}
numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize);

/// Converts a value that must fit: an index, a length, a count that an invariant bounds.
///
/// # Panics
/// If it does not fit, since going on would use another value in its place.
#[inline]
#[must_use]
#[track_caller]
pub fn exactly<To: Number + TryFrom<From>, From: Number>(value: From) -> To {
    match To::try_from(value) {
        Ok(converted) => converted,
        Err(_) => does_not_fit(value, std::any::type_name::<To>()),
    }
}

#[cold]
#[track_caller]
fn does_not_fit(value: impl Display, target: &str) -> ! {
    panic!("{value} does not fit into {target}")
}

/// Converts a value, or returns the nearest one that fits: for clocks, reports and bounds, where
/// more than the target's limit means the limit.
#[inline]
#[must_use]
pub fn at_most<To: Number + TryFrom<From>, From: Number>(value: From) -> To {
    let nearest = if value < From::default() { To::MIN } else { To::MAX };
    To::try_from(value).unwrap_or(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_stays_what_it_is() {
        assert_eq!(exactly::<u8, _>(255_u64), 255);
        assert_eq!(exactly::<u32, _>(7_i64), 7);
        assert_eq!(at_most::<u16, _>(65_535_usize), 65_535);
        assert_eq!(at_most::<i32, _>(-5_i64), -5);
    }

    #[test]
    #[should_panic(expected = "256 does not fit into u8")]
    fn what_must_fit_and_does_not_ends_the_program() {
        let _: u8 = exactly(256_u32);
    }

    #[test]
    #[should_panic(expected = "-1 does not fit into u64")]
    fn a_negative_value_is_no_count() {
        let _: u64 = exactly(-1_i64);
    }

    #[test]
    fn what_may_be_more_becomes_the_nearest() {
        assert_eq!(at_most::<u8, _>(256_u32), u8::MAX);
        assert_eq!(at_most::<u64, _>(u128::MAX), u64::MAX);
        assert_eq!(at_most::<u32, _>(-1_i64), 0);
        assert_eq!(at_most::<i8, _>(-1_000_i32), i8::MIN);
    }
}
