//! `farpool vm`: runs QEMU with a name, and shows, limits, suspends and moves what runs.

use std::time::Duration;

use farpool_run::RunStatistics;
use farpool_units::{exactly, plain};
use farpool_vm::{LinkError, Mobility, Progress, Vm, VmError};
use serde_json::{Value, json};

use super::run;
use crate::args::{
    RunArgs, RunSettings, VmAction, VmLimitArgs, VmListArgs, VmMigrateArgs, VmResumeArgs,
    VmRunArgs, VmStatArgs, VmSuspendArgs,
};
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
        VmAction::Suspend(args) => suspend(&args),
        VmAction::Resume(args) => resume(&args),
        VmAction::Migrate(args) => migrate(&args),
    }
}

/// Runs a VM to its end. Returns QEMU's exit code, or 128 + n if signal n ended it.
fn start(args: VmRunArgs) -> anyhow::Result<u8> {
    let VmRunArgs { name, migratable, incoming, settings, program } = args;
    let mobility = match (incoming, migratable) {
        (Some(at), _) => Mobility::Incoming { at },
        (None, true) => Mobility::Movable,
        (None, false) => Mobility::Fixed,
    };
    let options = run::checked_options(RunArgs { settings, program })?;
    let is_quiet = options.quiet;
    let tell = move |news: &str| {
        if !is_quiet {
            eprintln!("farpool: {}", plain(news));
        }
    };
    let code = farpool_vm::run(&name, options, &mobility, tell).map_err(|error| match error {
        VmError::Run(error) => run::usage_or_failure(error),
        error @ (VmError::Refused(_)
        | VmError::NotQemu { .. }
        | VmError::StaysLocal { .. }
        | VmError::NeedsPreload
        | VmError::NeedsBlade
        | VmError::Link(LinkError::RemoteTcp(_) | LinkError::NotForGuests(_))) => {
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

fn suspend(args: &VmSuspendArgs) -> anyhow::Result<u8> {
    let counter = terminal::counter("MiB local");
    let it = farpool_vm::suspend(&args.name, |now| counter.set_position(now.local_bytes >> 20))?;
    counter.finish_and_clear();
    if args.json {
        let told = json!({
            "name": args.name.to_string(),
            "local_bytes": it.local_bytes,
            "far_bytes": it.far_bytes,
            "limit_bytes": it.limit_bytes,
            "is_complete": it.is_complete(),
        });
        terminal::print(&format!("{told:#}\n"))?;
        return Ok(0);
    }
    let mib = |bytes: u64| bytes >> 20;
    let (local, far) = (mib(it.local_bytes), mib(it.far_bytes));
    println!("{} is suspended: {local} MiB local, {far} MiB far", args.name);
    if !it.is_complete() {
        eprintln!(
            "farpool: no more of it leaves, though {} MiB would do; are the blades full? farpool \
             blades shows them",
            mib(it.limit_bytes)
        );
    }
    Ok(0)
}

fn resume(args: &VmResumeArgs) -> anyhow::Result<u8> {
    farpool_vm::resume(&args.name, args.force)?;
    println!("{} is resumed", args.name);
    Ok(0)
}

fn migrate(args: &VmMigrateArgs) -> anyhow::Result<u8> {
    let counter = terminal::counter("MiB local");
    let it = farpool_vm::migrate(&args.name, &args.to, args.allow_remote_tcp, |now| match now {
        Progress::Leaving { local_bytes } => counter.set_position(local_bytes >> 20),
        Progress::Stopped => counter.finish_and_clear(),
    })?;
    let milliseconds = |time: Duration| exactly::<u64, _>(time.as_millis());
    if args.json {
        let told = json!({
            "name": args.name.to_string(),
            "to": args.to.to_string(),
            "downtime_ms": milliseconds(it.downtime),
            "memory_ms": milliseconds(it.given_in),
            "total_ms": milliseconds(it.total),
            "local_bytes": it.local_bytes,
            "sent_bytes": it.sent_bytes,
        });
        terminal::print(&format!("{told:#}\n"))?;
        return Ok(0);
    }
    println!(
        "{} runs at {}: it stood still for {} ms, and {} KiB were sent",
        args.name,
        args.to,
        milliseconds(it.downtime),
        it.sent_bytes >> 10
    );
    Ok(0)
}

fn row(vm: &Vm) -> Vec<String> {
    let mib = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |it| (it >> 20).to_string());
    vec![
        vm.name.to_string(),
        vm.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
        match &vm.state {
            Ok(state) if state == "paused" && vm.is_suspended => "suspended".into(),
            Ok(state) => state.clone(),
            Err(_) => "unknown".into(),
        },
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
        "is_suspended": vm.is_suspended,
        "local_bytes": vm.local_bytes(),
        "merged_bytes": vm.merged_bytes(),
        "far_bytes": vm.far_bytes(),
        "limit_bytes": vm.limit_bytes(),
    })
}
