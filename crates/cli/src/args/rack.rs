//! The rack's part of the command line: the controller, the node daemon, and what people ask them.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_acms::{Arbitration, Band};
use farpool_api::{Policy, SegmentId, TaskId};
use serde::{Deserialize, Serialize};

use crate::values::{BladeAddress, BusyRate, Patience, Size, Span, StoreAt, SwitchAt, policy};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool control --topology rack.toml --store etcd://127.0.0.1:2379\n  \
farpool control --listen 192.0.2.1:7080 --allow-remote --token-file /etc/farpool.token")]
pub struct ControlArgs {
    #[command(flatten)]
    pub settings: ControlSettings,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `control` and the table `[control]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ControlSettings {
    /// The rack as a file [default: a rack made of the nodes that register]
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOPOLOGY", hide_env_values = true)]
    pub topology: Option<PathBuf>,
    /// Where to listen, may be repeated [default: 127.0.0.1:7080]
    #[arg(long, value_name = "IP:PORT", env = "FARPOOL_CONTROL_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<SocketAddr>,
    /// What others call it, as a URL [default: its first address]
    #[arg(long, value_name = "URL", env = "FARPOOL_CONTROL_ADVERTISE", hide_env_values = true)]
    pub advertise: Option<String>,
    /// Where intent is kept: redb:PATH, or etcd://HOST:PORT, several with commas [default: a redb
    /// file in /var/lib/farpool, or below the user's state folder]
    #[arg(long, value_name = "STORE", env = "FARPOOL_CONTROL_STORE", hide_env_values = true)]
    pub store: Option<StoreAt>,
    /// A file with the token that every request must present
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Allow listening beyond loopback, unencrypted; needs a token as well
    #[arg(long, value_name = "BOOL", env = "FARPOOL_CONTROL_ALLOW_REMOTE", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote: Option<bool>,
    /// Drive this circuit switch of the topology by its control socket; may be repeated
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
farpool node --collaborate --min 40%:50% --max 80%:90% --join 10.0.0.7:7070 --listen \
tcp://10.0.0.8:7070 --allow-remote-tcp\n  \
farpool node list\n\n\
What the server's own programs need is never lent, and taken back when they need it.\n\
The first SIGTERM or SIGINT drains the node, the second ends it at once.")]
pub struct NodeArgs {
    #[command(subcommand)]
    pub action: Option<NodeAction>,
    #[command(flatten)]
    pub settings: NodeSettings,
    #[command(flatten)]
    pub collaborate: CollaborateArgs,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `node` and the table `[node]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NodeSettings {
    /// The controllers, with commas between: http://host:port
    #[arg(long, value_name = "URL", env = "FARPOOL_NODE_CONTROL", hide_env_values = true)]
    pub control: Option<String>,
    /// Memory to lend at most, as far as this machine's programs leave it [default: none]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_NODE_DONATE", hide_env_values = true)]
    pub donate: Option<Size>,
    /// This node's name in the rack [default: the machine's]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_NAME", hide_env_values = true)]
    pub name: Option<String>,
    /// Where its blade listens, may be repeated [default: tcp://127.0.0.1:7070]
    #[arg(long, value_name = "ADDR", env = "FARPOOL_NODE_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<BladeAddress>,
    /// What others connect to, may be repeated [default: where it listens]
    #[arg(long, value_name = "ADDR", env = "FARPOOL_NODE_ADVERTISE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advertise: Vec<BladeAddress>,
    /// The topology's compute brick it is [default: the one of its name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_COMPUTE_BRICK", hide_env_values = true)]
    pub compute_brick: Option<String>,
    /// The topology's memory brick it is [default: the one of its name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_MEMORY_BRICK", hide_env_values = true)]
    pub memory_brick: Option<String>,
    /// A file with the controller's token
    #[arg(long, value_name = "FILE", env = "FARPOOL_NODE_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Allow listening beyond loopback: pages then travel unencrypted
    #[arg(
        long,
        value_name = "BOOL",
        env = "FARPOOL_NODE_ALLOW_REMOTE_TCP",
        hide_env_values = true
    )]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote_tcp: Option<bool>,
    /// How long segments may take to move away when it is to end; 0 for not at all [default: 30s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_NODE_DRAIN_TIMEOUT", hide_env_values = true)]
    pub drain_timeout: Option<Patience>,
    /// What it serves a second, for each processor, while this machine's own programs use all of
    /// them; or `unlimited` [default: 5MiB, which costs them less than 2 %]
    #[arg(long, value_name = "RATE", env = "FARPOOL_NODE_BUSY_RATE", hide_env_values = true)]
    pub busy_rate: Option<BusyRate>,
}

/// What only a node with a controller is told. Each argument of the others names it: clap does not
/// require what is in conflict with an argument that is given.
const WITH_CONTROLLER: [&str; 4] = ["control", "donate", "compute_brick", "memory_brick"];

/// A node that has no controller; what else it is told means the same as with one. It speaks UDP at
/// the address of `--listen tcp://`, and `--token-file` is what its REST interface asks for.
#[derive(Debug, Args)]
pub struct CollaborateArgs {
    /// Lend to and borrow from other nodes without a controller
    #[arg(long, conflicts_with_all = WITH_CONTROLLER)]
    pub collaborate: bool,
    /// Lend below the first use of memory, stop above the second
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "40%:50%")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub min: Band,
    /// Borrow above the second use of memory, stop below the first
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "80%:90%")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub max: Band,
    /// A node to greet; may be repeated
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub join: Vec<String>,
    /// Nodes of one cluster lend each other memory
    #[arg(long, value_name = "NAME", default_value = "farpool")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub cluster: String,
    /// Where it stands: nodes are the nearer the more leading bits are equal
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub zone: u32,
    /// Whom it chooses: fcfs, round-robin or nearest
    #[arg(long, value_name = "NAME", default_value = "fcfs")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub arbitration: Arbitration,
    /// How long what it lends stands without a renewal
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub lease: Span,
    /// How long others have to move out when it needs its memory
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub reclaim_deadline: Span,
    /// Where its programs ask (farpool run --pool http://IP:PORT)
    #[arg(
        long,
        alias = "door",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:7081",
        requires = "collaborate", conflicts_with_all = WITH_CONTROLLER
    )]
    pub rest: SocketAddr,
    /// Allow --rest beyond loopback: requests then travel unencrypted, and a token is needed
    #[arg(long, alias = "allow-remote-door")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub allow_remote_rest: bool,
    /// Remembers the last start, so that a clock that goes back does no harm
    #[arg(long, value_name = "FILE")]
    #[arg(requires = "collaborate", conflicts_with_all = WITH_CONTROLLER)]
    pub state_file: Option<PathBuf>,
}

/// Which controller is asked, and how the answer is printed.
#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// The controllers, with commas between: http://host:port
    #[arg(
        long,
        value_name = "URL",
        env = "FARPOOL_CONTROL",
        default_value = "http://127.0.0.1:7080"
    )]
    pub control: String,
    /// A file with the controller's token
    #[arg(long, value_name = "FILE", env = "FARPOOL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
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
        /// Its name
        name: String,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Have everything moved away from a node, and nothing placed on it
    Drain {
        /// Its name
        name: String,
        /// Return when it is empty
        #[arg(long, conflicts_with = "undo")]
        wait: bool,
        /// Let it be used again
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
        /// Its id
        id: SegmentId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Have memory granted to a host, until the segment is deleted
    Create(SegmentCreateArgs),
    /// Give a segment up; what it holds is gone
    Delete {
        /// Its id
        id: SegmentId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Have a segment moved to another node by its client
    Move(SegmentMoveArgs),
}

#[derive(Debug, Args)]
pub struct SegmentCreateArgs {
    /// The node or compute brick that will use it
    #[arg(long, value_name = "NAME")]
    pub host: String,
    /// Its size, in superpages of 16 MiB
    #[arg(long)]
    pub size: Size,
    /// Its id, a UUID; the same request with the same id is granted once [default: a random one]
    #[arg(long, value_name = "UUID")]
    pub id: Option<SegmentId>,
    /// first-fit, pack, spread, nearest or least-loaded
    #[arg(long, value_parser = policy, default_value = "least-loaded")]
    pub policy: Policy,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct SegmentMoveArgs {
    /// Its id
    pub id: SegmentId,
    /// first-fit, pack, spread, nearest or least-loaded
    #[arg(long, value_parser = policy, default_value = "least-loaded")]
    pub policy: Policy,
    /// A failure domain that will not do; may be repeated
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    pub avoid: Vec<String>,
    /// Return when it has moved
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub remote: RemoteArgs,
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
        /// Draw this file; no controller is asked
        #[arg(long, value_name = "FILE")]
        topology: Option<PathBuf>,
        /// Print it as a topology file
        #[arg(long, conflicts_with = "json")]
        toml: bool,
        #[command(flatten)]
        remote: RemoteArgs,
    },
    /// Print the topology file of a rack made by rule
    Generate(GenerateArgs),
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// How many racks
    #[arg(value_name = "RACKS", value_parser = clap::value_parser!(u32).range(1..))]
    pub racks: u32,
    /// Trays of each rack
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub trays: u32,
    /// Compute bricks of each tray
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub compute: u32,
    /// Memory bricks of each tray
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub memory: u32,
    /// Ports of each brick
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub ports: u32,
    /// Which switches join the bricks
    #[arg(long, value_enum, default_value_t = NetworkArg::Packet)]
    pub network: NetworkArg,
    /// Memory of each memory brick
    #[arg(long, value_name = "SIZE", default_value = "64GiB")]
    pub capacity: Size,
}

/// Which switches join the bricks of a generated rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetworkArg {
    /// Packet switches only
    Packet,
    /// Circuit switches only
    Circuit,
    /// Circuits within a rack, packets between racks
    Mixed,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only what came after the event with this id
    #[arg(long, value_name = "ID", default_value_t = 0)]
    pub after: u64,
    /// Go on with what happens from now on, until interrupted
    #[arg(long)]
    pub follow: bool,
    /// End after so many
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
    /// Show all tasks that are remembered
    List(RemoteArgs),
    /// Show one task
    Show {
        /// Its id
        id: TaskId,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}
