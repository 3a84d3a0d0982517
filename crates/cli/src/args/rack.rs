//! The rack's part of the command line: the controller, the node daemon, and the commands that ask
//! the controller.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_acms::{Arbitration, BORROWER_PERCENT, Band};
use farpool_api::{Policy, SegmentId, TaskId};
use serde::{Deserialize, Serialize};

use crate::values::{
    BladeAddress, BusyRate, ControlRate, Patience, Redundancy, Size, Span, StoreAt, SwitchAt,
    policy,
};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:\n  \
farpool control --topology rack.toml --store etcd://127.0.0.1:2379\n  \
farpool control --listen 192.0.2.1:7080 --pki /etc/farpool/pki\n\n\
With --pki it speaks TLS only, and the certificate of whoever asks tells what it may ask: a viewer \
reads, an operator changes, a node and a program speak only for themselves (farpool pki --help).")]
pub struct ControlArgs {
    #[command(subcommand)]
    pub action: Option<ControlAction>,
    #[command(flatten)]
    pub settings: ControlSettings,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum ControlAction {
    /// Write everything that the running controller stores to a file; it holds the keys of grants
    Backup {
        /// File to write; it is replaced as a whole
        file: PathBuf,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Fill a store from a backup, while no controller uses the store
    Restore {
        /// File with the backup
        file: PathBuf,
        /// The store: redb:PATH, or etcd://HOST:PORT, several separated by commas [default: a redb
        /// file in /var/lib/farpool, or below the user's state folder]
        #[arg(long, value_name = "STORE", env = "FARPOOL_CONTROL_STORE", hide_env_values = true)]
        store: Option<StoreAt>,
        /// Replace what the store holds; a redb file is kept as NAME.before-restore
        #[arg(long)]
        replace: bool,
    },
}

/// The flags of `control` and the table `[control]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ControlSettings {
    /// Topology file of the rack [default: a rack made of the nodes that register]
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOPOLOGY", hide_env_values = true)]
    pub topology: Option<PathBuf>,
    /// Address to listen on; may be repeated [default: 127.0.0.1:7080]
    #[arg(long, value_name = "IP:PORT", env = "FARPOOL_CONTROL_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<SocketAddr>,
    /// URL at which others reach this controller [default: its first address]
    #[arg(long, value_name = "URL", env = "FARPOOL_CONTROL_ADVERTISE", hide_env_values = true)]
    pub advertise: Option<String>,
    /// Where the controller keeps its state: redb:PATH, or etcd://HOST:PORT, several separated by
    /// commas [default: a redb file in /var/lib/farpool, or below the user's state folder]
    #[arg(long, value_name = "STORE", env = "FARPOOL_CONTROL_STORE", hide_env_values = true)]
    pub store: Option<StoreAt>,
    /// Serve over TLS only, with the certificate in this folder (farpool pki issue): tls.crt,
    /// tls.key, ca.crt and revoked.crl, read anew when they change
    #[arg(long, value_name = "DIR", env = "FARPOOL_CONTROL_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// Without --pki: file with the token that every request must present [default: no token]
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Listen beyond loopback without --pki: requests are sent unencrypted, and a token is required
    #[arg(long, alias = "allow-remote", value_name = "BOOL")]
    #[arg(env = "FARPOOL_CONTROL_INSECURE", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(alias = "allow-remote")]
    pub insecure: Option<bool>,
    /// File to which every change that is asked for, and refusals, are recorded, each line with the
    /// hash of the one before (farpool audit verify) [default: none]
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_AUDIT", hide_env_values = true)]
    pub audit: Option<PathBuf>,
    /// Drive circuit switch NAME of the topology through its control socket; may be repeated
    #[arg(
        long,
        value_name = "NAME=SOCKET",
        env = "FARPOOL_CONTROL_SWITCH",
        hide_env_values = true
    )]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub switch: Vec<SwitchAt>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:\n  \
farpool node --control http://127.0.0.1:7080 --donate 8GiB\n  \
farpool node --control https://192.0.2.1:7080 --pki /etc/farpool/pki --donate 8GiB\n  \
farpool node --collaborate --min 40%:50% --max 80%:90% --join 10.0.0.7:7070 --listen \
tcp://10.0.0.8:7070 --allow-remote-tcp --rack-key-file /etc/farpool/rack.key\n  \
farpool node list\n\n\
Memory that the server's own programs use is not lent; it is reclaimed when they need it.\n\
The first SIGTERM or SIGINT drains the node, the second stops it at once; with --persist the first \
one stops it, and what it lends is kept.")]
pub struct NodeArgs {
    #[command(subcommand)]
    pub action: Option<NodeAction>,
    #[command(flatten)]
    pub settings: NodeSettings,
    #[command(flatten)]
    pub collaborate: CollaborateArgs,
    /// With --persist: end the node that lends this memory now, once its table and the memory are
    /// known to fit, and go on with what it lends; programs wait for that. A node that was started
    /// with --drain-timeout drains first, and then there is nothing to go on with
    #[arg(long)]
    pub takeover: bool,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `node` and the table `[node]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NodeSettings {
    /// The controllers: https://host:port, several separated by commas
    #[arg(long, value_name = "URL", env = "FARPOOL_NODE_CONTROL", hide_env_values = true)]
    pub control: Option<String>,
    /// Maximum memory to lend; less is lent while this machine's own programs need it [default:
    /// none]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_NODE_DONATE", hide_env_values = true)]
    pub donate: Option<Size>,
    /// This node's name in the rack [default: that of the certificate, or the host's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_NAME", hide_env_values = true)]
    pub name: Option<String>,
    /// Address its blade listens on; may be repeated [default: tcp://127.0.0.1:7070]
    #[arg(long, value_name = "ADDR", env = "FARPOOL_NODE_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<BladeAddress>,
    /// Address at which clients reach its blade; may be repeated [default: where it listens]
    #[arg(long, value_name = "ADDR", env = "FARPOOL_NODE_ADVERTISE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advertise: Vec<BladeAddress>,
    /// Its compute brick in the topology [default: the one with the node's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_COMPUTE_BRICK", hide_env_values = true)]
    pub compute_brick: Option<String>,
    /// Its memory brick in the topology [default: the one with the node's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_MEMORY_BRICK", hide_env_values = true)]
    pub memory_brick: Option<String>,
    /// Bytes per second that it lends in each direction, shared by the segments on it; only without
    /// a topology [default: the speed of its slowest link]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_NODE_BANDWIDTH", hide_env_values = true)]
    pub bandwidth: Option<Size>,
    /// Folder with this node's certificate (farpool pki issue), for https:// controllers and for
    /// its blade, which serves TCP with TLS only then; with --collaborate, so does --rest
    #[arg(long, value_name = "DIR", env = "FARPOOL_NODE_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// File with the controller's token
    #[arg(long, value_name = "FILE", env = "FARPOOL_NODE_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Ask an http:// controller beyond loopback: all is sent unencrypted. With --collaborate:
    /// listen beyond loopback without --rack-key-file, so that everybody there can borrow memory
    /// and take it from others
    #[arg(long, value_name = "BOOL", env = "FARPOOL_NODE_INSECURE", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(conflicts_with = "rack_key_file")]
    pub insecure: Option<bool>,
    /// Note who borrowed memory, who was refused, and which grants came and went in this file, in
    /// lines that each have the hash of the one before (farpool audit verify) [default: none]
    #[arg(long, value_name = "FILE", env = "FARPOOL_NODE_AUDIT", hide_env_values = true)]
    pub audit: Option<PathBuf>,
    /// Keep what it lends in this file, in /run, /dev/shm or another tmpfs, so that it outlives the
    /// node's process; its table is kept in FILE.table. When the node is told to end, it is not
    /// drained then, unless --drain-timeout is given [default: none]
    #[arg(long, value_name = "FILE", env = "FARPOOL_NODE_PERSIST", hide_env_values = true)]
    pub persist: Option<PathBuf>,
    /// Without --pki: allow listening beyond loopback; all but sealed pages is sent unencrypted
    #[arg(
        long,
        value_name = "BOOL",
        env = "FARPOOL_NODE_ALLOW_REMOTE_TCP",
        hide_env_values = true
    )]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote_tcp: Option<bool>,
    /// How long to wait at the end for segments to move to other nodes; 0: do not wait [default:
    /// 30s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_NODE_DRAIN_TIMEOUT", hide_env_values = true)]
    pub drain_timeout: Option<Patience>,
    /// Limit on the bytes served per second and processor while this machine's own programs use all
    /// processors, or `unlimited` [default: 5MiB, which slows them by less than 2 %]
    #[arg(long, value_name = "RATE", env = "FARPOOL_NODE_BUSY_RATE", hide_env_values = true)]
    pub busy_rate: Option<BusyRate>,
    /// Limit on control requests (all but reads and writes) in a second of all programs under one
    /// grant, or without a grant of one host or user, or `unlimited` [default: 20000]
    #[arg(long, value_name = "N", env = "FARPOOL_NODE_CONTROL_RATE", hide_env_values = true)]
    pub control_rate: Option<ControlRate>,
}

/// Arguments of a node with a controller only. Every argument of [`CollaborateArgs`] names them:
/// clap does not enforce `requires` on an argument that conflicts with one that is given.
const WITH_CONTROLLER: [&str; 7] =
    ["control", "donate", "compute_brick", "memory_brick", "bandwidth", "persist", "takeover"];

/// A node without a controller; its other arguments mean the same as with one. It speaks UDP at the
/// address of `--listen tcp://`, and its door requires the token of `--token-file`.
#[derive(Debug, Args)]
pub struct CollaborateArgs {
    /// Lend to and borrow from other nodes, without a controller
    #[arg(long, conflicts_with_all = WITH_CONTROLLER)]
    pub collaborate: bool,
    /// Lend while this node's own programs use less than LOW% of its memory; stop above HIGH%
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "40%:50%")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub min: Band,
    /// Borrow while this node's own programs need more than HIGH% of its memory; stop below LOW%
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "80%:90%")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub max: Band,
    /// Address of another node, to join its cluster; may be repeated
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub join: Vec<String>,
    /// Name of the cluster; only nodes of the same cluster lend each other memory
    #[arg(long, value_name = "NAME", default_value = "farpool")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub cluster: String,
    /// Position of this node: two nodes are nearer the more leading bits of their numbers are equal
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub zone: u32,
    /// How to choose among nodes: fcfs, round-robin or nearest
    #[arg(long, value_name = "NAME", default_value = "fcfs")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub arbitration: Arbitration,
    /// How long memory that it lends stays granted without a renewal
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub lease: Span,
    /// How long borrowers have to move out when it reclaims memory
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub reclaim_deadline: Span,
    /// Address at which this node's programs ask for memory (farpool run --pool http://IP:PORT)
    #[arg(
        long,
        alias = "door",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:7081",
        requires = "collaborate", conflicts_with_all = WITH_CONTROLLER
    )]
    pub rest: SocketAddr,
    /// Allow --rest beyond loopback without --pki: requests then travel unencrypted, and a token is
    /// needed
    #[arg(long, alias = "allow-remote-door")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub allow_remote_rest: bool,
    /// File with the key that all nodes of the cluster share, 32 random bytes in base64; a second
    /// key is accepted, too; read anew when it changes
    #[arg(long, value_name = "FILE")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub rack_key_file: Option<PathBuf>,
    /// The most that one borrower may have of what this node lends, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = BORROWER_PERCENT)]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=100))]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub borrower_share: u8,
    /// Take memory back that was lent this long and holds no data
    #[arg(long, value_name = "TIME", default_value = "5m")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub unused_after: Span,
    /// Remembers the last start, so that a clock that goes back does no harm
    #[arg(long, value_name = "FILE")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub state_file: Option<PathBuf>,
}

/// Which controller to ask, and how to print the answer.
#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// The controllers: https://host:port, several separated by commas
    #[arg(
        long,
        value_name = "URL",
        env = "FARPOOL_CONTROL",
        default_value = "http://127.0.0.1:7080"
    )]
    pub control: String,
    /// Folder with a certificate (farpool pki issue), for https:// controllers
    #[arg(long, value_name = "DIR", env = "FARPOOL_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// File with the controller's token
    #[arg(long, value_name = "FILE", env = "FARPOOL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Ask an http:// controller beyond loopback: all is sent unencrypted
    #[arg(long)]
    pub insecure: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum NodeAction {
    /// Show all nodes of the rack
    List(RemoteArgs),
    /// Show one node
    Show {
        /// Name of the node
        name: String,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Move all segments away from a node, and place none on it
    Drain {
        /// Name of the node
        name: String,
        /// Return once the node is empty
        #[arg(long, conflicts_with = "undo")]
        wait: bool,
        /// End the drain: let the node be used again
        #[arg(long)]
        undo: bool,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}

#[derive(Debug, Args)]
pub struct SegmentArgs {
    #[command(subcommand)]
    pub action: SegmentAction,
}

#[derive(Debug, Subcommand)]
pub enum SegmentAction {
    /// Show all segments
    List(RemoteArgs),
    /// Show one segment
    Show {
        /// Id of the segment
        id: SegmentId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Grant memory to a host until the segment is deleted
    Create(SegmentCreateArgs),
    /// Delete a segment and its contents
    Delete {
        /// Id of the segment
        id: SegmentId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Ask a segment's client to move it to another node
    Move(SegmentMoveArgs),
    /// Change the size of a segment where it is
    Resize {
        /// Id of the segment
        id: SegmentId,
        /// Its new size, in superpages of 16 MiB
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}

#[derive(Debug, Args)]
pub struct SegmentCreateArgs {
    /// Node or compute brick that will use the segment
    #[arg(long, value_name = "NAME")]
    pub host: String,
    /// Size of the segment, in superpages of 16 MiB
    #[arg(long)]
    pub size: Size,
    /// Id of the segment, a UUID; repeating a request with the same id grants it only once
    /// [default: a random one]
    #[arg(long, value_name = "UUID")]
    pub id: Option<SegmentId>,
    /// How the node is chosen: first-fit, pack, spread, nearest or least-loaded
    #[arg(long, value_parser = policy, default_value = "least-loaded")]
    pub policy: Policy,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct SegmentMoveArgs {
    /// Id of the segment
    pub id: SegmentId,
    /// How the node is chosen: first-fit, pack, spread, nearest or least-loaded
    #[arg(long, value_parser = policy, default_value = "least-loaded")]
    pub policy: Policy,
    /// Failure domain to avoid; may be repeated
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    pub avoid: Vec<String>,
    /// Return once the segment has moved
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct TenantArgs {
    #[command(subcommand)]
    pub action: TenantAction,
}

#[derive(Debug, Subcommand)]
pub enum TenantAction {
    /// Show all tenants: what they are promised, and what they have
    List(RemoteArgs),
    /// Show one tenant
    Show {
        /// Name of the tenant
        name: String,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Set what a tenant is promised and allowed; what is left out gets its default
    Set {
        /// Name of the tenant
        name: String,
        /// Memory that it gets back from others when the rack is full [default: none]
        #[arg(long, value_name = "SIZE")]
        promise: Option<Size>,
        /// Most memory that it may have [default: no limit]
        #[arg(long, value_name = "SIZE")]
        quota: Option<Size>,
        /// When the rack is full, tenants with a lower one give up first; 0 to 255
        #[arg(long, value_name = "N", default_value_t = 0)]
        priority: u8,
        /// Most bandwidth that its segments may be granted together, in each direction, in bytes
        /// per second [default: no limit]
        #[arg(long, value_name = "SIZE")]
        rate: Option<Size>,
        /// What its programs store beside what is far if they do not say: none, 2 or 3 (so many
        /// copies in all), or parity [default: none]
        #[arg(long, value_name = "KIND")]
        redundancy: Option<Redundancy>,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Forget what a tenant is promised and allowed; its segments stay
    Delete {
        /// Name of the tenant
        name: String,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}

#[derive(Debug, Args)]
pub struct CircuitArgs {
    #[command(subcommand)]
    pub action: CircuitAction,
}

#[derive(Debug, Subcommand)]
pub enum CircuitAction {
    /// Show all circuits
    List(RemoteArgs),
}

#[derive(Debug, Args)]
pub struct RackArgs {
    #[command(subcommand)]
    pub action: RackAction,
}

#[derive(Debug, Subcommand)]
pub enum RackAction {
    /// Draw the rack
    Show {
        /// Draw this topology file, without asking a controller
        #[arg(long, value_name = "FILE")]
        topology: Option<PathBuf>,
        /// Print the rack as a topology file
        #[arg(long, conflicts_with = "json")]
        toml: bool,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Print the topology file of a regular rack
    Generate(GenerateArgs),
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Number of racks
    #[arg(value_name = "RACKS", value_parser = clap::value_parser!(u32).range(1..))]
    pub racks: u32,
    /// Number of trays per rack
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub trays: u32,
    /// Number of compute bricks per tray
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub compute: u32,
    /// Number of memory bricks per tray
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub memory: u32,
    /// Number of ports per brick
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub ports: u32,
    /// Switches that connect the bricks
    #[arg(long, value_enum, default_value_t = NetworkArg::Packet)]
    pub network: NetworkArg,
    /// Memory of each memory brick
    #[arg(long, value_name = "SIZE", default_value = "64GiB")]
    pub capacity: Size,
}

/// Switches that connect the bricks of a generated rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetworkArg {
    /// Packet switches only
    Packet,
    /// Circuit switches only
    Circuit,
    /// Circuit switches within a rack, packet switches between racks
    Mixed,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Print only events after the one with this id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    pub after: u64,
    /// Also print new events as they happen, until interrupted
    #[arg(long)]
    pub follow: bool,
    /// Stop after N events
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct TaskArgs {
    #[command(subcommand)]
    pub action: TaskAction,
}

#[derive(Debug, Subcommand)]
pub enum TaskAction {
    /// Show all tasks that the controller still keeps
    List(RemoteArgs),
    /// Show one task
    Show {
        /// Id of the task
        id: TaskId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}
