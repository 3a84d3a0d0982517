//! The command line of the rack: controller, nodes, and what people ask of them.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use farpool_acms::{Arbitration, Band};

use crate::values::{BladeAddress, Size, Span};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool control --listen 127.0.0.1:7080\n  \
farpool control --topology rack.toml --store etcd://127.0.0.1:2379 --token-file /etc/farpool.token")]
pub struct ControlArgs {
    /// The rack as TOML; without it the rack is made of the nodes that register
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOPOLOGY", hide_env_values = true)]
    pub topology: Option<PathBuf>,
    /// Where to listen; may be repeated
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:7080")]
    #[arg(env = "FARPOOL_CONTROL_LISTEN", hide_env_values = true, value_delimiter = ',')]
    pub listen: Vec<SocketAddr>,
    /// Where intent is kept: redb:FILE, or etcd://HOST:PORT, several with commas [default: a redb
    /// file in /var/lib/farpool, or below the user's state folder]
    #[arg(long, value_name = "STORE", env = "FARPOOL_CONTROL_STORE", hide_env_values = true)]
    pub store: Option<String>,
    /// Ask every request for the token in this file
    #[arg(long, value_name = "FILE", env = "FARPOOL_CONTROL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Allow listening beyond loopback: requests then travel unencrypted, and a token is needed
    #[arg(long)]
    pub allow_remote: bool,
    /// Where others reach this controller, as http://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub advertise: Option<String>,
    /// Drive this circuit switch of the topology by its control socket; may be repeated
    #[arg(long, value_name = "NAME=SOCKET")]
    pub switch: Vec<String>,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// How a controller is reached.
#[derive(Clone, Debug, Args)]
pub struct Access {
    /// The controller (http://host:port), several with commas
    #[arg(long, value_name = "URL", env = "FARPOOL_CONTROL", hide_env_values = true)]
    #[arg(default_value = "http://127.0.0.1:7080")]
    pub control: String,
    /// Read the controller's token from this file
    #[arg(long, value_name = "FILE", env = "FARPOOL_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "\
Examples:\n  \
farpool node --control http://127.0.0.1:7080 --donate 8GiB --listen tcp://127.0.0.1:7070\n  \
farpool node --collaborate --min 40%:50% --max 80%:90% --join 10.0.0.7:7070 --listen tcp://10.0.0.8:7070 \
--allow-remote-tcp\n  \
farpool node list\n\n\
What the server's own programs need is never lent, and taken back when they need it.")]
pub struct NodeArgs {
    #[command(subcommand)]
    pub command: Option<NodeCommand>,
    #[command(flatten)]
    pub daemon: NodeDaemonArgs,
}

#[derive(Debug, Args)]
pub struct NodeDaemonArgs {
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub collaborate: CollaborateArgs,
    /// Memory to lend at most
    #[arg(long, value_name = "SIZE", required_unless_present = "collaborate")]
    #[arg(env = "FARPOOL_NODE_DONATE", hide_env_values = true)]
    pub donate: Option<Size>,
    /// What it is called in the rack [default: the host's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_NODE_NAME", hide_env_values = true)]
    pub name: Option<String>,
    /// Where its blade listens: tcp://ip:port or unix:///path.sock; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_NODE_LISTEN", hide_env_values = true)]
    #[arg(default_value = "tcp://127.0.0.1:7070", value_delimiter = ',')]
    pub listen: Vec<BladeAddress>,
    /// Where others reach the blade [default: where it listens]; may be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub advertise: Vec<BladeAddress>,
    /// The topology's compute brick it is [default: its name]
    #[arg(long, value_name = "NAME")]
    pub compute_brick: Option<String>,
    /// The topology's memory brick it is [default: its name]
    #[arg(long, value_name = "NAME")]
    pub memory_brick: Option<String>,
    /// How long it waits at its end until what it lends has moved away
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub drain_timeout: Span,
    /// Allow addresses beyond loopback: pages then travel unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
}

/// A node that has no controller; what else it is told means the same as with one. It speaks UDP at the
/// address of `--listen tcp://`, and `--token-file` is what its door asks for.
#[derive(Debug, Args)]
pub struct CollaborateArgs {
    /// Lend to and borrow from other nodes without a controller
    #[arg(long, conflicts_with_all = ["donate", "compute_brick", "memory_brick"])]
    pub collaborate: bool,
    /// Lend below the first use of memory, stop above the second
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "40%:50%", requires = "collaborate")]
    pub min: Band,
    /// Borrow above the second use of memory, stop below the first
    #[arg(long, value_name = "LOW%:HIGH%", default_value = "80%:90%", requires = "collaborate")]
    pub max: Band,
    /// A node to greet; may be repeated
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', requires = "collaborate")]
    pub join: Vec<String>,
    /// Nodes of one cluster lend each other memory
    #[arg(long, value_name = "NAME", default_value = "farpool", requires = "collaborate")]
    pub cluster: String,
    /// Where it stands: nodes are the nearer the more leading bits are equal
    #[arg(long, value_name = "NUMBER", default_value_t = 0, requires = "collaborate")]
    pub zone: u32,
    /// Whom it chooses: fcfs, round-robin or nearest
    #[arg(long, value_name = "NAME", default_value = "fcfs", requires = "collaborate")]
    pub arbitration: Arbitration,
    /// How long what it lends stands without a renewal
    #[arg(long, value_name = "TIME", default_value = "10s", requires = "collaborate")]
    pub lease: Span,
    /// How long others have to move out when it needs its memory
    #[arg(long, value_name = "TIME", default_value = "10s", requires = "collaborate")]
    pub reclaim_deadline: Span,
    /// Where its programs ask (farpool run --pool http://IP:PORT)
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:7081",
        requires = "collaborate"
    )]
    pub door: SocketAddr,
    /// Allow a door beyond loopback: requests then travel unencrypted, and a token is needed
    #[arg(long, requires = "collaborate")]
    pub allow_remote_door: bool,
    /// Remembers the last start, so that a clock that goes back does no harm
    #[arg(long, value_name = "FILE", requires = "collaborate")]
    pub state_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// All nodes
    List(Access),
    /// One node
    Show(NamedArgs),
    /// Move everything away from a node, and place nothing new on it
    Drain(DrainArgs),
}

#[derive(Debug, Args)]
pub struct NamedArgs {
    /// Its name or id
    pub name: String,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The node
    pub name: String,
    /// Place memory on it again
    #[arg(long)]
    pub undo: bool,
    /// Return when it is empty
    #[arg(long, conflicts_with = "undo")]
    pub wait: bool,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Subcommand)]
pub enum SegmentCommand {
    /// All segments
    List(Access),
    /// One segment
    Show(NamedArgs),
    /// Grant memory to a host, until it is deleted
    Create(CreateArgs),
    /// Release a segment
    Delete(NamedArgs),
    /// Move a segment to another node
    Move(MoveArgs),
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The compute brick that will use it
    #[arg(long, value_name = "NAME")]
    pub host: String,
    /// How much
    #[arg(long, value_name = "SIZE")]
    pub size: Size,
    /// Its id, a UUID; the same request with the same id is granted once [default: a random one]
    #[arg(long, value_name = "UUID")]
    pub id: Option<String>,
    /// How its node is chosen: first-fit, pack, spread, nearest or least-loaded
    #[arg(long, value_name = "NAME", default_value = "least-loaded")]
    pub policy: String,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Args)]
pub struct MoveArgs {
    /// Its id
    pub id: String,
    /// How its new node is chosen
    #[arg(long, value_name = "NAME", default_value = "least-loaded")]
    pub policy: String,
    /// Not to this failure domain; may be repeated
    #[arg(long, value_name = "NAME")]
    pub avoid: Vec<String>,
    /// Return when it has moved
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Subcommand)]
pub enum CircuitCommand {
    /// All circuits, wanted and standing
    List(Access),
}

#[derive(Debug, Subcommand)]
pub enum RackCommand {
    /// Draw the rack with what is granted of it
    Show(RackShowArgs),
}

#[derive(Debug, Args)]
pub struct RackShowArgs {
    /// Print it as a topology file
    #[arg(long, conflicts_with = "json")]
    pub toml: bool,
    /// Draw this file; no controller is asked
    #[arg(long, value_name = "FILE")]
    pub topology: Option<PathBuf>,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Only what came after this event
    #[arg(long, value_name = "ID", default_value_t = 0)]
    pub after: u64,
    /// End after so many [default: go on until interrupted]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    #[command(flatten)]
    pub access: Access,
}
