//! Limits of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit on open files to `wanted` if it is lower: with the rights for that beyond the
/// hard limit, else up to it. Returns the limit that holds now, which may be lower than `wanted`.
#[must_use]
pub fn raise_descriptors(wanted: u64) -> u64 {
    let files = getrlimit(Resource::Nofile);
    if files.current.is_some_and(|current| current < wanted) {
        let maximum = files.maximum.map(|maximum| maximum.max(wanted));
        let whole = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
        if whole.is_err() {
            let current = files.maximum.map_or(wanted, |maximum| maximum.min(wanted));
            let part = Rlimit { current: Some(current), maximum: files.maximum };
            // If that fails as well, the limit stays, and is what is returned.
            let _ = setrlimit(Resource::Nofile, part);
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        let before = getrlimit(Resource::Nofile);
        let low = Rlimit { current: Some(64), maximum: before.maximum };
        setrlimit(Resource::Nofile, low).expect("lowering is allowed");
        assert_eq!(raise_descriptors(100), 100);
        assert_eq!(raise_descriptors(50), 100);
        setrlimit(Resource::Nofile, before).expect("the limit was there before");
    }
}
