//! What it takes to run real programs and measure them: start and end them, measure the memory they
//! hold, and put them under Farpool, under the kernel's own swapping, or under nothing.
//!
//! Invariants:
//! * everything set up (process, control group, swap) is an owner that takes it down when dropped;
//! * SIGINT and SIGTERM only set a flag, and every loop that waits checks it, so an interrupted run
//!   ends through the same drops as a failed one.

mod memory;
mod place;
mod process;
mod swap;
mod tree;

pub(crate) use memory::Peak;
pub(crate) use place::Blade;
pub use place::{Door, Launch, Place, Stage};
pub use process::{Running, check_interrupted, progress, progress_done, watch_signals};
pub(crate) use process::{run_to_end, run_undisturbed};
pub use tree::is_servant;

use crate::BenchError;
use std::path::Path;

/// Prefix of the names of everything that outlives a killed process; the process id follows it.
const OWN_NAME: &str = "farpool-stage-";

/// Returns a name of this process's own for a folder or a control group. [`remove_leftovers`]
/// recognises it.
#[must_use]
pub fn own_name() -> String {
    format!("{OWN_NAME}{}", std::process::id())
}

/// Removes what killed processes left behind: control groups, and in `folder` folders of
/// [`own_name`] with the swap files in them.
pub fn remove_leftovers(folder: &Path) {
    farpool_hosts::remove_leftovers(OWN_NAME);
    for left in farpool_hosts::leftovers(folder, OWN_NAME) {
        swap::remove_leftovers(&left);
        // Best effort: the folder holds only programs' own files.
        let _ = std::fs::remove_dir_all(left);
    }
}

/// Returns the error for something that could not be done on this machine: a reason to skip a row,
/// not a failure.
pub(crate) fn lacking(reason: impl Into<String>) -> BenchError {
    BenchError::Lacking(reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_processes_that_are_gone_left_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ended = std::process::Command::new("true").spawn().expect("true starts");
        ended.wait().expect("it ends");
        let gone = folder.path().join(format!("{OWN_NAME}{}", ended.id()));
        let ours = folder.path().join(own_name());
        let other = folder.path().join("other");
        for folder in [&gone, &ours, &other] {
            std::fs::create_dir(folder).expect("a folder in it");
            std::fs::write(folder.join("kernel.swap"), "").expect("a file in that");
        }
        remove_leftovers(folder.path());
        assert!(!gone.exists());
        assert!(ours.join("kernel.swap").exists() && other.join("kernel.swap").exists());
    }
}
