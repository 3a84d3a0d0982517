//! The command line of `farpool vm`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use farpool_vm::VmName;
use farpool_wire::Address;

use super::RunSettings;
use crate::values::LocalLimit;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool vm run --name web1 --local 1GiB -- qemu-system-x86_64 -m 4G -drive file=web1.img\n  \
farpool vm list\n  \
farpool vm limit web1 512MiB\n  \
farpool vm suspend web1\n  \
farpool vm resume web1\n  \
farpool vm migrate web1 --to tcp://10.0.0.2:7400\n\n\
docs/users/vm.md says what works with far memory and what does not.")]
pub struct VmArgs {
    #[command(subcommand)]
    pub action: VmAction,
}

#[derive(Debug, Subcommand)]
pub enum VmAction {
    /// Run a virtual machine under QEMU with limited local memory; the rest of it is on blades
    Run(Box<VmRunArgs>),
    /// List the virtual machines
    List(VmListArgs),
    /// Show what a virtual machine does and where its memory is
    Stat(VmStatArgs),
    /// Change the local memory of a virtual machine
    Limit(VmLimitArgs),
    /// Stop a guest and move its memory to the blades; QEMU stays, with some 45 MiB
    Suspend(VmSuspendArgs),
    /// Let a suspended guest go on, with the local memory that it had
    Resume(VmResumeArgs),
    /// Move a guest to another host: its memory stays on the blades and changes its owner
    Migrate(VmMigrateArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool vm run --name web1 --local 1GiB -- qemu-system-x86_64 -m 4G -drive file=web1.img\n  \
farpool vm run --name web1 --local 25% --pool https://10.0.0.1:7080 -- qemu-system-x86_64 -m 4G\n  \
farpool vm run --name web1 --local 1GiB --blade tcp://10.0.0.9:7070 --migratable -- \
qemu-system-x86_64 -m 4G\n\n\
Any command line of QEMU's; one further QMP socket is added to it. What cannot work with far memory \
is refused before QEMU starts, such as VFIO and vhost-user. --local is for QEMU as a whole, which \
needs some 30 MiB besides its guest. The settings of the table [run] apply.")]
pub struct VmRunArgs {
    /// Name for the other commands of farpool vm: letters, digits, '.', '_' and '-'
    #[arg(long)]
    pub name: VmName,
    /// Let the guest be moved to another host (farpool vm migrate)
    #[arg(long)]
    pub migratable: bool,
    /// Wait here for a guest that is moved to this host: unix:///PATH or tcp://ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub incoming: Option<Address>,
    #[command(flatten)]
    pub settings: RunSettings,
    /// QEMU and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "QEMU")]
    pub program: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct VmListArgs {
    /// Print JSON: a list of the virtual machines
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct VmStatArgs {
    /// Name of the virtual machine
    pub name: VmName,
    /// Print JSON: one object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  farpool vm limit web1 512MiB")]
pub struct VmLimitArgs {
    /// Name of the virtual machine
    pub name: VmName,
    /// New local memory: a size, or a share of the memory it has in use (25%)
    #[arg(value_name = "SIZE|PCT")]
    pub local: LocalLimit,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  farpool vm suspend web1")]
pub struct VmSuspendArgs {
    /// Name of the virtual machine
    pub name: VmName,
    /// Print JSON: one object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  farpool vm resume web1")]
pub struct VmResumeArgs {
    /// Name of the virtual machine
    pub name: VmName,
    /// Have back a guest whose migration was broken off, though nobody can tell whether it runs on
    /// the other host: you know that it does not
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool vm run --name web1 --incoming tcp://10.0.0.2:7400 --allow-remote-tcp ...  (on that host)\n  \
farpool vm migrate web1 --to tcp://10.0.0.2:7400 --allow-remote-tcp\n\n\
Both VMs use the same blades, and QEMUs of equal machines. The guest runs on one of the two hosts, \
whichever dies meanwhile.")]
pub struct VmMigrateArgs {
    /// Name of the virtual machine
    pub name: VmName,
    /// Where the other host waits for it: unix:///PATH or tcp://ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub to: Address,
    /// Permit TCP to another host, unencrypted, keys of sealed pages among it: the network is
    /// trusted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Print JSON: one object
    #[arg(long)]
    pub json: bool,
}
