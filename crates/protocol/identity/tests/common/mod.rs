//! An authority in a folder of its own, and connections between two sides that have its
//! certificates.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use farpool_identity::authority::{Authority, Host, Issued, Request};
use farpool_identity::{Credentials, Files, Peer, Role, Side, explain};
use rustls::pki_types::{ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

/// Longest time that a side waits for the other; only a fault makes one wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) type ServerStream = StreamOwned<ServerConnection, UnixStream>;
pub(crate) type ClientStream = StreamOwned<ClientConnection, UnixStream>;

pub(crate) struct Rack {
    pub(crate) authority: Authority,
    /// The authority is in its subfolder `pki`.
    _folder: tempfile::TempDir,
}

impl Rack {
    pub(crate) fn new() -> Self {
        Self::at(UnixTime::now())
    }

    /// A rack whose authority was made at a time.
    pub(crate) fn at(now: UnixTime) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rack = "rack".parse().expect("a name");
        let authority = Authority::init(&folder.path().join("pki"), rack, now).expect("made");
        Self { authority, _folder: folder }
    }

    pub(crate) fn issue(&mut self, role: &str) -> Issued {
        self.issue_at(role, UnixTime::now())
    }

    pub(crate) fn issue_at(&mut self, role: &str, now: UnixTime) -> Issued {
        let role = role_of(role);
        let hosts: Vec<Host> = match role.may_serve() {
            true => ["127.0.0.1", "a.example"].map(|it| it.parse().expect("a host")).into(),
            false => Vec::new(),
        };
        self.authority.issue(Request { role, hosts, days: 1 }, now).expect("issued")
    }

    /// Credentials of a new identity.
    pub(crate) fn credentials(&mut self, role: &str) -> Arc<Credentials> {
        load(&self.issue(role).folder)
    }
}

pub(crate) fn role_of(path: &str) -> Role {
    let identity: farpool_identity::Identity =
        format!("spiffe://rack/{path}").parse().expect("an identity");
    identity.role
}

pub(crate) fn load(folder: &Path) -> Arc<Credentials> {
    Credentials::load(Files::in_folder(folder), UnixTime::now()).expect("credentials")
}

/// A time some seconds from now, before it if negative.
pub(crate) fn from_now(seconds: i64) -> UnixTime {
    let now = UnixTime::now().as_secs();
    UnixTime::since_unix_epoch(Duration::from_secs(now.saturating_add_signed(seconds)))
}

/// What each side says of the other after a handshake and a byte in each direction.
pub(crate) struct Meeting {
    pub(crate) at_server: Result<Peer, String>,
    pub(crate) at_client: Result<Peer, String>,
}

/// Two ends of a connection before their handshake.
pub(crate) fn pair(
    server: ServerConfig,
    client: ClientConfig,
    address: &str,
) -> (ServerStream, ClientStream) {
    let (one, other) = UnixStream::pair().expect("sockets");
    for socket in [&one, &other] {
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    }
    let address = ServerName::try_from(address.to_owned()).expect("an address");
    let server = ServerConnection::new(Arc::new(server)).expect("a server");
    let client = ClientConnection::new(Arc::new(client), address).expect("a client");
    (StreamOwned::new(server, one), StreamOwned::new(client, other))
}

/// Connects the two.
pub(crate) fn meet(server: ServerConfig, client: ClientConfig, address: &str) -> Meeting {
    let (mut server, mut client) = pair(server, client, address);
    // Both sockets stay open to the end: a client that still writes has to find the alert.
    std::thread::scope(|scope| {
        let at_server = scope.spawn(|| {
            let ended = greet(&mut server, true);
            // What the session has left to say, such as why it ends.
            let _ = server.conn.write_tls(&mut server.sock);
            ended?;
            Peer::of(&server.conn, Side::Client).map_err(|refusal| refusal.to_string())
        });
        let at_client = greet(&mut client, false).and_then(|()| {
            Peer::of(&client.conn, Side::Server).map_err(|refusal| refusal.to_string())
        });
        let _ = client.conn.write_tls(&mut client.sock);
        Meeting { at_server: at_server.join().expect("no panic"), at_client }
    })
}

/// A byte in each direction; the server hears first.
fn greet(stream: &mut (impl Read + Write), hears_first: bool) -> Result<(), String> {
    let told = |error: std::io::Error| explain(&error).unwrap_or_else(|| error.to_string());
    let mut byte = [0];
    if hears_first {
        stream.read_exact(&mut byte).map_err(told)?;
    }
    stream.write_all(b"x").and_then(|()| stream.flush()).map_err(told)?;
    if !hears_first {
        stream.read_exact(&mut byte).map_err(told)?;
    }
    Ok(())
}
