//! Places of superpages where a lane read what was never stored there. It read another copy
//! instead; a [`Mover`](crate::Mover) looks at the place and has the copy made anew.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use farpool_kernel::lock;

use crate::{PageError, SegmentHandle};

/// Superpages that are noted at once; more are found again when they are read, or verified.
const SUSPECTS_LIMIT: usize = 64;

/// One copy of a superpage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Suspect {
    pub(crate) copy: SegmentHandle,
    pub(crate) superpage: u32,
}

/// Copies to be looked at.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// There is one; so that nobody takes the lock for nothing.
    is_any: AtomicBool,
    noted: Mutex<Vec<Suspect>>,
}

impl Suspects {
    /// Notes a copy, once.
    pub(crate) fn note(&self, suspect: Suspect) {
        let mut noted = lock(&self.noted);
        if noted.len() < SUSPECTS_LIMIT && !noted.contains(&suspect) {
            noted.push(suspect);
            self.is_any.store(true, Release);
        }
    }

    /// True if a copy is to be looked at. Lock-free.
    pub(crate) fn is_any(&self) -> bool {
        self.is_any.load(Acquire)
    }

    /// Takes one of those that were noted.
    pub(crate) fn take(&self) -> Option<Suspect> {
        if !self.is_any() {
            return None;
        }
        let mut noted = lock(&self.noted);
        let suspect = noted.pop();
        self.is_any.store(!noted.is_empty(), Release);
        suspect
    }
}

/// True if the blade answered with something else than what was stored. What was damaged on the way
/// is not damaged where it lies.
pub(crate) fn is_damage(error: PageError) -> bool {
    error == PageError::Forged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_noted_once_and_no_more_than_the_limit() {
        let suspects = Suspects::default();
        assert!(!suspects.is_any() && suspects.take().is_none());
        let of = |superpage| Suspect { copy: SegmentHandle(3), superpage };
        (0..100).chain(0..100).for_each(|superpage| suspects.note(of(superpage)));
        let mut taken: Vec<_> = std::iter::from_fn(|| suspects.take()).collect();
        taken.sort_unstable();
        assert!(taken.into_iter().eq((0..64).map(of)), "the first ones, once each");
        assert!(!suspects.is_any());
    }
}
