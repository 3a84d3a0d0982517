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
    /// It takes part and answers.
    pub is_up: bool,
    /// What it lends at most now.
    pub offered_bytes: u64,
    /// Bytes that hold others' data; none if not reported yet.
    pub lent_bytes: Option<u64>,
    /// What it is to the others, where that is more than what it does at the moment.
    pub class: Option<Role>,
}

/// Memory that a host's program may use on a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// Whose program.
    pub host: String,
    /// On which node.
    pub node: String,
    pub bytes: u64,
    /// It can be used, and need not move.
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
    /// The organiser has been asked to.
    Asked,
    /// The node's daemon does it when it is asked to end.
    ByEnding,
}

/// A way to run a rack.
pub trait Organiser: std::fmt::Debug + Send + Sync {
    /// In a word, for JSON.
    fn name(&self) -> &'static str;

    /// In words, for headings.
    fn title(&self) -> &'static str;

    /// How the daemon that decides is started, if there is one; the same again after it was killed.
    fn controller(&self, hosts: &Hosts) -> Option<Command>;

    /// The daemon of a host that lends at most this much.
    fn node(&self, host: &Host, donate_bytes: u64) -> Command;

    /// `farpool run` on a host, up to where its memory comes from.
    fn run(&self, host: &Host) -> Command;

    /// How the rack stands.
    ///
    /// # Errors
    /// Nobody says.
    fn status(&self, hosts: &Hosts) -> Result<Status, Error>;

    /// Has a node emptied.
    ///
    /// # Errors
    /// It is refused.
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

    /// What a node lends at most; nothing while it does not answer.
    pub fn offered_bytes(&self, node: &str) -> u64 {
        self.nodes.get(node).filter(|node| node.is_up).map_or(0, |node| node.offered_bytes)
    }

    /// What a node has for others at present.
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
