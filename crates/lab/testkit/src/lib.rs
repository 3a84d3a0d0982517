//! What tests of every crate share.
//!
//! * [`wait_until`] and [`wait_for`]: waits for a condition, with a deadline; no test sleeps for a
//!   fixed time and hopes.
//! * [`skip`] and [`have`]: a test that cannot run here says so in one line, which `make test`
//!   counts and prints.
//! * [`ports`]: ports for servers that must be told one beforehand.
//! * `disk`, a feature: a real block device that is slow, hangs, fails or garbles on order.

#[cfg(feature = "disk")]
pub mod disk;
pub mod ports;

use std::time::{Duration, Instant};

/// Pause between two checks of a condition: short compared with all that is waited for, and long
/// compared with the cost of a check.
const STEP: Duration = Duration::from_millis(2);

/// Waits until `condition` gives a value, and returns it.
///
/// # Panics
/// When it has given none within `patience`; the message says `what` was waited for.
#[track_caller]
pub fn wait_for<T>(what: &str, patience: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} in vain: {what}");
        std::thread::sleep(STEP);
    }
}

/// Waits until `condition` is true.
///
/// # Panics
/// When it has not become true within `patience`; the message says `what` was waited for.
#[track_caller]
pub fn wait_until(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, patience, || condition().then_some(()));
}

/// Says visibly that a test cannot run here; the test then returns.
pub fn skip(reason: &str) {
    println!("SKIPPED: {reason}");
}

fn is_installed(program: &str) -> bool {
    let search = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&search).any(|directory| directory.join(program).is_file())
}

/// True if a program is installed; if not, the test is skipped with that reason.
#[must_use]
pub fn have(program: &str) -> bool {
    let found = is_installed(program);
    if !found {
        skip(&format!("{program} is not installed"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_the_condition() {
        let mut checks = 0;
        let value = wait_for("three checks", Duration::from_secs(60), || {
            checks += 1;
            (checks == 3).then_some(checks)
        });
        assert_eq!(value, 3);
    }

    #[test]
    #[should_panic(expected = "in vain: what never comes")]
    fn a_wait_in_vain_says_for_what() {
        wait_until("what never comes", Duration::from_millis(5), || false);
    }

    #[test]
    fn programs_are_found_in_the_path() {
        assert!(have("sh"));
        assert!(!is_installed("a-program-of-no-package"));
    }
}
