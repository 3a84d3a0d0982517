//! The threads that carry frames.
//!
//! There are at most as many threads as CPUs. Each serves some of the ports, and a port always has
//! the same thread, so the frames of a circuit keep their order. A port without a circuit wakes no
//! thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use farpool_units::exactly;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::frame::Frame;
use super::plane::SharedPlane;
use crate::sys::BATCH_FRAMES;

/// Batches forwarded from one port before the next port has its turn.
const BATCHES_PER_TURN: usize = 4;
/// Most threads: more gain nothing on the machines this is for.
const MAX_THREADS: usize = 8;
/// Most events handled after one wait.
const EVENTS: usize = 32;
/// Data of the stop event in the queue; the data of a port is its number.
const STOP: u64 = u64::MAX;

/// The forwarding threads. Dropping this ends them.
#[derive(Debug)]
pub(super) struct Forwarding {
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Forwarding {
    pub(super) fn start(plane: &SharedPlane) -> io::Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let count = cpus.min(MAX_THREADS).min(plane.ports.len()).max(1);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut forwarding = Self { stop, threads: Vec::new() };
        for index in 0..count {
            let queue = epoll::create(CreateFlags::CLOEXEC)?;
            let watch = |descriptor: &OwnedFd, data| {
                epoll::add(&queue, descriptor, EventData::new_u64(data), EventFlags::IN)
            };
            watch(&forwarding.stop, STOP)?;
            for (number, port) in plane.ports.iter().enumerate().skip(index).step_by(count) {
                watch(port.socket(), number as u64)?;
            }
            let (plane, stop) = (Arc::clone(plane), Arc::clone(&forwarding.stop));
            let thread = std::thread::Builder::new().name(format!("switch-{index}"));
            // The stop event is kept open while a thread waits for it.
            forwarding.threads.push(thread.spawn(move || forward(&plane, &queue, &stop))?);
        }
        Ok(forwarding)
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        // The write can fail only if the event is set already.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, too, as intended.
            let _ = thread.join();
        }
    }
}

fn forward(plane: &SharedPlane, queue: &OwnedFd, _stop: &OwnedFd) {
    let mut batch: Vec<Frame> = (0..BATCH_FRAMES).map(|_| Frame::new()).collect();
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
    loop {
        events.clear();
        match epoll::wait(queue.as_fd(), spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            // The queue is this thread's own; without it nothing can be carried.
            Err(_) => return,
        }
        for event in &events {
            let data = event.data.u64();
            if data == STOP {
                return;
            }
            let port = exactly(data);
            for _ in 0..BATCHES_PER_TURN {
                if !plane.carry(port, &mut batch) {
                    break;
                }
            }
        }
    }
}
