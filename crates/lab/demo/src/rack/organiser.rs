//! How the rack is organised: by a controller, or by the nodes among themselves.
//!
//! The scenario knows only this: how daemons and programs are started, and who lends what to whom.

use std::collections::BTreeMap;
use std::process::Command;

use farpool_hosts::{Host, Hosts};

use super::timeline::Role;
use crate::Error;

/// A node as the organiser sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeStatus {
    /// Whether it takes part and answers.
    pub is_up: bool,
    /// The most that it lends now.
    pub offered_bytes: u64,
    /// Bytes that hold other hosts' data. None if not reported yet.
    pub lent_bytes: Option<u64>,
    /// Its role, if the organiser gives it a class that can differ from what it does at the moment.
    pub class: Option<Role>,
}

/// Memory that a host's program may use on a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The host whose program uses the memory.
    pub host: String,
    /// The node that has the memory.
    pub node: String,
    pub bytes: u64,
    /// Whether it can be used and need not move.
    pub is_ready: bool,
}

/// The rack as its organiser sees it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Status {
    pub nodes: BTreeMap<String, NodeStatus>,
    pub placements: Vec<Placement>,
}

/// How a node is emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drain {
    /// The organiser has been asked to empty it.
    Asked,
    /// The node's daemon does it when it is asked to end.
    ByEnding,
}

/// A way to run a rack.
pub trait Organiser: std::fmt::Debug + Send + Sync {
    /// Its name in one word, for JSON.
    fn name(&self) -> &'static str;

    /// Its name in words, for headings.
    fn title(&self) -> &'static str;

    /// Returns the command that starts the daemon that decides, or None if there is none. The same
    /// command restarts it after it was killed.
    fn controller(&self, hosts: &Hosts) -> Option<Command>;

    /// Returns the command that starts the daemon of a host, which lends at most `donate_bytes`.
    fn node(&self, host: &Host, donate_bytes: u64) -> Command;

    /// Returns a `farpool run` command on a host, with the options for where its memory comes from.
    fn run(&self, host: &Host) -> Command;

    /// Returns the state of the rack.
    ///
    /// # Errors
    /// Nobody answers.
    fn status(&self, hosts: &Hosts) -> Result<Status, Error>;

    /// Asks to empty a node. Returns how the node is emptied.
    ///
    /// # Errors
    /// The request is refused.
    fn drain(&self, hosts: &Hosts, node: &str) -> Result<Drain, Error>;
}

impl Status {
    /// The nodes that have ready memory of a host's programs, each once.
    pub fn lenders_of(&self, host: &str) -> Vec<&str> {
        let ready = self.placements.iter().filter(|it| it.host == host && it.is_ready);
        let mut nodes: Vec<&str> = ready.map(|it| it.node.as_str()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Whether a node has anything of a host's programs, usable or not.
    pub fn has(&self, node: &str, host: &str) -> bool {
        self.placements.iter().any(|it| it.host == host && it.node == node)
    }

    /// The most that a node lends. Zero while it does not answer.
    pub fn offered_bytes(&self, node: &str) -> u64 {
        self.nodes.get(node).filter(|node| node.is_up).map_or(0, |node| node.offered_bytes)
    }

    /// Bytes that a node has for others at present.
    pub fn granted_bytes(&self, node: &str) -> u64 {
        let on_it = self.placements.iter().filter(|it| it.node == node);
        on_it.map(|it| it.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lends_is_told_from_who_is_being_left() {
        let placement = |host: &str, node: &str, is_ready| Placement {
            host: host.into(),
            node: node.into(),
            bytes: 16,
            is_ready,
        };
        let placements = vec![
            placement("B", "C", true),
            placement("B", "A", false),
            placement("B", "C", true),
            placement("A", "D", true),
        ];
        let node = NodeStatus { offered_bytes: 7, ..NodeStatus::default() };
        let status = Status { nodes: [("C".to_owned(), node)].into(), placements };
        assert_eq!(status.lenders_of("B"), ["C"]);
        assert!(status.has("A", "B") && !status.has("D", "B"));
        assert_eq!(status.granted_bytes("C"), 32);
        assert_eq!(status.offered_bytes("C"), 0, "it does not answer");
        assert_eq!(status.offered_bytes("E"), 0);
    }
}
