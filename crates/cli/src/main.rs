//! `farpool`: the one binary. Parses the command line; the crates below do the work.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage (flags, variables, configuration); of commands that
//! ask a controller also 3 not found, 4 conflict, 5 unreachable. `farpool run` exits with the
//! program's exit code, or 128 + n if signal n ended it.

#![allow(unreachable_pub, reason = "a program: nothing leaves the crate")]

mod args;
mod commands;
mod config;
mod logging;
mod notify;
mod privileges;
mod probe;
mod terminal;
mod values;
mod version;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command, ControlAction, ControlArgs, VmAction};
use config::{Config, UsageError};
use farpool_api::{ApiError, ProblemKind};

/// Wrong flags, variables or configuration; clap uses the same code.
const EXIT_USAGE: u8 = 2;
/// Anything else that went wrong.
const EXIT_FAILED: u8 = 1;
/// The controller does not know what was named.
const EXIT_NOT_FOUND: u8 = 3;
/// The request conflicts with the controller's state.
const EXIT_CONFLICT: u8 = 4;
/// No controller answers, or none of them is the lead.
const EXIT_UNREACHABLE: u8 = 5;

fn main() -> ExitCode {
    end_at_a_panic();
    let cli = Cli::parse();
    // Before a second thread starts.
    if let Err(error) = farpool_run::confine_rights(makes_handshakes(&cli.command)) {
        eprintln!("farpool: cannot give up the capabilities of its file: {error}");
        return ExitCode::from(EXIT_FAILED);
    }
    match dispatch(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(report(&error)),
    }
}

/// Makes a panic of any thread end the process, after the usual message: what the thread was to do
/// stays undone, and its peers would rely on it. Release builds abort by their profile, too.
fn end_at_a_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// True if a command puts sidecars into programs, or tests whether it could.
fn makes_handshakes(command: &Command) -> bool {
    match command {
        Command::Run(_) | Command::Attach(_) | Command::Doctor(_) | Command::Trace(_) => true,
        Command::Vm(args) => matches!(args.action, VmAction::Run(_)),
        _ => false,
    }
}

/// Runs the subcommand. Returns the exit code.
fn dispatch(cli: Cli) -> anyhow::Result<u8> {
    let files = || Config::from_files(&config::files(cli.config.as_deref()));
    match cli.command {
        Command::Run(mut args) => {
            args.settings.fill_from(files()?.run);
            commands::run::main(args)
        }
        Command::Blade(mut args) => {
            args.settings.fill_from(files()?.blade);
            commands::blade::main(&args)
        }
        Command::Kv(args) => commands::kv::main(&args),
        Command::Control(ControlArgs { action: Some(mut action), mut settings, .. }) => {
            if let ControlAction::Restore { store, .. } = &mut action {
                settings.fill_from(files()?.control);
                *store = store.take().or(settings.store);
            }
            commands::rack::control(&action)
        }
        Command::Control(mut args) => {
            args.settings.fill_from(files()?.control);
            commands::control::main(args)
        }
        Command::Node(mut args) => match &args.action {
            Some(action) => commands::rack::node(action),
            None => {
                args.settings.fill_from(files()?.node);
                commands::node::main(*args)
            }
        },
        Command::Segment(args) => commands::rack::segment(args.action),
        Command::Tenant(args) => commands::rack::tenant(&args.action),
        Command::Circuit(args) => commands::rack::circuit(&args.action),
        Command::Rack(args) => commands::rack::rack(&args.action),
        Command::Pki(args) => commands::pki::main(&args.action),
        Command::Audit(args) => commands::audit::main(&args.action),
        Command::Events(args) => commands::rack::events(&args),
        Command::Task(args) => commands::rack::task(&args.action),
        Command::Stat(mut args) => {
            args.settings.fill_from(files()?.stat);
            commands::stat::main(&args)
        }
        Command::Vm(args) => commands::vm::main(args.action, || Ok(files()?.run)),
        Command::Vmm(args) => commands::vmm::main(&args.action),
        Command::Attach(args) => commands::attach::main(args),
        Command::Detach(args) => commands::attach::detach(&args),
        Command::Core(args) => commands::core::main(&args),
        Command::Limit(args) => commands::limit::main(&args),
        Command::Blades(args) => commands::blades::main(&args),
        Command::Doctor(args) => commands::doctor::main(&args),
        Command::Demo(args) => commands::demo::main(&args),
        Command::Bench(args) => commands::bench::bench(&args),
        Command::Workload(args) => commands::bench::workload(&args),
        Command::Sim(args) => commands::sim::main(args),
        Command::Trace(args) => commands::trace::main(*args),
        Command::Plan(args) => commands::plan::main(&args.action),
        Command::Completions(args) => commands::generate::completions(&args),
        Command::Man(args) => commands::generate::man(&args),
        Command::Config(args) => commands::config::main(&args, cli.config.as_deref()),
    }
}

/// Prints the error with its causes, each once. Returns the exit code.
fn report(error: &anyhow::Error) -> u8 {
    // It may repeat what a controller answered.
    eprintln!("farpool: {}", farpool_units::plain_lines(&told_once(error)));
    if error.downcast_ref::<UsageError>().is_some() {
        return EXIT_USAGE;
    }
    error.downcast_ref::<ApiError>().map_or(EXIT_FAILED, exit_of)
}

/// Returns the error and its causes, without causes whose text an error above already contains.
fn told_once(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut told, cause| {
        let words = cause.to_string();
        if !told.contains(&words) {
            told += if told.is_empty() { "" } else { ": " };
            told += &words;
        }
        told
    })
}

/// Returns the exit code by which scripts tell refusals apart.
fn exit_of(error: &ApiError) -> u8 {
    match error {
        ApiError::Unreachable { .. } => EXIT_UNREACHABLE,
        ApiError::BadUrl(_)
        | ApiError::NoCertificate(_)
        | ApiError::Clear(_)
        | ApiError::Credentials(_) => EXIT_USAGE,
        ApiError::BadAnswer { .. } => EXIT_FAILED,
        // Nothing of the caller's contradicts it: there is no room yet.
        ApiError::Problem(problem) if problem.is(ProblemKind::NoRoom) => EXIT_FAILED,
        ApiError::Problem(problem) => match problem.status {
            404 => EXIT_NOT_FOUND,
            409 | 412 => EXIT_CONFLICT,
            503 => EXIT_UNREACHABLE,
            _ => EXIT_FAILED,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use farpool_api::Problem;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        for outer in ["it cannot be started: the disk is full", "it cannot be started"] {
            let error = anyhow::anyhow!("the disk is full").context(outer);
            assert_eq!(told_once(&error), "it cannot be started: the disk is full");
        }
    }

    #[test]
    fn a_rack_without_room_is_no_conflict() {
        let exit = |kind| exit_of(&ApiError::Problem(Box::new(Problem::new(kind, ""))));
        assert_eq!(exit(ProblemKind::NoRoom), EXIT_FAILED);
        assert_eq!(exit(ProblemKind::Conflict), EXIT_CONFLICT);
        assert_eq!(exit(ProblemKind::NotLeader), EXIT_UNREACHABLE);
    }

    /// Set in the process that is to end.
    const CHILD_VARIABLE: &str = "FARPOOL_TEST_PANIC_CHILD";
    const SIGABRT: i32 = 6;

    #[test]
    fn a_panic_of_any_thread_ends_the_process() {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            end_at_a_panic();
            let _ = std::thread::spawn(|| panic!("as asked")).join();
            return;
        }
        let program = std::env::current_exe().expect("this program");
        let mut child = std::process::Command::new(program);
        child.args(["--exact", "tests::a_panic_of_any_thread_ends_the_process", "--nocapture"]);
        let ended = child.env(CHILD_VARIABLE, "1").output().expect("it starts");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(SIGABRT), "{said}");
        assert!(said.contains("as asked"), "{said}");
    }
}
