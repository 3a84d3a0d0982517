//! Switch drivers: the trait through which the controller sets circuits up and takes them down.
//!
//! A circuit joins two ports of one switch, in both directions; a port is in one circuit at most.
//! Ports are numbered from 0, as topologies number them. Calls may block; the controller makes them
//! from threads that may wait.
//!
//! * [`PacketNetwork`]: forwards from any port to any port, so there is nothing to set;
//! * [`EmulatedSwitch`]: a circuit switch in software that really forwards Ethernet frames between
//!   network interfaces, only along circuits; [`EmulatedSwitchDriver`] drives one in another
//!   process.

mod driver;
mod emulated;
mod protocol;
mod sys;
mod table;

pub use driver::EmulatedSwitchDriver;
pub use emulated::{ControlServer, EmulatedError, EmulatedSwitch, MAX_CONNECTIONS, MAX_PORTS};
pub use protocol::MAX_LINE_BYTES;

/// One switch, as the controller drives it.
pub trait SwitchDriver: Send {
    /// Returns the circuits that are set up, each with its lower port first, in ascending order.
    ///
    /// # Errors
    /// The switch does not answer.
    fn circuits(&mut self) -> Result<Vec<Circuit>, SwitchError>;

    /// Sets a circuit up. Does nothing if it is up already.
    ///
    /// # Errors
    /// There is no such port, a port is in another circuit or its interface fails, or the switch
    /// does not answer. Nothing has changed then, except that a switch that does not answer may
    /// have carried out the call.
    fn connect(&mut self, circuit: Circuit) -> Result<(), SwitchError>;

    /// Takes a circuit down. Does nothing if it is not up.
    ///
    /// # Errors
    /// There is no such port, or the switch does not answer.
    fn disconnect(&mut self, circuit: Circuit) -> Result<(), SwitchError>;
}

/// Two ports of a switch, joined. The lower one comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Circuit {
    low: u32,
    high: u32,
}

impl Circuit {
    /// Returns the circuit of two ports, given in either order. Returns None if they are the same
    /// port.
    #[must_use]
    pub fn new(a: u32, b: u32) -> Option<Self> {
        (a != b).then(|| Self { low: a.min(b), high: a.max(b) })
    }

    /// Both ports, the lower one first.
    #[must_use]
    pub fn ports(self) -> (u32, u32) {
        (self.low, self.high)
    }
}

/// Traffic of a circuit since it was set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CircuitCounters {
    /// The circuit.
    pub circuit: Circuit,
    /// From its lower port to its higher one.
    pub from_low: DirectionCounters,
    /// From its higher port to its lower one.
    pub from_high: DirectionCounters,
}

/// Traffic of one direction of a circuit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectionCounters {
    /// Frames carried. A frame that is to be segmented later (64 KiB of TCP, for example) counts
    /// once.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Frames lost: a port's buffer was full, its interface was down, or the frame could not be
    /// carried.
    pub dropped: u64,
}

/// Why a call on a switch failed.
#[derive(Debug, thiserror::Error)]
pub enum SwitchError {
    /// A port number the switch does not have.
    #[error("switch {switch} has no port {port}")]
    NoPort {
        /// The switch's name.
        switch: String,
        /// The port asked for.
        port: u32,
    },
    /// A port that is in another circuit.
    #[error("port {port} of switch {switch} is in the circuit {low}-{high}; take that down first")]
    PortInUse {
        /// The switch's name.
        switch: String,
        /// The port asked for.
        port: u32,
        /// Lower port of the circuit that it is in.
        low: u32,
        /// Higher port of that circuit.
        high: u32,
    },
    /// A port that cannot be set because its interface fails; nothing has changed.
    #[error("port {port} of switch {switch} cannot be set: {reason}")]
    PortFailed {
        /// The switch's name.
        switch: String,
        /// The port asked for.
        port: u32,
        /// What happened.
        reason: String,
    },
    /// The switch was restarted since the last call: every circuit set up before is gone, and this
    /// call has changed nothing. Reported once; the next call is carried out.
    #[error(
        "switch {switch} was started again: all its circuits are gone and must be set up again"
    )]
    Restarted {
        /// The switch's name.
        switch: String,
    },
    /// The switch cannot be reached or gives no valid answer.
    #[error("switch {switch} does not answer: {reason}")]
    Unreachable {
        /// The switch's name.
        switch: String,
        /// What happened.
        reason: String,
    },
}

/// A packet network: it forwards from any port to any port, so there is nothing to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PacketNetwork;

impl SwitchDriver for PacketNetwork {
    fn circuits(&mut self) -> Result<Vec<Circuit>, SwitchError> {
        Ok(Vec::new())
    }

    fn connect(&mut self, _circuit: Circuit) -> Result<(), SwitchError> {
        Ok(())
    }

    fn disconnect(&mut self, _circuit: Circuit) -> Result<(), SwitchError> {
        Ok(())
    }
}
