//! Limits of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises a limit of this process as far as is allowed without rights. Returns the limit that it
/// was given, for programs that it starts.
pub fn raise_to_maximum(resource: Resource) -> Rlimit {
    let given = getrlimit(resource);
    // If this fails, the limit stays; whoever needs more checks it.
    let _ = setrlimit(resource, Rlimit { current: given.maximum, ..given });
    given
}

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

    /// Set in the process whose limits are changed, which are not those of other tests.
    const CHILD_VARIABLE: &str = "FARPOOL_TEST_LIMITS_CHILD";

    /// Runs this test in a process of its own. Returns whether this is that process.
    fn is_child(test: &str) -> bool {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            return true;
        }
        let program = std::env::current_exe().expect("this program");
        let mut child = std::process::Command::new(program);
        child.args(["--exact", test, "--nocapture"]).env(CHILD_VARIABLE, "1");
        let ended = child.output().expect("it starts");
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && said.contains("1 passed"), "{said}");
        false
    }

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        if !is_child("limits::tests::a_limit_is_raised_and_never_lowered") {
            return;
        }
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum }).expect("it is lower");
        assert_eq!(raise_descriptors(100), 100);
        assert_eq!(raise_descriptors(50), 100);
        let given = raise_to_maximum(Resource::Nofile);
        assert_eq!((given.current, given.maximum), (Some(100), maximum));
        assert_eq!(getrlimit(Resource::Nofile).current, maximum);
    }
}
