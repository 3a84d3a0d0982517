//! A rack with a controller, on the last host.

use std::path::{Path, PathBuf};
use std::process::Command;

use farpool_api::{Access, Client, NodeState, SegmentFilter, SegmentState};
use farpool_hosts::{Host, Hosts};

use super::organiser::{Drain, NodeStatus, Organiser, Placement, Status};
use crate::Error;
use crate::error::During;

/// The host that the controller runs on.
const HOST: usize = super::E;
const PORT: u16 = 7080;
/// Port of every node's blade.
const BLADE_PORT: u16 = 7070;

/// How the controller is started and asked.
#[derive(Debug)]
pub struct Controller {
    farpool: PathBuf,
    store: PathBuf,
    token_file: PathBuf,
    listen: String,
    client: Client,
}

impl Controller {
    /// Keeps its state and its token in `folder`.
    pub fn new(farpool: &Path, folder: &Path, hosts: &Hosts) -> Result<Controller, Error> {
        let token = format!("rack-demo-{}", std::process::id());
        let token_file = folder.join("token");
        std::fs::write(&token_file, &token).during("writing the token")?;
        let listen = format!("{}:{PORT}", hosts[HOST].address());
        let access = Access { token: Some(token), insecure: true, ..Access::default() };
        let client = Client::with(&format!("http://{listen}"), &access).map_err(said)?;
        let store = folder.join("control.redb");
        Ok(Controller { farpool: farpool.to_owned(), store, token_file, listen, client })
    }

    fn url(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Asks from the controller's own host.
    fn ask<T: Send>(
        &self,
        hosts: &Hosts,
        question: impl FnOnce(&Client) -> Result<T, farpool_api::ApiError> + Send,
    ) -> Result<T, Error> {
        hosts[HOST].enter(|| question(&self.client))?.map_err(said)
    }
}

impl Organiser for Controller {
    fn name(&self) -> &'static str {
        "controller"
    }

    fn title(&self) -> &'static str {
        "with a controller"
    }

    fn controller(&self, hosts: &Hosts) -> Option<Command> {
        let mut command = hosts[HOST].command(&self.farpool);
        command.args(["control", "--insecure", "--listen", &self.listen]);
        command.arg("--store").arg(format!("redb:{}", self.store.display()));
        command.arg("--token-file").arg(&self.token_file);
        Some(command)
    }

    fn node(&self, host: &Host, donate_bytes: u64) -> Command {
        let listen = format!("tcp://{}:{BLADE_PORT}", host.address());
        let mut command = host.command(&self.farpool);
        command.args(["node", "--control", &self.url(), "--name", host.name()]);
        command.args(["--donate", &donate_bytes.to_string(), "--listen", &listen]);
        command.args(["--insecure", "--allow-remote-tcp", "--drain-timeout", "1s"]);
        // The hosts share this machine's processors.
        command.args(["--busy-rate", "unlimited"]);
        command.arg("--token-file").arg(&self.token_file);
        command
    }

    fn run(&self, host: &Host) -> Command {
        let mut command = host.command(&self.farpool);
        command.args(["run", "--pool", &self.url(), "--host", host.name()]);
        command.args(["--insecure", "--allow-remote-tcp"]);
        command.arg("--token-file").arg(&self.token_file);
        command
    }

    fn status(&self, hosts: &Hosts) -> Result<Status, Error> {
        let (nodes, segments) = self.ask(hosts, |client| {
            Ok((client.nodes()?.nodes, client.segments(&SegmentFilter::default())?.segments))
        })?;
        let mut status = Status::default();
        for node in nodes {
            let known = NodeStatus {
                is_up: node.state == NodeState::Up,
                offered_bytes: node.lendable_bytes.unwrap_or(0),
                lent_bytes: node.used_bytes,
                class: None,
            };
            status.nodes.insert(node.name, known);
        }
        for segment in segments {
            let target = segment.target.map(|target| (target.place, false));
            let here = (segment.place, segment.state == SegmentState::Ready);
            for (place, is_ready) in std::iter::once(here).chain(target) {
                let host = segment.host.clone();
                let (node, bytes) = (place.node, place.bytes);
                status.placements.push(Placement { host, node, bytes, is_ready });
            }
        }
        Ok(status)
    }

    fn drain(&self, hosts: &Hosts, node: &str) -> Result<Drain, Error> {
        self.ask(hosts, |client| client.drain_node(node)).map(|_| Drain::Asked)
    }
}

fn said(error: farpool_api::ApiError) -> Error {
    Error::Program(error.to_string())
}
