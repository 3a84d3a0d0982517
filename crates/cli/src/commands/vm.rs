//! `farpool vm`: runs QEMU with a name, and shows and limits what runs.

use farpool_run::RunStatistics;
use farpool_units::plain;
use farpool_vm::{Vm, VmError};
use serde_json::{Value, json};

use super::run;
use crate::args::{RunArgs, RunSettings, VmAction, VmLimitArgs, VmListArgs, VmRunArgs, VmStatArgs};
use crate::config::UsageError;
use crate::terminal::{self, table};
use crate::values::Size;

/// Carries out a command; `weaker` are the settings of the configuration files.
pub fn main(
    action: VmAction,
    weaker: impl FnOnce() -> Result<RunSettings, UsageError>,
) -> anyhow::Result<u8> {
    match action {
        VmAction::Run(mut args) => {
            args.settings.fill_from(weaker()?);
            start(*args)
        }
        VmAction::List(args) => list(&args),
        VmAction::Stat(args) => stat(&args),
        VmAction::Limit(args) => limit(&args),
    }
}

/// Runs a VM to its end. Returns QEMU's exit code, or 128 + n if signal n ended it.
fn start(args: VmRunArgs) -> anyhow::Result<u8> {
    let VmRunArgs { name, settings, program } = args;
    let options = run::checked_options(RunArgs { settings, program })?;
    let is_quiet = options.quiet;
    let tell = |news: &str| {
        if !is_quiet {
            eprintln!("farpool: {}", plain(news));
        }
    };
    let code = farpool_vm::run(&name, options, tell).map_err(|error| match error {
        VmError::Run(error) => run::usage_or_failure(error),
        error @ (VmError::Refused(_) | VmError::NotQemu { .. } | VmError::StaysLocal { .. }) => {
            UsageError(error.to_string()).into()
        }
        error => anyhow::Error::from(error),
    })?;
    Ok(u8::try_from(code).unwrap_or(crate::EXIT_FAILED))
}

const HEADER: [&str; 7] =
    ["name", "pid", "state", "local MiB", "merged MiB", "far MiB", "limit MiB"];

fn list(args: &VmListArgs) -> anyhow::Result<u8> {
    let vms = farpool_vm::list()?;
    if args.json {
        let all: Vec<Value> = vms.iter().map(to_json).collect();
        terminal::print(&format!("{:#}\n", Value::Array(all)))?;
        return Ok(0);
    }
    let rows: Vec<_> = vms.iter().map(row).collect();
    let text =
        if rows.is_empty() { "no virtual machine runs\n".into() } else { table(&HEADER, &rows) };
    terminal::print(&(text + &silent_lines(&vms)))?;
    Ok(0)
}

fn stat(args: &VmStatArgs) -> anyhow::Result<u8> {
    let vm = farpool_vm::stat(&args.name)?;
    if args.json {
        let mut all = to_json(&vm);
        all["run"] = vm.run.as_ref().map_or(Value::Null, RunStatistics::to_json);
        terminal::print(&format!("{all:#}\n"))?;
        return Ok(0);
    }
    let text = table(&HEADER, &[row(&vm)]);
    let vms = [vm];
    terminal::print(&(text + &silent_lines(&vms) + &unmovable_line(&vms[0])))?;
    Ok(0)
}

fn limit(args: &VmLimitArgs) -> anyhow::Result<u8> {
    let before = farpool_vm::set_limit(&args.name, args.local.into())?;
    println!("local memory of {} was {}, is {}", args.name, Size(before), args.local);
    Ok(0)
}

fn row(vm: &Vm) -> Vec<String> {
    let mib = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |it| (it >> 20).to_string());
    vec![
        vm.name.to_string(),
        vm.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
        vm.state.as_ref().map_or_else(|_| "unknown".into(), Clone::clone),
        mib(vm.local_bytes()),
        mib(vm.merged_bytes()),
        mib(vm.far_bytes()),
        mib(vm.limit_bytes()),
    ]
}

/// Says of VMs without a known state why it is not known.
fn silent_lines(vms: &[Vm]) -> String {
    let line = |vm: &Vm| {
        let error = vm.state.as_ref().err()?;
        Some(format!("the state of {} is not known: {}\n", vm.name, plain(&error.to_string())))
    };
    vms.iter().filter_map(line).collect()
}

/// Says what of a VM's memory cannot be far.
fn unmovable_line(vm: &Vm) -> String {
    let text = vm.run.as_ref().map(|run| run.unmovable.text()).unwrap_or_default();
    if text.is_empty() { text } else { format!("bytes that stay local: {text}\n") }
}

fn to_json(vm: &Vm) -> Value {
    json!({
        "name": vm.name.to_string(),
        "pid": vm.pid,
        "keeper_pid": vm.keeper_pid,
        "state": vm.state.as_ref().ok(),
        "state_error": vm.state.as_ref().err().map(ToString::to_string),
        "local_bytes": vm.local_bytes(),
        "merged_bytes": vm.merged_bytes(),
        "far_bytes": vm.far_bytes(),
        "limit_bytes": vm.limit_bytes(),
    })
}
