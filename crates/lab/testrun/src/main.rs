//! `farpool-testrun`: every test program of the workspace, those that wait two at a time.
//!
//! Programs that hold others to a limit, or measure, run first, each alone. The rest, which mostly
//! waits for daemons, runs after them in two lanes. The last line says how many tests passed,
//! failed and were skipped; the exit code is 1 when one failed.

mod classes;
mod outcome;
mod programs;
mod run;
mod summary;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};

use clap::Parser;

use classes::{Class, in_order};
use outcome::Outcome;
use programs::TestProgram;

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

/// What a lane does next.
enum Job {
    Program(TestProgram),
    /// `cargo test --doc` of the whole scope.
    Documentation,
}

#[derive(Default)]
struct Outcomes(Mutex<Vec<Outcome>>);

impl Outcomes {
    /// Does what a queue holds, until it is empty.
    fn work(&self, queue: &Mutex<VecDeque<Job>>, args: &Args) -> anyhow::Result<()> {
        // The queue is not held locked while a job runs.
        let next = || lock(queue).pop_front();
        while let Some(job) = next() {
            let outcome = match job {
                Job::Program(program) => run_program(&program, &args.logs)?,
                Job::Documentation => run_documentation(&args.scope, &args.logs)?,
            };
            println!("{}", summary::line(&outcome));
            lock(&self.0).push(outcome);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run_program(program: &TestProgram, logs: &Path) -> anyhow::Result<Outcome> {
    let mut command = Command::new(&program.path);
    command.arg("--show-output").current_dir(&program.folder);
    // As cargo sets them for the tests that it starts.
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

fn run_documentation(scope: &[String], logs: &Path) -> anyhow::Result<Outcome> {
    let mut command = programs::cargo();
    command.args(["test", "--doc", "--quiet"]).args(scope);
    run::run("documentation".to_owned(), command, &logs.join("documentation.log"))
}

fn test(args: &Args) -> anyhow::Result<Vec<Outcome>> {
    std::fs::create_dir_all(&args.logs)?;
    let programs = programs::build(&args.scope)?;
    anyhow::ensure!(!programs.is_empty(), "no test program is of {:?}", args.scope);
    if args.scope.iter().any(|it| it == WORKSPACE) {
        let unknown = classes::unknown(&programs);
        anyhow::ensure!(unknown.is_empty(), "classes.rs has programs that are not: {unknown:?}");
    }
    let jobs = |class: &dyn Fn(Class) -> bool| -> VecDeque<Job> {
        in_order(programs.clone(), class).into_iter().map(Job::Program).collect()
    };
    let mut beside =
        jobs(&|class| class == Class::Quick || (class == Class::Waiting && !args.fast));
    if !args.fast && args.scope.iter().any(|it| it == WORKSPACE) {
        beside.push_back(Job::Documentation);
    }
    let steady = jobs(&|class| class == Class::Steady && !args.fast);
    let [steady, beside] = [steady, beside].map(Mutex::new);
    let outcomes = Outcomes::default();
    outcomes.work(&steady, args)?;
    std::thread::scope(|scope| {
        let second = (!args.one_lane).then(|| scope.spawn(|| outcomes.work(&beside, args)));
        let first = outcomes.work(&beside, args);
        let second = second.map(|it| it.join().expect("a lane does not panic"));
        first.and(second.unwrap_or(Ok(())))
    })?;
    Ok(outcomes.0.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if args.scope.is_empty() {
        args.scope.push(WORKSPACE.to_owned());
    }
    match test(&args) {
        Ok(outcomes) => {
            print!("{}", summary::end(&outcomes));
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
