//! The daemon of a server in a rack: a blade, and an agent that does with it what the controller wants.
//!
//! * [`intent`]: from what is wanted and what stands to what is to be done; pure.
//! * [`memory`]: how much memory this server's own programs use: of the machine, or of the control group that
//!   the daemon runs in.
//! * `agent`: reports, and carries out the answers.
//!
//! Invariants:
//! - What the controller no longer names is taken back before anything new is granted.
//! - While no controller answers, every grant stays as it is.
//! - What is lent never passes what was donated, and falls at once when the server's own programs need memory
//!   ([`farpool_acms::next_harvest`]).

mod agent;
pub mod intent;
pub mod memory;

use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use farpool_acms::Thresholds;
use farpool_api::ApiError;
use farpool_blade::{BladeConfig, ServeError, Server, Serving};
use farpool_wire::Address;

/// How a node takes part.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The controllers, with commas between.
    pub controllers: String,
    /// What they ask for.
    pub token: Option<String>,
    /// What it is called in the rack.
    pub name: String,
    /// Memory it may lend.
    pub donate_bytes: u64,
    /// Where its blade listens.
    pub listen: Vec<Address>,
    /// Where others reach it; where it listens if left out.
    pub advertise: Vec<Address>,
    /// The topology's bricks it is, if they are not called as the node.
    pub compute_brick: Option<String>,
    /// Likewise.
    pub memory_brick: Option<String>,
    /// Permits TCP to other hosts, which is not encrypted.
    pub allow_remote_tcp: bool,
    /// What its own programs may use before it lends less.
    pub thresholds: Thresholds,
    /// How long a node that ends waits until what it lends has moved away.
    pub drain_timeout: Duration,
}

/// Why a node does not run, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Its blade does not start.
    #[error("the blade cannot be started: {0}")]
    Blade(#[from] ServeError),
    /// The controller does not let it in.
    #[error("the controller refuses this node: {0}")]
    Refused(ApiError),
    /// An address of the controller that is none.
    #[error(transparent)]
    Url(ApiError),
    /// The kernel has no random numbers.
    #[error("no random number for this start: {0}")]
    Random(std::io::Error),
}

/// Tells a running node to end; kept by whoever watches for signals.
#[derive(Clone, Debug, Default)]
pub struct Ending(Arc<AtomicU8>);

impl Ending {
    /// Asks once: it ends when nothing is lent any more, or its time is over. Asks twice: at once.
    pub fn ask(&self) {
        let _always_ok = self.0.fetch_update(SeqCst, SeqCst, |asked| Some(asked.saturating_add(1)));
    }

    fn times(&self) -> u8 {
        self.0.load(SeqCst)
    }
}

/// A node whose blade serves.
#[derive(Debug)]
pub struct Node {
    options: NodeOptions,
    serving: Serving,
}

impl Node {
    /// Starts the blade, which serves nobody without a grant.
    ///
    /// # Errors
    /// The blade cannot be started.
    pub fn start(options: NodeOptions) -> Result<Node, NodeError> {
        let config = BladeConfig {
            memory_bytes: options.donate_bytes,
            require_grants: true,
            allow_remote_tcp: options.allow_remote_tcp,
            ..BladeConfig::default()
        };
        let serving = Server::bind(&options.listen, config)?.serve()?;
        Ok(Node { options, serving })
    }

    /// Where the blade listens.
    pub fn addresses(&self) -> &[Address] {
        self.serving.addresses()
    }

    /// Registers, and does what the controller says until it is told to end.
    ///
    /// # Errors
    /// The controller refuses the node for good; that no controller answers is no error.
    pub fn run(self, ending: &Ending) -> Result<(), NodeError> {
        let result = agent::Agent::new(&self.options, &self.serving)?.run(ending);
        self.serving.shutdown();
        result
    }
}
