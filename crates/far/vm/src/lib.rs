//! `farpool vm`: QEMU under `farpool run`, with a name by which it can be asked and limited.
//!
//! No page of a guest passes through here. `command_line` tells what cannot work before anything
//! starts, `registry` knows which VM has which name, `qmp` what QEMU says of its guest,
//! `suspension` what a VM was before it was suspended, and `migration` moves a guest to another
//! host.

#![allow(unreachable_pub, reason = "a few modules; the root says what leaves the crate")]

mod ask;
mod command_line;
mod migration;
mod qmp;
mod registry;
mod suspension;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use farpool_run::{
    Door, GUEST_VARIABLE, LocalLimit, RunError, RunOptions, RunStatistics, read_statistics,
};
use farpool_units::PAGE_BYTES_U64;
use farpool_wire::Address;

pub use ask::{ANSWER_TIME, AskError};
pub use command_line::{CommandLine, Refusal};
pub use migration::{DeskError, GiveError, LinkError, Migrated, Mobility, Progress, ReceiveError};
pub use qmp::QmpError;
pub use registry::{NAME_BYTES_MAX, VmName};
pub use suspension::Suspended;

/// Why a command about VMs failed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(
        "{options}: memory of files and shared memory stays local, and these {bytes} bytes are more \
         than --local {limit_bytes}: use memory-backend-ram, which can be far, or give more --local"
    )]
    StaysLocal { options: String, bytes: u128, limit_bytes: u64 },
    #[error(
        "{program:?} is not QEMU by its name, and other programs do not take QEMU's options: give \
         qemu-system-x86_64 or the like; farpool run runs any program"
    )]
    NotQemu { program: OsString },
    #[error(
        "there is a VM named {name} already (farpool process {keeper_pid}): give another --name, or \
         end that one"
    )]
    NameTaken { name: VmName, keeper_pid: u32 },
    #[error("there is no VM named {name}, nor any other; farpool vm run starts one")]
    NoVm { name: VmName },
    #[error("there is no VM named {name}; there are: {names}")]
    NoSuchVm { name: VmName, names: String },
    #[error("VM {name} is just starting or ending; try again")]
    NoRun { name: VmName },
    #[error("VM {name} is not suspended")]
    NotSuspended { name: VmName },
    #[error("VM {name} is suspended, with a limit of its own: farpool vm resume {name} first")]
    IsSuspended { name: VmName },
    #[error("VM {name} cannot be asked, and is as it was: {error}")]
    Ask { name: VmName, error: AskError },
    #[error(
        "VM {name} does not do what it is told: {error}; it may later on: farpool vm resume {name} \
         makes it as it was"
    )]
    Halfway { name: VmName, error: AskError },
    #[error(
        "VM {name} was not started with --migratable or --incoming: its guest stays where it is"
    )]
    Fixed { name: VmName },
    #[error(
        "a guest that can migrate needs the preloaded library: give --door preload, or leave --door \
         out"
    )]
    NeedsPreload,
    #[error(
        "a guest that can migrate needs blades that both hosts reach: give --blade; memory of the \
         run's own, or of a rack (--pool), cannot be handed over"
    )]
    NeedsBlade,
    #[error("VM {name} was not migrated, and is as it was: {error}")]
    NotGiven { name: VmName, error: GiveError },
    #[error("VM {name} runs on another host: it was handed over; its farpool vm run here can end")]
    RunsElsewhere { name: VmName },
    #[error(
        "VM {name} was handed over, and the QEMU that was to have it has ended, perhaps after its \
         guest ran there for a while. If you know that it did not: farpool vm resume {name} --force"
    )]
    Lost { name: VmName },
    #[error(
        "VM {name} was handed over, and whether the other host has taken it is not known: {error}. \
         Look there; if its guest does not run: farpool vm resume {name} --force"
    )]
    Unknown { name: VmName, error: DeskError },
    #[error("no guest has come: {0}")]
    NotReceived(#[from] ReceiveError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("{path}: {error}; set XDG_RUNTIME_DIR to a folder of your own that you may write to")]
    Registry { path: PathBuf, error: std::io::Error },
    #[error("{path} is too long for a socket: give a shorter --name, or set XDG_RUNTIME_DIR")]
    LongPath { path: PathBuf },
    #[error(transparent)]
    Run(#[from] RunError),
}

/// A VM, as its keeper and QEMU tell of it.
#[derive(Debug)]
pub struct Vm {
    pub name: VmName,
    /// The `farpool vm run` process.
    pub keeper_pid: u32,
    /// QEMU's process; unknown if it cannot be reached.
    pub pid: Option<u32>,
    /// QEMU's word for the guest's state, such as `running` or `paused`, or why there is none.
    pub state: Result<String, AskError>,
    /// It was suspended, and not resumed since.
    pub is_suspended: bool,
    /// What the run's board tells; nothing while the VM is just starting or ending.
    pub run: Option<RunStatistics>,
}

impl Vm {
    /// Local memory of QEMU as a whole.
    pub fn local_bytes(&self) -> Option<u64> {
        self.run.as_ref().map(RunStatistics::local_bytes)
    }

    /// Its far memory.
    pub fn far_bytes(&self) -> Option<u64> {
        self.run.as_ref().map(RunStatistics::far_bytes)
    }

    /// What the kernel (KSM) has merged of its local memory with equal pages, of whomever; nothing
    /// if the kernel does not tell.
    pub fn merged_bytes(&self) -> Option<u64> {
        let path = format!("/proc/{}/ksm_merging_pages", self.pid?);
        let pages: u64 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
        pages.checked_mul(PAGE_BYTES_U64)
    }

    /// Its present limit.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.run.as_ref().map(RunStatistics::limit_now_bytes)
    }
}

/// Runs QEMU with these options to its end, as the VM with this name. Returns its exit code.
/// `tell` is called with what the user should know.
pub fn run(
    name: &VmName,
    mut options: RunOptions,
    mobility: &Mobility,
    tell: impl Fn(&str) + Clone + Send + 'static,
) -> Result<i32, VmError> {
    if !is_qemu(&options.program) {
        return Err(VmError::NotQemu { program: options.program });
    }
    let words: Vec<_> = options.arguments.iter().map(|word| word.to_string_lossy()).collect();
    let line = CommandLine::read(words.iter().map(AsRef::as_ref));
    line.check(|path| is_hugetlbfs(Path::new(path)))?;
    check_local_memory(&line, options.local, &tell)?;
    for file in line.option_files() {
        tell(&format!("{file} is not checked for options that cannot work with far memory"));
    }
    for option in command_line::without_prealloc(&mut options.arguments) {
        tell(&format!(
            "{option}: prealloc is left out, because it brings all of the guest's memory in at once"
        ));
    }
    let claim = registry::Claim::make(&farpool_run::make_base()?, name)?;
    let socket = command_line::escaped(&claim.socket().to_string_lossy());
    options.arguments.extend(["-qmp".into(), format!("unix:{socket},server=on,wait=off").into()]);
    let receiver = match mobility {
        Mobility::Fixed => None,
        mobility => make_movable(&line, &mut options, mobility, &claim, tell)?,
    };
    let code = farpool_run::run(&options)?;
    match receiver.and_then(|receiver| receiver.failure()) {
        Some(failure) => Err(failure.into()),
        None => Ok(code),
    }
}

/// Gives QEMU memory that can move to another host, and has a guest that comes from one waited for.
fn make_movable(
    line: &CommandLine,
    options: &mut RunOptions,
    mobility: &Mobility,
    claim: &registry::Claim,
    tell: impl Fn(&str) + Send + 'static,
) -> Result<Option<migration::Receiver>, VmError> {
    let bytes = line.replaceable_memory()?;
    options.door = match options.door {
        Door::Auto | Door::Preload => Door::Preload,
        Door::Sidecar => return Err(VmError::NeedsPreload),
    };
    if options.blades.is_empty() || options.rack.is_some() {
        return Err(VmError::NeedsBlade);
    }
    let folder = claim.folder();
    let failed = |error| VmError::Registry { path: folder.to_owned(), error };
    let file = migration::prepare(folder, bytes).map_err(failed)?;
    let file = file.to_string_lossy();
    options.arguments.extend(command_line::movable_memory(bytes, &file).map(OsString::from));
    options.environment.push((GUEST_VARIABLE.to_owned(), format!("{bytes} {file}").into()));
    let Mobility::Incoming { at } = mobility else { return Ok(None) };
    options.arguments.extend(["-S", "-incoming", "defer"].map(OsString::from));
    let (remote, socket) = (options.allow_remote_tcp, claim.socket());
    Ok(Some(migration::Receiver::start(at, remote, (folder, &socket), bytes, tell)?))
}

/// Tells which memory of the guest stays local, and refuses it if no limit of this size can hold.
fn check_local_memory(
    line: &CommandLine,
    local: LocalLimit,
    tell: impl Fn(&str),
) -> Result<(), VmError> {
    let memory = line.local_memory();
    let bytes = memory.iter().filter_map(|it| it.bytes).map(u128::from).sum::<u128>();
    let options = memory.iter().map(|it| it.option.clone()).collect::<Vec<_>>().join(" ");
    if let LocalLimit::Bytes(limit_bytes) = local
        && bytes > limit_bytes.into()
    {
        return Err(VmError::StaysLocal { options, bytes, limit_bytes });
    }
    if !memory.is_empty() {
        tell(&format!("{options}: this memory stays local; memory-backend-ram can be far"));
    }
    Ok(())
}

/// The VMs of this user, by name, each asked for its state; those that do not answer delay it once.
pub fn list() -> Result<Vec<Vm>, VmError> {
    let entries = registry::living(&farpool_run::make_base()?)?;
    let vms = std::thread::scope(|scope| {
        let asked = |entry| scope.spawn(move || look(entry));
        let threads: Vec<_> = entries.into_iter().map(asked).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    // A thread that panicked has ended this process.
    Ok(vms.into_iter().flatten().collect())
}

/// One VM.
pub fn stat(name: &VmName) -> Result<Vm, VmError> {
    Ok(look(registry::find(&farpool_run::make_base()?, name)?))
}

/// Changes a VM's local memory. Returns its previous limit in bytes.
pub fn set_limit(name: &VmName, local: LocalLimit) -> Result<u64, VmError> {
    let entry = registry::find(&farpool_run::make_base()?, name)?;
    if suspension::is_suspended(&entry) {
        return Err(VmError::IsSuspended { name: entry.name });
    }
    let board = farpool_run::run_of_keeper(entry.keeper_pid);
    let board = board.ok_or(VmError::NoRun { name: entry.name })?;
    Ok(farpool_run::set_limit(&board, local)?)
}

/// Stops a VM's guest and moves its memory to the blades, as far as it can be far. `watch` is
/// called while it leaves.
pub fn suspend(name: &VmName, watch: impl FnMut(&Suspended)) -> Result<Suspended, VmError> {
    suspension::suspend(&registry::find(&farpool_run::make_base()?, name)?, watch)
}

/// Makes a suspended VM what it was before, also one whose migration was broken off. `is_sure`:
/// the caller knows that no other host runs it.
pub fn resume(name: &VmName, is_sure: bool) -> Result<(), VmError> {
    let entry = registry::find(&farpool_run::make_base()?, name)?;
    let turn = suspension::turn(&entry)?;
    if !suspension::is_suspended(&entry) {
        return Err(VmError::NotSuspended { name: entry.name });
    }
    if migration::is_movable(&entry) && !migration::keep(&entry, is_sure)? {
        return Err(VmError::RunsElsewhere { name: entry.name });
    }
    suspension::restore(&entry, &turn)
}

/// Moves a VM's guest to the host that waits for one at this address (`farpool vm run --incoming`);
/// the VM ends here. `watch` is called as it goes on.
pub fn migrate(
    name: &VmName,
    to: &Address,
    may_be_remote: bool,
    watch: impl FnMut(Progress),
) -> Result<Migrated, VmError> {
    let entry = registry::find(&farpool_run::make_base()?, name)?;
    migration::migrate(&entry, to, may_be_remote, watch)
}

fn look(entry: registry::Entry) -> Vm {
    let asked = ask::Asked::connect(&entry.socket);
    let pid = asked.as_ref().ok().and_then(ask::Asked::pid);
    let state = asked.and_then(|asked| Ok(qmp::state(&asked.command("query-status")?)?));
    let board = farpool_run::run_of_keeper(entry.keeper_pid);
    let run = board.and_then(|board| read_statistics(&board).ok());
    let is_suspended = suspension::is_suspended(&entry);
    Vm { name: entry.name, keeper_pid: entry.keeper_pid, pid, state, is_suspended, run }
}

/// QEMU's programs are called `qemu-system-x86_64`, `qemu-kvm`, `kvm` and the like.
fn is_qemu(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
    name.contains("qemu") || name == "kvm"
}

fn is_hugetlbfs(path: &Path) -> bool {
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    // A file that QEMU is to make is where its folder is.
    let there = path.ancestors().find(|ancestor| ancestor.exists());
    let status = there.and_then(|path| rustix::fs::statfs(path).ok());
    status.is_some_and(|status| u64::try_from(status.f_type) == Ok(HUGETLBFS_MAGIC))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_known_by_its_name() {
        for program in ["qemu-system-x86_64", "/usr/libexec/qemu-kvm", "/usr/bin/kvm", "my-qemu"] {
            assert!(is_qemu(OsStr::new(program)), "{program}");
        }
        for program in ["redis-server", "/opt/qemu/firecracker", "kvmtool", ""] {
            assert!(!is_qemu(OsStr::new(program)), "{program}");
        }
    }
}
