//! `farpool-testrun`: every test program of the workspace, two at a time where they allow it.
//!
//! Programs that hold others to a limit, or measure, run first, one at a time. Unit and property
//! tests run beside them at the lowest priority, so that they take only what is idle. The rest,
//! which mostly waits for daemons, runs after them in two lanes. The last line says how many tests
//! passed, failed and were skipped; the exit code is 1 when one failed.

mod classes;
mod outcome;
mod programs;
mod run;
mod summary;

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use farpool_kernel::lock;

use classes::{Class, in_order};
use outcome::Outcome;
use programs::TestProgram;
use summary::Phases;

/// The scope of all packages.
const WORKSPACE: &str = "--workspace";

/// Runs the tests of the workspace, or of the packages that are named as for `cargo test`.
#[derive(Debug, Parser)]
struct Args {
    /// Only unit and property tests
    #[arg(long)]
    fast: bool,
    /// The folder for what each test program prints
    #[arg(long, default_value = "target/test")]
    logs: PathBuf,
    /// One test program at a time
    #[arg(long)]
    one_lane: bool,
    /// Arguments of `cargo test`, such as -p farpool-wire
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    scope: Vec<String>,
}

/// How a job's process is scheduled.
#[derive(Clone, Copy)]
enum Priority {
    Usual,
    /// The lowest, nice 19: it takes what the program beside it leaves.
    Background,
}

impl Priority {
    fn command(self, program: impl AsRef<OsStr>) -> Command {
        match self {
            Priority::Usual => Command::new(program),
            Priority::Background => {
                let mut command = Command::new("nice");
                command.args(["-n", "19"]).arg(program);
                command
            }
        }
    }
}

/// What a lane does next.
enum Job {
    Program(TestProgram),
    /// `cargo test --doc` of the whole scope.
    Documentation,
}

#[derive(Default)]
struct Outcomes(Mutex<Vec<Outcome>>);

impl Outcomes {
    /// Runs the jobs of a queue until it is empty.
    fn work(&self, queue: &Mutex<VecDeque<Job>>, args: &Args) -> anyhow::Result<()> {
        self.work_until(queue, args, Priority::Usual, &AtomicBool::new(false))
    }

    /// Runs the jobs of a queue until it is empty or `is_over`.
    fn work_until(
        &self,
        queue: &Mutex<VecDeque<Job>>,
        args: &Args,
        priority: Priority,
        is_over: &AtomicBool,
    ) -> anyhow::Result<()> {
        // The queue is not held locked while a job runs.
        let next = || lock(queue).pop_front();
        while !is_over.load(Ordering::Relaxed)
            && let Some(job) = next()
        {
            let outcome = match job {
                Job::Program(program) => run_program(&program, &args.logs, priority)?,
                Job::Documentation => run_documentation(&args.scope, &args.logs, priority)?,
            };
            println!("{}", summary::line(&outcome));
            lock(&self.0).push(outcome);
        }
        Ok(())
    }
}

fn run_program(program: &TestProgram, logs: &Path, priority: Priority) -> anyhow::Result<Outcome> {
    let mut command = priority.command(&program.path);
    command.arg("--show-output").current_dir(&program.folder);
    // The variables that cargo sets for the tests that it starts.
    command
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("CARGO", programs::cargo().get_program());
    // The programs under test lie beside the folder of the test programs, and are built.
    if let Some(built) = program.path.ancestors().nth(2) {
        command.env("FARPOOL_E2E_DIR", built);
    }
    let title = program.title();
    let log = logs.join(format!("{}.log", title.replace(' ', "-")));
    run::run(title, command, &log)
}

fn run_documentation(scope: &[String], logs: &Path, priority: Priority) -> anyhow::Result<Outcome> {
    let mut command = priority.command(programs::cargo().get_program());
    command.args(["test", "--doc", "--quiet"]).args(scope);
    run::run("documentation".to_owned(), command, &logs.join("documentation.log"))
}

fn test(args: &Args) -> anyhow::Result<(Vec<Outcome>, Phases)> {
    std::fs::create_dir_all(&args.logs)?;
    let mut phases = Phases::default();
    let mut start = Instant::now();
    let mut phase = || std::mem::replace(&mut start, Instant::now()).elapsed();
    let programs = programs::build(&args.scope)?;
    anyhow::ensure!(!programs.is_empty(), "no test program is of {:?}", args.scope);
    if args.scope.iter().any(|it| it == WORKSPACE) {
        let unknown = classes::unknown(&programs);
        anyhow::ensure!(unknown.is_empty(), "classes.rs has programs that are not: {unknown:?}");
    }
    let jobs = |class: &dyn Fn(Class) -> bool| -> VecDeque<Job> {
        in_order(programs.clone(), class).into_iter().map(Job::Program).collect()
    };
    phases.build = phase();
    let waiting = jobs(&|class| class == Class::Waiting && !args.fast);
    let mut quick = jobs(&|class| class == Class::Quick);
    if !args.fast && args.scope.iter().any(|it| it == WORKSPACE) {
        quick.push_back(Job::Documentation);
    }
    let steady = jobs(&|class| class == Class::Steady && !args.fast);
    let [steady, quick] = [steady, quick].map(Mutex::new);
    let (outcomes, is_over) = (Outcomes::default(), AtomicBool::new(false));
    let in_background = || outcomes.work_until(&quick, args, Priority::Background, &is_over);
    two_lanes(args, in_background, || {
        let worked = outcomes.work(&steady, args);
        is_over.store(true, Ordering::Relaxed);
        worked
    })?;
    phases.steady = phase();
    let mut rest = waiting;
    rest.append(&mut lock(&quick));
    let rest = Mutex::new(rest);
    two_lanes(args, || outcomes.work(&rest, args), || outcomes.work(&rest, args))?;
    phases.waiting = phase();
    Ok((outcomes.0.into_inner().unwrap_or_else(PoisonError::into_inner), phases))
}

/// Runs both at the same time; with one lane only the second.
fn two_lanes(
    args: &Args,
    beside: impl FnOnce() -> anyhow::Result<()> + Send,
    main: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let beside = (!args.one_lane).then(|| scope.spawn(beside));
        let done = main();
        let beside = beside.map(|it| it.join().expect("a lane does not panic"));
        done.and(beside.unwrap_or(Ok(())))
    })
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if args.scope.is_empty() {
        args.scope.push(WORKSPACE.to_owned());
    }
    match test(&args) {
        Ok((outcomes, phases)) => {
            print!("{}", summary::end(&outcomes, &phases));
            if outcomes.iter().all(|it| it.failed == 0) {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("farpool-testrun: {error:#}");
            ExitCode::from(2)
        }
    }
}
