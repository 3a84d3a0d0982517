//! kill -9 at every step of a fork, one step per trial: of the sidecar that reads the fork's event,
//! and of the keeper that hands the child over to its own sidecar. No child may read zeros in place
//! of its pages, or wait for ever.
//!
//! The process to be killed is traced from system call to system call from the moment at which the
//! program is told to fork, and killed at stop k, counted from 0. FARPOOL_BIRTH_STEPS is the number
//! of values of k that are tried, FARPOOL_BIRTH_FROM the first value, FARPOOL_BIRTH_STRIDE the
//! distance between them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::steps::{Step, Steps};
use farpool_e2e::{have, tree, turn, wait_until};

const STEPS: &str = "FARPOOL_BIRTH_STEPS";
const FROM: &str = "FARPOOL_BIRTH_FROM";
const STRIDE: &str = "FARPOOL_BIRTH_STRIDE";
/// Steps tried by default on the sidecar. From the event of a fork until the keeper has the child's
/// userfaultfd there are some dozen.
const FEW_STEPS: usize = 40;
/// Distance of the steps tried by default on the keeper, which makes some hundred calls from a fork
/// until the child has its own sidecar.
const KEEPERS_STRIDE: usize = 41;
const FEW_KEEPERS_STEPS: usize = 24;
const LIMIT: &str = "8MiB";
const HELD_MIB: &str = "20";
/// Resident memory of the program below which most of its memory is far: the limit, and the memory
/// of the kernel and the sidecar.
const RESIDENT_BYTES: u64 = 14 << 20;
/// How long a trial may take, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const KILLED: i32 = 128 + libc::SIGKILL;
/// The keeper's message about a sidecar that does not end with its program.
const HANGS: &str = "says nothing for";

/// The result of a trial.
struct Trial {
    step: Option<Step>,
    code: i32,
    said: String,
}

fn number(variable: &str, usual: usize) -> usize {
    let text = std::env::var(variable);
    text.map_or(usual, |text| text.parse().expect("a number"))
}

fn compile(directory: &Path) -> PathBuf {
    compile_c("births", include_str!("sidecar/births.c"), &[], directory)
}

/// Starts the program and waits until most of its memory is far. Also returns the process ids of
/// the program and its sidecar.
fn far_program(births: &Path) -> (Running, u32, u32) {
    let run = Run::through(Door::Sidecar, LIMIT).program(births).arg(HELD_MIB);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let program = running.program_pid();
    let sidecar = await_far(program);
    (running, program, sidecar)
}

/// Waits until most of a program's memory is far. Returns its sidecar.
fn await_far(program: u32) -> u32 {
    wait_until("a sidecar, and little that is resident", PATIENCE, || {
        let is_small = tree::resident_bytes(program)? < RESIDENT_BYTES;
        tree::sidecars_in(program).pop().filter(|_| is_small)
    })
}

/// Kills the sidecar at step `wanted` of a fork. There may be fewer steps; then nothing is killed.
fn trial(births: &Path, wanted: usize) -> Trial {
    let (running, program, sidecar) = far_program(births);
    let follow = move || {
        let steps = Steps::stop(sidecar).expect("it stops");
        tree::signal(program, libc::SIGUSR1);
        steps.kill_at(wanted, PATIENCE, || !tree::is_alive(program)).expect("it is followed")
    };
    // A separate thread, as traced threads continue when the tracing thread ends.
    let step = std::thread::spawn(follow).join().expect("no panic");
    let outcome = running.finish();
    Trial { step, code: outcome.code, said: format!("{}{}", outcome.stdout, outcome.stderr) }
}

/// Kills the keeper of an attached tree at step `wanted` of a fork. Returns how the program ended;
/// it must end by itself.
fn keepers_trial(births: &Path, wanted: usize) -> Trial {
    let run = Run::local(births).args([HELD_MIB, "waits"]);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let program = running.pid();
    let attach = Run::attach(program, LIMIT).arg("--tree").patience(PATIENCE).start();
    await_far(program);
    let keeper = attach.pid();
    let follow = move || {
        let steps = Steps::stop(keeper).expect("it stops");
        tree::signal(program, libc::SIGUSR1);
        steps.kill_at(wanted, PATIENCE, || false).expect("it is followed")
    };
    let step = std::thread::spawn(follow).join().expect("no panic");
    attach.finish();
    let child = || tree::programs(program).into_iter().next();
    // The kill may have ended the child, too, if the keeper was just making a call on its behalf.
    wait_until("the child", PATIENCE, || {
        (child().is_some() || !running.is_running()).then_some(())
    });
    if let Some(child) = child() {
        tree::signal(child, libc::SIGUSR2);
    }
    let outcome = running.finish();
    Trial { step, code: outcome.code, said: format!("{}{}", outcome.stdout, outcome.stderr) }
}

#[test]
fn a_sidecar_that_is_killed_at_any_step_of_a_fork_leaves_no_child_with_zeros() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let births = compile(directory.path());
    let (steps, from, stride) = (number(STEPS, FEW_STEPS), number(FROM, 0), number(STRIDE, 1));
    let mut wrong = Vec::new();
    for wanted in (from..).step_by(stride).take(steps) {
        let Trial { step, code, said } = trial(&births, wanted);
        println!("step {wanted}: {step:?}: {code}");
        let is_right = if step.is_some() { code == KILLED } else { code == 0 };
        if said.contains("WRONG") || !is_right {
            println!("{said}");
            wrong.push(wanted);
        }
        if step.is_none() {
            break;
        }
    }
    assert!(wrong.is_empty(), "wrong at the steps {wrong:?}");
}

#[test]
fn a_keeper_that_is_killed_while_a_child_is_handed_over_leaves_none_that_waits_for_ever() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let births = compile(directory.path());
    let (steps, from) = (number(STEPS, FEW_KEEPERS_STEPS), number(FROM, 0));
    let stride = number(STRIDE, KEEPERS_STRIDE);
    let mut wrong = Vec::new();
    for wanted in (from..).step_by(stride).take(steps) {
        let Trial { step, code, said } = keepers_trial(&births, wanted);
        println!("step {wanted}: {step:?}: {code}: {}", said.replace('\n', " "));
        // The program was ended by the kill, or ended with all its pages. A child may have been
        // ended by the kill during a call that the keeper made on its behalf.
        let is_right = code == KILLED
            || (code == 0 && said.contains("ended 0"))
            || (code == 1 && said.contains("ended 9"));
        if said.contains("WRONG") || !is_right {
            wrong.push(wanted);
        }
    }
    assert!(wrong.is_empty(), "wrong at the steps {wrong:?}");
}

/// Killing the warden ends nothing else, and another warden is there for the next kill of the
/// sidecar.
#[test]
fn a_warden_that_was_killed_is_replaced() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let (running, program, sidecar) = far_program(&compile(directory.path()));
    let warden = || tree::wardens_in(program).pop();
    let first = warden().expect("a warden");
    // It ignores every signal but SIGKILL.
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        tree::signal(first, signal);
    }
    tree::signal(first, libc::SIGKILL);
    let second = wait_until("another warden", PATIENCE, || warden().filter(|pid| *pid != first));
    assert!(tree::is_alive(program) && tree::is_alive(sidecar));
    tree::signal(sidecar, libc::SIGKILL);
    wait_until("its end", PATIENCE, || (!tree::is_alive(second)).then_some(()));
    let outcome = running.finish();
    assert_eq!(outcome.code, KILLED, "{}", outcome.stderr);
}

/// The sidecar is stopped when its program ends: the keeper ends it, and says so.
#[test]
fn a_sidecar_that_hangs_after_its_program_is_not_waited_for() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let (running, program, sidecar) = far_program(&compile(directory.path()));
    tree::signal(sidecar, libc::SIGSTOP);
    tree::signal(program, libc::SIGKILL);
    let outcome = running.finish();
    assert!(outcome.stderr.contains(HANGS), "{}", outcome.stderr);
    assert!(!tree::is_alive(sidecar));
}
