//! The switching itself: ports, the circuits between them, and forwarding frames along circuits.
//!
//! Invariants:
//! * frames go from one port to another only under the read side of one lock, while a circuit joins
//!   them; circuits change under its write side. So when a call that takes a circuit down has
//!   returned, no frame passes any more;
//! * a port in no circuit keeps no frames (its socket is closed to them), and frames that it may
//!   still hold are discarded before it joins a circuit: a frame never passes over a circuit that
//!   was set up after the frame arrived;
//! * a frame that a thread received before the port's circuits changed is dropped (`changes`).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use farpool_kernel::{read_lock, write_lock};

use super::frame::Frame;
use crate::table::{CircuitTable, Conflict};
use crate::{Circuit, CircuitCounters, DirectionCounters, SwitchError, sys};

/// Most bytes that wait at a port in each direction, as the kernel counts them: over a hundred
/// super-frames. When the buffer is full, further frames are lost and counted, as in a real port's
/// buffer.
const PORT_BUFFER_BYTES: i32 = 8 << 20;
/// Most frames discarded before a port joins a circuit: more than its buffer holds. Discarding ends
/// earlier, because a closed port accepts no more frames.
const MAX_STALE_FRAMES: usize = 64 * 1024;

/// One port: the socket on its interface.
#[derive(Debug)]
pub(super) struct Port {
    socket: OwnedFd,
    /// Number of changes of its circuits.
    changes: AtomicU64,
}

/// The switch without its threads.
#[derive(Debug)]
pub(super) struct Plane {
    pub(super) name: String,
    pub(super) ports: Vec<Port>,
    circuits: RwLock<Circuits>,
}

#[derive(Debug)]
struct Circuits {
    table: CircuitTable,
    carried: BTreeMap<Circuit, Carried>,
}

/// Traffic of a circuit: from the lower port, from the higher port.
#[derive(Debug, Default)]
struct Carried([Direction; 2]);

#[derive(Debug, Default)]
struct Direction {
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
}

impl Port {
    pub(super) fn open(interface: u32) -> io::Result<Self> {
        let socket = sys::packet_socket(interface, PORT_BUFFER_BYTES)?;
        Ok(Self { socket, changes: AtomicU64::new(0) })
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    fn discard(&self) {
        // Called only when a circuit is set up, so the buffer need not be kept.
        let mut frames = [Frame::new()];
        for _ in 0..MAX_STALE_FRAMES {
            // Any other error concerns one frame, or an interface that is gone.
            match sys::receive(self.socket.as_fd(), &mut frames) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    }
}

/// Opens ports without any frame that arrived before. Returns the port that failed, and why.
fn open_empty(ports: &[(u32, &Port)]) -> Result<(), (u32, io::Error)> {
    for (number, port) in ports {
        // A port that could not be closed after its last circuit would take frames meanwhile.
        sys::set_open(&port.socket, false).map_err(|error| (*number, error))?;
        port.discard();
        // Frames lost until now belong to no present circuit.
        let _ = sys::take_lost(&port.socket);
        port.changes.fetch_add(1, SeqCst);
    }
    ports.iter().try_for_each(|(number, port)| {
        sys::set_open(&port.socket, true).map_err(|error| (*number, error))
    })
}

impl Plane {
    pub(super) fn new(name: String, ports: Vec<Port>) -> Self {
        let table = CircuitTable::new(ports.len());
        let circuits = RwLock::new(Circuits { table, carried: BTreeMap::new() });
        Self { name, ports, circuits }
    }

    pub(super) fn circuits(&self) -> Vec<Circuit> {
        self.read().table.circuits()
    }

    pub(super) fn counters(&self) -> Vec<CircuitCounters> {
        let circuits = self.read();
        for (number, port) in (0..).zip(&self.ports) {
            if let Some((_, direction)) = circuits.way(number) {
                // Losses that cannot be read now are counted the next time.
                let lost = sys::take_lost(&port.socket).unwrap_or(0);
                direction.dropped.fetch_add(u64::from(lost), Relaxed);
            }
        }
        let all = circuits.carried.iter();
        all.map(|(circuit, Carried([low, high]))| CircuitCounters {
            circuit: *circuit,
            from_low: low.read(),
            from_high: high.read(),
        })
        .collect()
    }

    pub(super) fn connect(&self, circuit: Circuit) -> Result<(), SwitchError> {
        let mut circuits = self.write();
        if !circuits.table.connect(circuit).map_err(|conflict| self.refused(conflict))? {
            return Ok(());
        }
        let ports = self.ends(circuit);
        if let Err((port, error)) = open_empty(&ports) {
            // If a port stays open, its frames are dropped here instead of in the kernel.
            ports.iter().for_each(|(_, port)| drop(sys::set_open(&port.socket, false)));
            let _ = circuits.table.disconnect(circuit);
            let (switch, reason) = (self.name.clone(), error.to_string());
            return Err(SwitchError::PortFailed { switch, port, reason });
        }
        circuits.carried.insert(circuit, Carried::default());
        Ok(())
    }

    pub(super) fn disconnect(&self, circuit: Circuit) -> Result<(), SwitchError> {
        let mut circuits = self.write();
        if circuits.table.disconnect(circuit).map_err(|conflict| self.refused(conflict))? {
            circuits.carried.remove(&circuit);
            for (_, port) in self.ends(circuit) {
                port.changes.fetch_add(1, SeqCst);
                // If this fails, frames are received and dropped, because there is no circuit.
                let _ = sys::set_open(&port.socket, false);
            }
        }
        Ok(())
    }

    /// Forwards the frames that wait at a port, at most one batch. Returns whether there may be
    /// more.
    pub(super) fn carry(&self, number: u32, batch: &mut [Frame]) -> bool {
        let Some(port) = usize::try_from(number).ok().and_then(|index| self.ports.get(index))
        else {
            return false;
        };
        let changes = port.changes.load(SeqCst);
        let taken = match sys::receive(port.socket.as_fd(), batch) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            // One frame whose offloading cannot be expressed, or an interface that went down or
            // away.
            Err(_) => {
                self.count_dropped(number, 1);
                return true;
            }
        };
        let circuits = self.read();
        if port.changes.load(SeqCst) == changes {
            let frames: Vec<&Frame> =
                batch[..taken].iter().filter(|frame| frame.is_whole()).collect();
            self.pass(&circuits, number, &frames, taken - frames.len());
        }
        taken == batch.len()
    }

    fn pass(&self, circuits: &Circuits, from: u32, mut frames: &[&Frame], spoiled: usize) {
        let Some((to, direction)) = circuits.way(from) else { return };
        let Some(port) = usize::try_from(to).ok().and_then(|index| self.ports.get(index)) else {
            return;
        };
        direction.dropped.fetch_add(spoiled as u64, Relaxed);
        while !frames.is_empty() {
            let done = match sys::send(port.socket.as_fd(), frames) {
                Ok(given) => {
                    let bytes = frames[..given].iter().map(|frame| frame.bytes()).sum::<u64>();
                    direction.frames.fetch_add(given as u64, Relaxed);
                    direction.bytes.fetch_add(bytes, Relaxed);
                    given
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    // A full port loses all remaining frames; any other error concerns one frame.
                    let full = error.kind() == io::ErrorKind::WouldBlock;
                    let lost = if full { frames.len() } else { 1 };
                    direction.dropped.fetch_add(lost as u64, Relaxed);
                    lost
                }
            };
            frames = &frames[done..];
        }
    }

    fn count_dropped(&self, from: u32, frames: u64) {
        if let Some((_, direction)) = self.read().way(from) {
            direction.dropped.fetch_add(frames, Relaxed);
        }
    }

    fn ends(&self, circuit: Circuit) -> Vec<(u32, &Port)> {
        let (low, high) = circuit.ports();
        let port = |number| Some((number, self.ports.get(usize::try_from(number).ok()?)?));
        [low, high].into_iter().filter_map(port).collect()
    }

    fn refused(&self, conflict: Conflict) -> SwitchError {
        let switch = self.name.clone();
        match conflict {
            Conflict::NoPort(port) => SwitchError::NoPort { switch, port },
            Conflict::InUse(port, circuit) => {
                let (low, high) = circuit.ports();
                SwitchError::PortInUse { switch, port, low, high }
            }
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Circuits> {
        read_lock(&self.circuits)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Circuits> {
        write_lock(&self.circuits)
    }
}

impl Circuits {
    /// Returns the port to which frames from `from` go, and their counters.
    fn way(&self, from: u32) -> Option<(u32, &Direction)> {
        let to = self.table.peer(from)?;
        let Carried([low, high]) = self.carried.get(&Circuit::new(from, to)?)?;
        Some((to, if from < to { low } else { high }))
    }
}

impl Direction {
    fn read(&self) -> DirectionCounters {
        DirectionCounters {
            frames: self.frames.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
        }
    }
}

/// The plane, shared by the forwarding and the control threads.
pub(super) type SharedPlane = Arc<Plane>;
