//! kill -9 at every step of a fork, one after the other: of the sidecar that reads of it, and of
//! the keeper that hands the child over to a sidecar of its own. No child may read zeros where its
//! pages were, nor wait for ever.
//!
//! The process to be killed is followed from system call to system call from the moment at which
//! the program is told to fork, and killed at the k-th stop. FARPOOL_BIRTH_STEPS says how many k
//! are tried, FARPOOL_BIRTH_FROM where they begin, FARPOOL_BIRTH_STRIDE how far they are apart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::steps::{Step, Steps};
use farpool_e2e::{have, tree, turn, wait_until};

const STEPS: &str = "FARPOOL_BIRTH_STEPS";
const FROM: &str = "FARPOOL_BIRTH_FROM";
const STRIDE: &str = "FARPOOL_BIRTH_STRIDE";
/// From the event of a fork until the keeper has the child's userfaultfd there are some dozen.
const FEW_STEPS: usize = 40;
/// From a fork until the child has a sidecar of its own the keeper makes some hundred calls.
const KEEPERS_STRIDE: usize = 41;
const FEW_KEEPERS_STEPS: usize = 24;
const LIMIT: &str = "8MiB";
const HELD_MIB: &str = "20";
/// Of the program, when most of it is far: the limit, and what the kernel and the sidecar hold
/// besides.
const RESIDENT_BYTES: u64 = 14 << 20;
/// Everything of a trial ends within this, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const KILLED: i32 = 128 + libc::SIGKILL;
/// What a keeper says of a sidecar that does not end with its program.
const HANGS: &str = "says nothing for";

/// What a trial was.
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

/// The program, most of whose memory is far, and its sidecar.
fn far_program(births: &Path) -> (Running, u32, u32) {
    let run = Run::through(Door::Sidecar, LIMIT).program(births).arg(HELD_MIB);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let program = running.program_pid();
    let sidecar = await_far(program);
    (running, program, sidecar)
}

/// The sidecar of a program, once most of its memory is far.
fn await_far(program: u32) -> u32 {
    wait_until("a sidecar, and little that is resident", PATIENCE, || {
        let is_small = tree::resident_bytes(program)? < RESIDENT_BYTES;
        tree::sidecars_in(program).pop().filter(|_| is_small)
    })
}

/// Kills the sidecar at a step of a fork; there may be fewer.
fn trial(births: &Path, wanted: usize) -> Trial {
    let (running, program, sidecar) = far_program(births);
    let follow = move || {
        let steps = Steps::stop(sidecar).expect("it stops");
        tree::signal(program, libc::SIGUSR1);
        steps.kill_at(wanted, PATIENCE, || !tree::is_alive(program)).expect("it is followed")
    };
    // A thread of its own: what it traces goes on when it ends.
    let step = std::thread::spawn(follow).join().expect("no panic");
    let outcome = running.finish();
    Trial { step, code: outcome.code, said: format!("{}{}", outcome.stdout, outcome.stderr) }
}

/// Kills the keeper of an attached tree at a step of a fork. Says how the program ended, which must
/// be by itself.
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
    // It may have been ended with the program, in whose name the keeper just made a call.
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
        // Ended by the kill, or with all its pages; a child may have ended with the keeper's call
        // in its name.
        let is_right = code == KILLED
            || (code == 0 && said.contains("ended 0"))
            || (code == 1 && said.contains("ended 9"));
        if said.contains("WRONG") || !is_right {
            wrong.push(wanted);
        }
    }
    assert!(wrong.is_empty(), "wrong at the steps {wrong:?}");
}

/// Whoever ends the warden ends nothing else, and the next kill of the sidecar finds another one.
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
    // Nothing but a kill reaches it.
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

/// The sidecar stands still when its program ends: the keeper ends it, and says so.
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
