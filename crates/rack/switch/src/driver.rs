//! Drives an emulated switch in another process, over its control socket.
//!
//! A broken connection is replaced by the next call. If the switch was restarted meanwhile (another
//! instance greets), that call fails with [`SwitchError::Restarted`] and does nothing else, because
//! its caller has to know that circuits are gone. If it is the same instance, the call is carried
//! out. This is harmless if it was carried out before, because every call is idempotent.

use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::protocol::{
    Answer, Line, MAX_ANSWER_BYTES, Request, VERSION, line_of, ports_of, read_line,
};
use crate::{Circuit, CircuitCounters, SwitchDriver, SwitchError};

/// Longest wait for an answer: a switch answers within microseconds, so one that takes longer is
/// treated as gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A driver of the switch that listens at a path.
#[derive(Debug)]
pub struct EmulatedSwitchDriver {
    path: PathBuf,
    name: String,
    instance: String,
    ports: u32,
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    stream: BufReader<UnixStream>,
}

/// A switch's description of itself in its greeting.
struct Greeting {
    name: String,
    instance: String,
    ports: u32,
}

impl EmulatedSwitchDriver {
    /// Connects to the switch whose control socket is at `path`.
    ///
    /// # Errors
    /// No switch answers there.
    pub fn connect_to(path: impl Into<PathBuf>) -> Result<Self, SwitchError> {
        let path = path.into();
        let (connection, greeting) = Connection::open(&path)
            .map_err(|error| unreachable(path.display().to_string(), error))?;
        let Greeting { name, instance, ports } = greeting;
        Ok(Self { path, name, instance, ports, connection: Some(connection) })
    }

    /// Returns a driver of the switch whose control socket is, or will be, at `path`. The first
    /// call connects. Until the switch has answered, the driver has this name and no ports.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        let (path, name) = (path.into(), name.into());
        Self { path, name, instance: String::new(), ports: 0, connection: None }
    }

    /// The switch's name: its own once it has answered.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of ports, which are numbered from 0.
    #[must_use]
    pub fn ports(&self) -> u32 {
        self.ports
    }

    /// Returns the traffic of the switch's circuits, in ascending order.
    ///
    /// # Errors
    /// The switch does not answer.
    pub fn counters(&mut self) -> Result<Vec<CircuitCounters>, SwitchError> {
        match self.ask(&Request::Counters {})? {
            Answer::Counters { circuits } => {
                let all = circuits.iter().map(|counted| counted.counters()).collect();
                self.sensible(all)
            }
            other => Err(self.nonsense(&other)),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, SwitchError> {
        if let Some(connection) = &mut self.connection {
            match connection.ask(request) {
                Ok(answer) => return self.accepted(answer),
                Err(error) => {
                    self.connection = None;
                    // A switch that hangs would hang again.
                    if error.kind() == io::ErrorKind::WouldBlock {
                        return Err(unreachable(&self.name, error));
                    }
                }
            }
        }
        self.reconnect()?;
        let answer = self.connection.as_mut().map(|connection| connection.ask(request));
        match answer.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into())) {
            Ok(answer) => self.accepted(answer),
            Err(error) => {
                self.connection = None;
                Err(unreachable(&self.name, error))
            }
        }
    }

    fn reconnect(&mut self) -> Result<(), SwitchError> {
        let (connection, greeting) =
            Connection::open(&self.path).map_err(|error| unreachable(&self.name, error))?;
        self.connection = Some(connection);
        // A switch that has never answered cannot have lost circuits of this driver.
        let restarted = !self.instance.is_empty() && greeting.instance != self.instance;
        Greeting { name: self.name, instance: self.instance, ports: self.ports } = greeting;
        if restarted {
            return Err(SwitchError::Restarted { switch: self.name.clone() });
        }
        Ok(())
    }

    fn accepted(&mut self, answer: Answer) -> Result<Answer, SwitchError> {
        let Answer::Refused { why, message } = answer else {
            return Ok(answer);
        };
        let error = why.into_error(self.name.clone(), message);
        if matches!(error, SwitchError::Unreachable { .. }) {
            self.connection = None;
        }
        Err(error)
    }

    fn done(&mut self, request: &Request) -> Result<(), SwitchError> {
        match self.ask(request)? {
            Answer::Done {} => Ok(()),
            other => Err(self.nonsense(&other)),
        }
    }

    fn nonsense(&mut self, answer: &Answer) -> SwitchError {
        self.connection = None;
        let reason = format!("its answer belongs to another question: {answer:?}");
        SwitchError::Unreachable { switch: self.name.clone(), reason }
    }

    fn sensible<T>(&mut self, told: Option<T>) -> Result<T, SwitchError> {
        told.ok_or_else(|| SwitchError::Unreachable {
            switch: self.name.clone(),
            reason: "it tells of a circuit of one port".to_owned(),
        })
    }
}

impl SwitchDriver for EmulatedSwitchDriver {
    fn circuits(&mut self) -> Result<Vec<Circuit>, SwitchError> {
        match self.ask(&Request::Circuits {})? {
            Answer::Circuits { circuits } => {
                let all = circuits.iter().map(|[low, high]| Circuit::new(*low, *high)).collect();
                self.sensible(all)
            }
            other => Err(self.nonsense(&other)),
        }
    }

    fn connect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.done(&Request::Connect { ports: ports_of(circuit) })
    }

    fn disconnect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.done(&Request::Disconnect { ports: ports_of(circuit) })
    }
}

impl Connection {
    fn open(path: &Path) -> io::Result<(Self, Greeting)> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let mut connection = Self { stream: BufReader::new(stream) };
        match connection.answer()? {
            Answer::Switch { version: VERSION, name, instance, ports } => {
                Ok((connection, Greeting { name, instance, ports }))
            }
            Answer::Switch { version, .. } => Err(io::Error::other(format!(
                "it speaks version {version} of the protocol, this driver {VERSION}"
            ))),
            Answer::Refused { message, .. } => Err(io::Error::other(message)),
            _ => Err(io::Error::other("it does not greet as a switch does")),
        }
    }

    fn ask(&mut self, request: &Request) -> io::Result<Answer> {
        self.stream.get_mut().write_all(&line_of(request)?)?;
        self.answer()
    }

    fn answer(&mut self) -> io::Result<Answer> {
        match read_line(&mut self.stream, MAX_ANSWER_BYTES)? {
            Line::Whole(line) => Ok(serde_json::from_slice(&line)?),
            Line::TooLong => Err(io::Error::other("its answer has no end")),
            Line::End => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn unreachable(switch: impl ToString, error: io::Error) -> SwitchError {
    let reason = match error.kind() {
        io::ErrorKind::WouldBlock => format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()),
        _ => error.to_string(),
    };
    SwitchError::Unreachable { switch: switch.to_string(), reason }
}
