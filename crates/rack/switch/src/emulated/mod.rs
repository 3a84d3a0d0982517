//! An optical circuit switch in software: frames pass between the interfaces of two ports exactly
//! while a circuit joins them, in both directions, unchanged.
//!
//! Invariants:
//! * nothing passes without a circuit, not even ARP ([`plane`] says how);
//! * the switch does not latch: its circuits are only in its memory, and end with it. (Some real
//!   switches keep their mirrors in place without power.)
//! * control runs on threads of its own and waits for at most one batch of frames.

mod control;
mod forward;
pub(crate) mod frame;
mod plane;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use farpool_kernel::fill_random;
use rustix::net::{AddressFamily, SocketType};

use crate::{Circuit, CircuitCounters, SwitchDriver, SwitchError};
pub use control::{ControlServer, MAX_CONNECTIONS};
use forward::Forwarding;
use plane::{Plane, Port, SharedPlane};

/// Most ports of a switch: the size of the smaller optical switches that are sold. More are
/// refused.
pub const MAX_PORTS: usize = 256;

/// A switch that forwards from its opening until it is dropped.
#[derive(Debug)]
pub struct EmulatedSwitch {
    plane: SharedPlane,
    instance: String,
    _forwarding: Forwarding,
}

/// Why a switch cannot be opened or served.
#[derive(Debug, thiserror::Error)]
pub enum EmulatedError {
    /// A switch has from 1 to [`MAX_PORTS`] ports.
    #[error("a switch has from 1 to {MAX_PORTS} ports, not {0}")]
    PortCount(usize),
    /// An interface is given for two ports.
    #[error("interface {0} is given for two ports")]
    Twice(String),
    /// A port's interface cannot be used.
    #[error("interface {interface} cannot be a port: {source}")]
    Port {
        /// Name of the interface.
        interface: String,
        /// The system's error.
        source: io::Error,
    },
    /// The threads that forward cannot be started.
    #[error("cannot start to forward: {0}")]
    Forward(io::Error),
    /// The control socket cannot be made.
    #[error("cannot listen at {}: {source}", path.display())]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl EmulatedSwitch {
    /// Opens a switch whose ports are these interfaces of the calling thread's network namespace;
    /// the first is port 0. It has no circuits. Requires `CAP_NET_RAW` and `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// The number of ports is not supported, or an interface is given twice, does not exist or
    /// cannot be used.
    pub fn open(name: &str, interfaces: &[impl AsRef<str>]) -> Result<Self, EmulatedError> {
        if interfaces.is_empty() || interfaces.len() > MAX_PORTS {
            return Err(EmulatedError::PortCount(interfaces.len()));
        }
        let mut ports = Vec::with_capacity(interfaces.len());
        for (index, interface) in interfaces.iter().enumerate() {
            let interface = interface.as_ref();
            if interfaces[..index].iter().any(|earlier| earlier.as_ref() == interface) {
                return Err(EmulatedError::Twice(interface.to_owned()));
            }
            let port = open_port(interface).map_err(|source| EmulatedError::Port {
                interface: interface.to_owned(),
                source,
            })?;
            ports.push(port);
        }
        let instance = new_instance().map_err(EmulatedError::Forward)?;
        let plane = Arc::new(Plane::new(name.to_owned(), ports));
        let forwarding = Forwarding::start(&plane).map_err(EmulatedError::Forward)?;
        Ok(Self { plane, instance, _forwarding: forwarding })
    }

    /// Serves a unix socket, which only this user may use, until the server is dropped. A socket at
    /// this path that no process serves is replaced.
    ///
    /// # Errors
    /// The socket cannot be created, or another switch serves it.
    pub fn serve(&self, path: impl AsRef<Path>) -> Result<ControlServer, EmulatedError> {
        let path = path.as_ref();
        ControlServer::start(Arc::clone(&self.plane), &self.instance, path)
            .map_err(|source| EmulatedError::Listen { path: path.to_owned(), source })
    }

    /// Name of the switch.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.plane.name
    }

    /// Number of ports.
    #[must_use]
    pub fn ports(&self) -> usize {
        self.plane.ports.len()
    }

    /// Returns the traffic of the switch's circuits, in ascending order.
    #[must_use]
    pub fn counters(&self) -> Vec<CircuitCounters> {
        self.plane.counters()
    }
}

/// For a controller in the same process.
impl SwitchDriver for EmulatedSwitch {
    fn circuits(&mut self) -> Result<Vec<Circuit>, SwitchError> {
        Ok(self.plane.circuits())
    }

    fn connect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.plane.connect(circuit)
    }

    fn disconnect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.plane.disconnect(circuit)
    }
}

fn open_port(interface: &str) -> io::Result<Port> {
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Port::open(rustix::net::netdevice::name_to_index(&any, interface)?)
}

/// Returns a random name of this run of the switch, which no other run has.
fn new_instance() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
