//! The command line of `farpool vm`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use farpool_vm::VmName;

use super::RunSettings;
use crate::values::LocalLimit;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool vm run --name web1 --local 1GiB -- qemu-system-x86_64 -m 4G -drive file=web1.img\n  \
farpool vm list\n  \
farpool vm limit web1 512MiB\n  \
farpool vm suspend web1\n  \
farpool vm resume web1\n\n\
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
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool vm run --name web1 --local 1GiB -- qemu-system-x86_64 -m 4G -drive file=web1.img\n  \
farpool vm run --name web1 --local 25% --pool https://10.0.0.1:7080 -- qemu-system-x86_64 -m 4G\n\n\
Any command line of QEMU's; one further QMP socket is added to it. What cannot work with far memory \
is refused before QEMU starts, such as VFIO and vhost-user. --local is for QEMU as a whole, which \
needs some 30 MiB besides its guest. The settings of the table [run] apply.")]
pub struct VmRunArgs {
    /// Name for the other commands of farpool vm: letters, digits, '.', '_' and '-'
    #[arg(long)]
    pub name: VmName,
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
}
