//! Whether a process may have been born since the tree was last walked.
//!
//! Walking a tree opens a file for each of its threads. At the limit the keeper checks the tree
//! every few ms, and most of the time no process was born: the kernel tells by the last process id
//! that it assigned (proc(5), loadavg).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// The tree is walked at least this often: an id is assigned before its process can be found.
const WALK_STEP: Duration = Duration::from_millis(20);
/// Room for its five fields; the longest seen has 35 bytes.
const LOADAVG_BYTES: usize = 128;

/// See the module's description.
#[derive(Debug, Default)]
pub struct Births {
    loadavg: Option<File>,
    /// The last process id at the last walk, and when that was.
    walked: Option<(u64, Instant)>,
}

impl Births {
    pub fn watch() -> Births {
        // Without the file a birth is always assumed.
        Births { loadavg: File::open("/proc/loadavg").ok(), walked: None }
    }

    /// True if the tree has to be walked again, which the caller then does.
    pub fn may_have_been(&mut self, now: Instant) -> bool {
        let Some(last) = self.last_number() else { return true };
        let is_known =
            self.walked.is_some_and(|(number, at)| number == last && now < at + WALK_STEP);
        if !is_known {
            self.walked = Some((last, now));
        }
        !is_known
    }

    fn last_number(&self) -> Option<u64> {
        let mut text = [0; LOADAVG_BYTES];
        let length = self.loadavg.as_ref()?.read_at(&mut text, 0).ok()?;
        last_number(text.get(..length)?)
    }
}

/// The last field of `/proc/loadavg`. Pure.
fn last_number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(4)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_birth_is_noticed_and_the_tree_is_walked_now_and_then() {
        let mut births = Births::watch();
        let now = Instant::now();
        assert!(births.may_have_been(now));
        assert!(births.may_have_been(now + WALK_STEP));
        std::process::Command::new("true").status().expect("a child");
        assert!(births.may_have_been(now + WALK_STEP));
        assert!(Births::default().may_have_been(now));
    }

    #[test]
    fn the_last_number_is_the_fifth_field() {
        assert_eq!(last_number(b"0.20 0.18 0.12 1/80 11206\n"), Some(11206));
        assert_eq!(last_number(b"0.20 0.18 0.12 1/80"), None);
    }
}
