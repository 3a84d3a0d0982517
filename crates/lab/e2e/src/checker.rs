//! A program that checks every page it reads, on blades that die or damage what they have.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use farpool_units::PAGE_BYTES;

use crate::blade::Blade;
use crate::run::{Run, Running};
use crate::{PATIENCE, wait_until};

const THREADS: usize = 2;
/// Copying is slow on purpose while the program uses its far memory.
pub const COPYING: Duration = Duration::from_secs(120);

/// A program that checks every page it reads, until it is told to end.
#[derive(Debug)]
pub struct Checker {
    /// Its run.
    pub running: Running,
    end: tempfile::TempDir,
}

impl Checker {
    /// Starts one of 64 MiB, part of it far.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(run: Run, seed: u32, operations: &str) -> Checker {
        let end = tempfile::tempdir().expect("a directory");
        let mut running = run
            .own_program("farpool-stress")
            .args(["--mib", "64", "--threads", &THREADS.to_string(), "--progress"])
            .args(["--seconds", "600", "--seed", &seed.to_string()])
            .args(["--ops", operations, "--until"])
            .arg(end.path().join("end"))
            .start();
        running.wait_for_output("filled", THREADS);
        running.wait_until_far();
        Checker { running, end }
    }

    /// Superpages that would be lost with a blade; None before anything is told.
    #[must_use]
    pub fn degraded(&self) -> Option<u64> {
        self.total("degraded_superpages")
    }

    /// A counter of all processes.
    #[must_use]
    pub fn total(&self, name: &str) -> Option<u64> {
        self.running.told()?["total"][name].as_u64()
    }

    /// Waits until the loss of a blade is told.
    ///
    /// # Panics
    /// If it is not.
    pub fn wait_for_loss(&self) {
        wait_until("the loss of a blade to be told", PATIENCE, || {
            self.running.stderr().contains("read from their copies").then_some(())
        });
    }

    /// Waits until nothing would be lost with a blade any more.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_for_copies(&self) {
        wait_until("all copies to be there again", COPYING, || {
            (self.degraded()? == 0).then_some(())
        });
    }

    /// Waits until so many pages more were fetched.
    ///
    /// # Panics
    /// If that takes too long, or far memory is lost.
    pub fn wait_for_fetches(&self, count: u64) {
        let before = self.running.fetched().unwrap_or(0);
        wait_until("pages to be fetched", COPYING, || {
            let has_failed = self.running.stderr().contains("far memory is lost");
            assert!(!has_failed, "{}", self.running.stderr());
            (self.running.fetched()? > before + count).then_some(())
        });
    }

    /// Ends it. All that it read was right.
    ///
    /// # Panics
    /// If it was not, or anything was lost.
    pub fn require_success(self) {
        std::fs::write(self.end.path().join("end"), "").expect("a file");
        let outcome = self.running.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    }
}

/// Flips a bit of every page that a blade has in a file.
///
/// # Panics
/// If it has few.
pub fn damage(blade: &Blade) {
    let file = File::options().read(true).write(true).open(blade.memory_file()).expect("file");
    let pages = file.metadata().expect("size").len() / PAGE_BYTES as u64;
    let (mut page, mut damaged) = ([0; PAGE_BYTES], 0);
    for offset in (0..pages).map(|page| page * PAGE_BYTES as u64) {
        file.read_exact_at(&mut page, offset).expect("read");
        if page != [0; PAGE_BYTES] {
            file.write_all_at(&[page[9] ^ 1], offset + 9).expect("written");
            damaged += 1;
        }
    }
    assert!(damaged > 1000, "{damaged} pages");
}
