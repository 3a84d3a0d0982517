//! Real programs: compiled from source, run all-local and on far memory, compared, and held to
//! their limit.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::run::{Door, Outcome, Run};
use crate::tree::Peak;
use crate::turn;

/// How long a program may run before it counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(150);

/// The most bytes that a program with this limit may have resident at any time: the limit, a tenth
/// of it, and 32 MiB.
pub fn allowed_bytes(limit_mib: u64) -> u64 {
    (limit_mib << 20) * 11 / 10 + (32 << 20)
}

/// Checks the peak of a run against [`allowed_bytes`].
///
/// # Panics
/// If the peak was above it.
pub fn require_limit(outcome: &Outcome, peak_bytes: u64, limit_mib: u64) {
    let allowed = allowed_bytes(limit_mib);
    assert!(peak_bytes <= allowed, "peak {peak_bytes} bytes, allowed {allowed}: {}", outcome.stats);
}

/// Creates a directory that is deleted with the test.
///
/// # Panics
/// If it cannot be created.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("directory")
}

/// Runs a compiler.
///
/// # Panics
/// If the compiler is missing or fails.
pub fn compile(compiler: &str, arguments: &[&str], directory: &Path) {
    let output = Command::new(compiler).args(arguments).current_dir(directory).output();
    let output = output.expect(compiler);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler}: {said}");
}

/// Compiles a C program in a directory, with `options` for the linker. Returns the program's path.
///
/// # Panics
/// If the compiler is missing or fails.
pub fn compile_c(name: &str, source: &str, options: &[&str], directory: &Path) -> PathBuf {
    let (file, program) = (format!("{name}.c"), directory.join(name));
    std::fs::write(directory.join(&file), source).expect("source");
    let words = [&["-O1", "-pthread", &file, "-o", name], options].concat();
    compile("gcc", &words, directory);
    program
}

/// A program with arguments and the directory to run it in.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub program: &'a str,
    pub arguments: &'a [&'a str],
    pub directory: &'a Path,
}

impl Job<'_> {
    /// Runs the program all-local and at `limit_mib`. Both runs must print the same, and the limit
    /// must hold.
    ///
    /// # Panics
    /// If they do not, or if nothing was far.
    pub fn compare(self, door: Door, limit_mib: u64) -> Outcome {
        let (outcome, peak_bytes) = self.compare_results(door, limit_mib);
        require_limit(&outcome, peak_bytes, limit_mib);
        outcome
    }

    /// Runs the program all-local and at `limit_mib`. Both runs must print the same. Also returns
    /// the peak of the tree's resident memory in bytes.
    ///
    /// # Panics
    /// If they do not, or if nothing was far.
    pub fn compare_results(self, door: Door, limit_mib: u64) -> (Outcome, u64) {
        let _turn = turn();
        let expected = self.of(Run::local(self.program)).finish();
        expected.require_success();
        let (outcome, peak_bytes) = self.run(door, limit_mib);
        outcome.require_success().require_far();
        assert_eq!(outcome.stdout, expected.stdout, "{}", outcome.stderr);
        (outcome, peak_bytes)
    }

    /// Runs the program at `limit_mib`. Also returns the peak of the tree's resident memory in
    /// bytes.
    pub fn run(self, door: Door, limit_mib: u64) -> (Outcome, u64) {
        let run = Run::through(door, &format!("{limit_mib}MiB")).program(self.program);
        let running = self.of(run).start();
        let peak = Peak::watch(running.pid());
        let outcome = running.finish();
        let (peak_bytes, looks) = peak.end();
        println!(
            "{}: peak {} MiB at a limit of {limit_mib} MiB, {looks} looks, {} fetches, {} overruns",
            self.program,
            peak_bytes >> 20,
            outcome.counter("demand_fetches"),
            outcome.counter("overruns"),
        );
        (outcome, peak_bytes)
    }

    fn of(self, run: Run) -> Run {
        run.args(self.arguments).directory(self.directory).patience(PATIENCE)
    }
}

/// Gives all users access to /dev/userfaultfd until dropped.
#[derive(Debug)]
pub struct OpenDevice(u32);

impl OpenDevice {
    const PATH: &str = "/dev/userfaultfd";

    /// Changes the permissions. Returns None if this user may not.
    pub fn make() -> Option<OpenDevice> {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(OpenDevice::PATH).ok()?.permissions().mode();
        let open = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(OpenDevice::PATH, open).ok()?;
        Some(OpenDevice(mode))
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        use std::os::unix::fs::PermissionsExt;
        let _ = std::fs::set_permissions(OpenDevice::PATH, std::fs::Permissions::from_mode(self.0));
    }
}
