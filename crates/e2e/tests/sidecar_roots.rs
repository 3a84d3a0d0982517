//! Programs that do not have what their keeper has. Each checks every page that it reads.

use std::path::{Path, PathBuf};

use farpool_e2e::jobs::{PATIENCE, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::tree::Peak;
use farpool_e2e::{have, turn};

const LIMIT_MIB: u64 = 32;
const LIMIT: &str = "32MiB";
/// A command that starts the program, and its arguments before that.
type Starter<'a> = (&'a str, &'a [&'a str]);

/// A C program in a directory of its own, which may become its root directory.
struct Program {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Program {
    fn new(name: &str, source: &str, options: &[&str]) -> Program {
        let directory = scratch();
        Program { path: compile_c(name, source, options, directory.path()), _directory: directory }
    }

    /// Fills 96 MiB and checks them.
    fn fills(options: &[&str]) -> Program {
        Program::new("vdso", include_str!("sidecar/vdso.c"), options)
    }
}

/// Runs a command that starts a program elsewhere; the limit must hold, and nothing be said.
fn succeeds(run: Run, (command, words): Starter<'_>, program: &Path, mode: &str) {
    let (outcome, peak_bytes) = run_at(run, (command, words), program, mode);
    outcome.require_success().require_far();
    require_limit(&outcome, peak_bytes, LIMIT_MIB);
    assert_eq!(outcome.stdout, format!("{mode}: 0 wrong\n"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr, "", "{command} {words:?}");
}

fn run_at(
    run: Run,
    (command, words): Starter<'_>,
    program: &Path,
    mode: &str,
) -> (Outcome, u64) {
    let run = run.program(command).args(words).arg(program).arg(mode).patience(PATIENCE);
    let running = run.start();
    let peak = Peak::watch(running.pid());
    let outcome = running.finish();
    (outcome, peak.end().0)
}

fn sidecar() -> Run {
    Run::through(Door::Sidecar, LIMIT)
}

/// The sidecar lives in its program's memory and asks the kernel for the time.
#[test]
fn a_program_may_unmap_or_move_its_vdso() {
    if !have("gcc") || !have("env") {
        return;
    }
    let _turn = turn();
    for options in [&["-fPIE", "-pie"][..], &["-static"]] {
        let program = Program::fills(options);
        for mode in ["unmap", "move", "late-unmap", "late-move"] {
            succeeds(sidecar(), ("env", &[]), &program.path, mode);
        }
    }
}

/// It loads programs itself, and gives them no vDSO, though the kernel says that they have one.
#[test]
fn a_program_under_valgrind_is_far() {
    if !have("gcc") || !have("valgrind") {
        return;
    }
    let _turn = turn();
    let program = Program::fills(&[]);
    // valgrind has some 30 MiB of its own.
    let run = Run::through(Door::Sidecar, "64MiB");
    let (outcome, peak_bytes) = run_at(run, ("valgrind", &["-q"]), &program.path, "stay");
    outcome.require_success().require_far();
    require_limit(&outcome, peak_bytes, 64);
    assert_eq!(outcome.stdout, "stay: 0 wrong\n", "{}", outcome.stderr);
}
