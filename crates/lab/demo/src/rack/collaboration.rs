//! A rack without a controller: each host's daemon lends and borrows by itself (ACMS,
//! docs/operators/collaboration.md).
//!
//! Every daemon is asked at its own REST address, on its own host; none knows the whole rack.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use farpool_hosts::{Host, Hosts};
use serde_json::Value;

use super::organiser::{Drain, NodeStatus, Organiser, Placement, Status};
use super::timeline::Role;
use crate::Error;

/// Port for datagrams and pages.
const PORT: u16 = 7070;
/// REST port, for the programs of the same host and for the demo.
const REST_PORT: u16 = 7081;
/// How long an answer may take: it is on the same host.
const REST_TIMEOUT: Duration = Duration::from_secs(2);

/// The file with the key of the nodes, in the demo's folder.
const RACK_KEY_FILE: &str = "rack.key";

/// How the daemons are started and asked.
#[derive(Debug)]
pub struct Collaboration {
    farpool: PathBuf,
    folder: PathBuf,
    /// Names and addresses of all hosts.
    hosts: Vec<(String, Ipv4Addr)>,
}

impl Collaboration {
    /// Whether this build of Farpool has collaboration.
    pub fn is_there(farpool: &Path) -> bool {
        let help = Command::new(farpool).args(["node", "--help"]).stdin(Stdio::null()).output();
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--collaborate"))
    }

    /// Makes an organiser for these hosts. The blades' sockets are in `folder`, and so is a new key
    /// of the nodes.
    pub fn new(farpool: &Path, folder: &Path, hosts: &Hosts) -> Result<Collaboration, Error> {
        let mut key = [0; 32];
        let file = folder.join(RACK_KEY_FILE);
        farpool_kernel::fill_random(&mut key)
            .map_err(std::io::Error::from)
            .and_then(|()| farpool_kernel::write_secret(&file, STANDARD.encode(key).as_bytes()))
            .map_err(|error| Error::at("making", &file, error))?;
        let hosts = hosts.iter().map(|host| (host.name().to_owned(), host.address()));
        let (farpool, folder) = (farpool.to_owned(), folder.to_owned());
        Ok(Collaboration { farpool, folder, hosts: hosts.collect() })
    }

    /// Returns the name of the host behind a blade's address. A node calls its own blade by its own
    /// name, which is returned unchanged.
    fn name_of(&self, address: &str) -> String {
        let ip = address.rsplit_once(':').map_or(address, |(ip, _)| ip);
        let found = self.hosts.iter().find(|(_, address)| address.to_string() == ip);
        found.map_or(address, |(name, _)| name).to_owned()
    }

    /// Adds what one daemon reports to `status`.
    fn hear(&self, name: &str, said: &Value, status: &mut Status) {
        let bytes = |key: &str| said[key].as_u64();
        let node = NodeStatus {
            is_up: false,
            offered_bytes: bytes("offered_bytes").unwrap_or(0),
            lent_bytes: bytes("lent_used_bytes"),
            class: class(said["class"].as_str().unwrap_or("")),
        };
        status.nodes.insert(name.to_owned(), node);
        for grant in said["borrowed"].as_array().into_iter().flatten() {
            status.placements.push(Placement {
                host: name.to_owned(),
                node: self.name_of(grant["node"].as_str().unwrap_or("?")),
                bytes: grant["bytes"].as_u64().unwrap_or(0),
                is_ready: grant["state"] == "ready",
            });
        }
    }
}

impl Organiser for Collaboration {
    fn name(&self) -> &'static str {
        "collaboration"
    }

    fn title(&self) -> &'static str {
        "without a controller"
    }

    fn controller(&self, _hosts: &Hosts) -> Option<Command> {
        None
    }

    fn node(&self, host: &Host, _donate_bytes: u64) -> Command {
        let listen = format!("tcp://{}:{PORT}", host.address());
        let socket = format!("unix://{}/{}.sock", self.folder.display(), host.name());
        let mut command = host.command(&self.farpool);
        command.args(["node", "--collaborate", "--name", host.name(), "--allow-remote-tcp"]);
        command.args(["--listen", &listen, "--listen", &socket, "--drain-timeout", "30s"]);
        command.args(["--min", "40%:50%", "--max", "80%:90%"]);
        command.arg("--rack-key-file").arg(self.folder.join(RACK_KEY_FILE));
        // The hosts share this machine's processors.
        command.args(["--busy-rate", "unlimited"]);
        // Any two other hosts suffice.
        let others = self.hosts.iter().filter(|(name, _)| name != host.name()).take(2);
        for (_, address) in others {
            command.args(["--join", &format!("{address}:{PORT}")]);
        }
        command
    }

    fn run(&self, host: &Host) -> Command {
        let rest = format!("http://127.0.0.1:{REST_PORT}");
        let mut command = host.command(&self.farpool);
        command.args(["run", "--pool", &rest, "--host", host.name(), "--allow-remote-tcp"]);
        command
    }

    fn status(&self, hosts: &Hosts) -> Result<Status, Error> {
        let mut status = Status::default();
        let mut known = std::collections::BTreeSet::new();
        for host in hosts {
            // A host whose daemon does not run does not answer.
            let Ok(Some(said)) = host.enter(|| ask("/v1/status")) else { continue };
            self.hear(host.name(), &said, &mut status);
            let peers = said["peers"].as_array().cloned().unwrap_or_default();
            let peers = peers.iter().filter_map(|peer| peer["address"].as_str());
            known.extend(peers.map(|address| self.name_of(address)));
        }
        // A node is up if another node knows it: one that is cut off still answers the demo.
        let is_alone = status.nodes.len() == 1;
        for (name, node) in &mut status.nodes {
            node.is_up = is_alone || known.contains(name);
        }
        Ok(status)
    }

    fn drain(&self, _hosts: &Hosts, _node: &str) -> Result<Drain, Error> {
        Ok(Drain::ByEnding)
    }
}

fn class(word: &str) -> Option<Role> {
    match word {
        "server" => Some(Role::Server),
        "client" => Some(Role::Client),
        "neutral" => Some(Role::Neutral),
        _ => None,
    }
}

/// Asks the node of the host that the calling thread is in.
fn ask(path: &str) -> Option<Value> {
    let rest = SocketAddr::from((Ipv4Addr::LOCALHOST, REST_PORT));
    let mut stream = TcpStream::connect_timeout(&rest, REST_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(REST_TIMEOUT)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {rest}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    parse(&answer)
}

/// Returns the body of an answer with status 200.
fn parse(answer: &str) -> Option<Value> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let is_ok = head.split(' ').nth(1) == Some("200");
    is_ok.then(|| serde_json::from_str(body).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collaboration() -> Collaboration {
        let hosts = [("A", 1), ("B", 2), ("C", 3)];
        let hosts = hosts.map(|(name, at)| (name.to_owned(), Ipv4Addr::new(192, 0, 2, at)));
        Collaboration { farpool: "f".into(), folder: "d".into(), hosts: hosts.into() }
    }

    #[test]
    fn what_a_daemon_says_is_understood() {
        let body = serde_json::json!({
            "class": "client",
            "offered_bytes": 5,
            "lent_used_bytes": 7,
            "borrowed": [
                { "node": "192.0.2.3:7070", "bytes": 16, "state": "ready" },
                { "node": "B", "bytes": 8, "state": "moving" },
            ],
        });
        let answer = format!("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{body}");
        let answer = answer.as_str();
        let said = parse(answer).expect("a body");
        let mut status = Status::default();
        collaboration().hear("B", &said, &mut status);
        let node = status.nodes["B"];
        assert_eq!((node.offered_bytes, node.lent_bytes), (5, Some(7)));
        assert_eq!(node.class, Some(Role::Client));
        assert_eq!(status.lenders_of("B"), ["C"]);
        assert!(status.has("B", "B"), "on its own blade, being left");
    }

    #[test]
    fn a_refusal_is_no_status() {
        assert_eq!(parse("HTTP/1.0 404 Not Found\r\n\r\n{}"), None);
        assert_eq!(parse("HTTP/1.0 200 OK\r\n\r\nnot JSON"), None);
        assert_eq!(parse(""), None);
    }
}
