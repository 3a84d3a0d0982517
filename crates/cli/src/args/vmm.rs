//! The command line of `farpool vmm`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::values::{BladeAddress, Seal, Span};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool vmm firecracker --image web.mem --listen /run/vm/web.sock --blade unix:///run/blade.sock\n  \
farpool vmm cloud-hypervisor --snapshot /run/vm/out.sock --restore /run/vm/in.sock \\\n      \
--blade unix:///run/blade.sock\n\n\
Memory only comes to these guests, page by page; none of it leaves them again. To keep a part of a \
guest's memory on blades while it runs: farpool vm run (QEMU), or farpool run -- cloud-hypervisor. \
docs/users/vm.md says more.")]
pub struct VmmArgs {
    #[command(subcommand)]
    pub action: VmmAction,
}

#[derive(Debug, Subcommand)]
pub enum VmmAction {
    /// Serve the page faults of guests that Firecracker restores from a snapshot
    Firecracker(VmmFirecrackerArgs),
    /// Take snapshots that Cloud Hypervisor hands off, and restore guests from them
    CloudHypervisor(VmmCloudHypervisorArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool vmm firecracker --image web.mem --listen /run/vm/web.sock --blade unix:///run/blade.sock\n\n\
Firecracker's PUT /snapshot/load names the socket: \"mem_backend\": {\"backend_type\": \"Uffd\", \
\"backend_path\": \"/run/vm/web.sock\"}. Any number of guests can be restored at once. A guest that \
lacks a page when this process ends, or when its blade is lost, is killed: it must not read zeros.")]
pub struct VmmFirecrackerArgs {
    /// Memory file of the snapshot (mem_file_path); it is not read any more once this is ready
    #[arg(long, value_name = "FILE")]
    pub image: PathBuf,
    /// Socket to listen on; only this user and root can connect
    #[arg(long, value_name = "SOCKET")]
    pub listen: PathBuf,
    /// Give a guest all of its memory, also what it does not touch; it needs this process no more
    /// after that
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub pool: VmmPoolArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool vmm cloud-hypervisor --snapshot /run/vm/out.sock --restore /run/vm/in.sock \\\n      \
--blade unix:///run/blade.sock\n  \
ch-remote send-migration destination_url=unix:/run/vm/out.sock,local=on\n  \
ch-remote receive-migration receiver_url=unix:/run/vm/in.sock,memory_mode=postcopy\n\n\
A snapshot lives as long as this process; the next one replaces it for later restores. Guests need \
this process as long as they live, and are killed when it ends or their blade is lost.")]
pub struct VmmCloudHypervisorArgs {
    /// Socket to listen on for snapshots; only this user and root can connect
    #[arg(long, value_name = "SOCKET")]
    pub snapshot: PathBuf,
    /// Socket at which a Cloud Hypervisor will wait for its guest. Whenever one does, it gets the
    /// newest snapshot
    #[arg(long, value_name = "SOCKET")]
    pub restore: PathBuf,
    /// Let a guest run at once that was paused when it was handed off
    #[arg(long)]
    pub resume: bool,
    /// Write all pages into a guest's memory, also those that it does not touch
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub pool: VmmPoolArgs,
}

/// The blades that hold the guests' memory.
#[derive(Debug, Args)]
pub struct VmmPoolArgs {
    /// Keep the memory on this blade: shm:///path.sock, unix:///path.sock or tcp://ip:port; may be
    /// repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',', required = true)]
    pub blade: Vec<BladeAddress>,
    /// A blade that does not answer for this long is lost, and guests that need it are killed
    #[arg(long, value_name = "SPAN", default_value = "10s")]
    pub deadline: Span,
    /// When to seal pages, so that a blade can neither read them nor return anything else. remote:
    /// if a blade is reached by TCP; always: also on this host
    #[arg(long, value_enum, default_value = "remote")]
    pub seal: Seal,
    /// Folder with a certificate (farpool pki issue) for blades over TCP, which are then used with
    /// TLS only
    #[arg(long, value_name = "DIR")]
    pub pki: Option<PathBuf>,
    /// Without --pki: allow blades over TCP beyond this host; all but what is sealed is sent
    /// unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
}
