//! The threads that carry frames.
//!
//! There are at most as many as CPUs; each serves some of the ports, and a port always the same
//! thread, so frames of a circuit keep their order. A port without a circuit wakes no thread.

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

/// Batches from one port before the next one has its turn.
const BATCHES_PER_TURN: usize = 4;
/// More threads than this gain nothing on the machines this is for.
const MAX_THREADS: usize = 8;
/// Ports that are looked at after one wait.
const EVENTS: usize = 32;
/// What the stop event is known by; ports are known by their numbers.
const STOP: u64 = u64::MAX;

/// The threads; dropping it ends them.
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
        // It can only fail when it is set already.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, which is what is wanted.
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
