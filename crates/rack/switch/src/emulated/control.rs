//! The control socket of a switch.
//!
//! One thread accepts connections and one serves each of them, so a client that sends or reads
//! nothing delays only itself. Invariants: a request is carried out only when its whole line has
//! arrived and every word of it is understood; dropping the server ends all its threads and removes
//! its socket.

use std::collections::HashMap;
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_kernel::{listen_unix, lock};
use farpool_units::exactly;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::plane::SharedPlane;
use crate::protocol::{
    Answer, Line, MAX_LINE_BYTES, Request, VERSION, Why, line_of, ports_of, read_line,
};
use crate::{Circuit, SwitchError};

/// Most connections at a time: for a controller, its successor, an operator. A further one is
/// refused with a message and closed.
pub const MAX_CONNECTIONS: usize = 16;
/// How long a client may take to accept its answer before it is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// A control socket, served until this is dropped.
#[derive(Debug)]
pub struct ControlServer {
    path: PathBuf,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    plane: SharedPlane,
    greeting: Vec<u8>,
    stop: OwnedFd,
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    open: HashMap<u64, UnixStream>,
    stopped: bool,
}

impl ControlServer {
    pub(super) fn start(plane: SharedPlane, instance: &str, path: &Path) -> io::Result<Self> {
        let listener = listen(path)?;
        let greeting = line_of(&Answer::Switch {
            version: VERSION,
            name: plane.name.clone(),
            instance: instance.to_owned(),
            ports: exactly(plane.ports.len()),
        })?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { plane, greeting, stop, connections: Mutex::default() });
        let mut server =
            Self { path: path.to_owned(), shared: Arc::clone(&shared), acceptor: None };
        let thread = std::thread::Builder::new().name("switch-control".to_owned());
        server.acceptor = Some(thread.spawn(move || accept(&shared, &listener))?);
        Ok(server)
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // The write can fail only if the event is set already.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(acceptor) = self.acceptor.take() {
            // A thread that panicked has ended, too, as intended.
            let _ = acceptor.join();
        }
        // The socket may have been removed already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Creates a listening socket to which no other user can connect at any moment.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another switch answers there"));
    }
    let is_socket =
        |found: std::fs::Metadata| std::os::unix::fs::FileTypeExt::is_socket(&found.file_type());
    if std::fs::symlink_metadata(path).is_ok_and(is_socket) {
        std::fs::remove_file(path)?;
    }
    Ok(listen_unix(path, 0o600, BACKLOG)?.into())
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    loop {
        let mut wanted =
            [PollFd::new(&shared.stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // Interrupted or not, pending input is handled.
        let _ = rustix::event::poll(&mut wanted, None);
        if !wanted[0].revents().is_empty() {
            break;
        }
        threads.retain(|thread| !thread.is_finished());
        // A client that has left already is not an error.
        let Ok((stream, _)) = listener.accept() else { continue };
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("switch-client".to_owned());
        // If no thread can be started, the connection closes, which the client sees.
        threads.extend(thread.spawn(move || shared.attend(&stream)));
    }
    shared.close_all();
    for thread in threads {
        // A thread that panicked has ended, too, as intended.
        let _ = thread.join();
    }
}

impl Shared {
    fn attend(&self, stream: &UnixStream) {
        // If this fails, the client is gone and gets no answer.
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        match self.admit(stream) {
            Ok(Some(number)) => {
                let _ = self.converse(stream);
                self.connections().open.remove(&number);
            }
            Ok(None) => {
                let message = format!("there are {MAX_CONNECTIONS} connections already");
                let _ = say(stream, &Answer::Refused { why: Why::Busy {}, message });
            }
            Err(_) => {}
        }
        let _ = stream.shutdown(Shutdown::Both);
    }

    /// Returns a number for a new connection. Returns None if there are too many, or the server
    /// ends.
    fn admit(&self, stream: &UnixStream) -> io::Result<Option<u64>> {
        let copy = stream.try_clone()?;
        let mut connections = self.connections();
        if connections.stopped || connections.open.len() >= MAX_CONNECTIONS {
            return Ok(None);
        }
        connections.next += 1;
        let number = connections.next;
        connections.open.insert(number, copy);
        Ok(Some(number))
    }

    fn converse(&self, mut stream: &UnixStream) -> io::Result<()> {
        stream.write_all(&self.greeting)?;
        let mut reader = BufReader::new(stream);
        loop {
            match read_line(&mut reader, MAX_LINE_BYTES)? {
                Line::Whole(line) => say(stream, &self.answer(&line))?,
                Line::TooLong => {
                    let message = format!("a request has at most {MAX_LINE_BYTES} bytes");
                    return say(stream, &Answer::Refused { why: Why::TooLong {}, message });
                }
                Line::End => return Ok(()),
            }
        }
    }

    fn answer(&self, line: &[u8]) -> Answer {
        match serde_json::from_slice(line) {
            Ok(request) => self.carry_out(&request),
            Err(error) => malformed(format!("not a request: {error}")),
        }
    }

    fn carry_out(&self, request: &Request) -> Answer {
        let change = |ports: &[u32; 2], how: &dyn Fn(Circuit) -> Result<(), SwitchError>| {
            let [one, other] = *ports;
            match Circuit::new(one, other).map(how) {
                None => malformed(format!("a circuit joins two ports, not {one} with itself")),
                Some(Ok(())) => Answer::Done {},
                Some(Err(error)) => Answer::refusal(&error),
            }
        };
        match request {
            Request::Circuits {} => {
                let circuits = self.plane.circuits().into_iter().map(ports_of).collect();
                Answer::Circuits { circuits }
            }
            Request::Counters {} => {
                let counters = self.plane.counters();
                Answer::Counters { circuits: counters.iter().map(Into::into).collect() }
            }
            Request::Connect { ports } => change(ports, &|circuit| self.plane.connect(circuit)),
            Request::Disconnect { ports } => {
                change(ports, &|circuit| self.plane.disconnect(circuit))
            }
        }
    }

    fn close_all(&self) {
        let mut connections = self.connections();
        connections.stopped = true;
        for stream in connections.open.values() {
            // The stream may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        lock(&self.connections)
    }
}

fn malformed(message: String) -> Answer {
    Answer::Refused { why: Why::Malformed {}, message }
}

fn say(mut stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    stream.write_all(&line_of(answer)?)
}
