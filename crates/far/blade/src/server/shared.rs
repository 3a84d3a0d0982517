//! What a server's threads have in common.

use super::certified::Certified;
use super::toll::Rates;
use crate::audit::Asker;
use crate::blade::Blade;
use crate::gate::Gate;
use crate::sources::{Presence, Source};
use crate::table::{ClientNumber, Refused};
use farpool_kernel::{LogRate, lock};
use farpool_units::at_most;
use farpool_wire::ErrorCode;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) blade: Arc<Blade>,
    /// The certificates that TCP is served with, if there are any.
    pub(super) certified: Option<Arc<Certified>>,
    pub(super) control_rates: Rates,
    stop: AtomicBool,
    mailboxes: Vec<Mailbox>,
    slots: Mutex<HashMap<(ClientNumber, u32), SlotHolder>>,
    /// Lines that peers can cause in the log as often as they like.
    pub(super) bad_frames_log: LogRate,
    pub(super) lost_log: LogRate,
    pub(super) turned_away_log: LogRate,
    refused_log: LogRate,
}

/// The connection that holds a slot of a client now.
#[derive(Debug)]
struct SlotHolder {
    generation: u32,
    gate: Arc<Gate>,
}

/// New connections on their way to a thread.
#[derive(Debug)]
pub(super) struct Mailbox {
    arrivals: Mutex<Vec<Arrival>>,
    pub(super) wake: OwnedFd,
}

/// A new connection.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) socket: OwnedFd,
    pub(super) presence: Presence,
}

impl Shared {
    pub(super) fn new(
        blade: Arc<Blade>,
        certified: Option<Arc<Certified>>,
        threads: usize,
    ) -> io::Result<Shared> {
        let mailboxes: Vec<_> = (0..threads).map(|_| Mailbox::new()).collect::<io::Result<_>>()?;
        let wakes = mailboxes.iter().map(|mailbox| mailbox.wake.try_clone());
        blade.wakes(wakes.collect::<io::Result<_>>()?);
        Ok(Shared {
            control_rates: Rates::new(blade.config().control_requests_per_s),
            blade,
            certified,
            stop: AtomicBool::new(false),
            mailboxes,
            slots: Mutex::default(),
            bad_frames_log: LogRate::default(),
            lost_log: LogRate::default(),
            turned_away_log: LogRate::default(),
            refused_log: LogRate::default(),
        })
    }

    /// Logs why a peer is refused before it is known who it is.
    pub(super) fn say_refused(&self, source_of: Source, why: &str) {
        self.blade.audit.note(Some(ErrorCode::CertificateNeeded), || {
            let asker = Asker { who: "nobody known".into(), from: Some(source_of.to_string()) };
            (asker, format!("connect: {why}"))
        });
        if self.refused_log.may_write(self.now()) {
            tracing::warn!(%source_of, "a connection is refused: {why}");
        }
    }

    /// Time since the blade started.
    pub(super) fn now(&self) -> Duration {
        self.blade.now()
    }

    /// Logs how many lines were suppressed, when that is due.
    pub(super) fn tell_hidden_lines(&self, now: Duration) {
        self.blade.tell_hidden_lines(now);
        if let Some((more, seconds)) = self.bad_frames_log.more(now) {
            tracing::warn!(
                "{more} more connections were closed for what they sent in the last {seconds} s"
            );
        }
        if let Some((more, seconds)) = self.lost_log.more(now) {
            tracing::warn!("{more} more connections were lost in the last {seconds} s");
        }
        if let Some((more, seconds)) = self.turned_away_log.more(now) {
            tracing::warn!("{more} more connections were turned away in the last {seconds} s");
        }
        if let Some((more, seconds)) = self.refused_log.more(now) {
            tracing::warn!("{more} more connections were refused in the last {seconds} s");
        }
    }

    /// The same in nanoseconds, for rates.
    pub(super) fn now_ns(&self) -> u64 {
        at_most(self.now().as_nanos())
    }

    pub(super) fn threads(&self) -> usize {
        self.mailboxes.len()
    }

    pub(super) fn mailbox(&self, thread: usize) -> &Mailbox {
        &self.mailboxes[thread]
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Tells all threads to end.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.mailboxes.iter().for_each(Mailbox::wake);
        self.blade.wake_scrubber();
        self.blade.end_engine();
        self.blade.audit.stop();
        if let Some(certified) = &self.certified {
            certified.stop();
        }
    }

    /// Gives the client's slot to a connection of `generation`. Returns once older ones cannot work
    /// any more. Waits only for connections of older generations, so that two of these never wait
    /// for each other.
    pub(super) fn take_slot(
        &self,
        client: ClientNumber,
        slot: u32,
        generation: u32,
        gate: &Arc<Gate>,
    ) -> Result<(), Refused> {
        let mut slots = lock(&self.slots);
        if let Some(holder) = slots.get(&(client, slot))
            && holder.generation >= generation
        {
            return Err(Refused::new(ErrorCode::Stale, u64::from(holder.generation)));
        }
        let holder = SlotHolder { generation, gate: Arc::clone(gate) };
        let older = slots.insert((client, slot), holder);
        drop(slots);
        if let Some(older) = older {
            older.gate.fence();
        }
        Ok(())
    }

    /// Frees the slot of a closed connection if it still holds it.
    pub(super) fn leave_slot(&self, client: ClientNumber, slot: u32, generation: u32) {
        let mut slots = lock(&self.slots);
        if slots.get(&(client, slot)).is_some_and(|holder| holder.generation == generation) {
            slots.remove(&(client, slot));
        }
    }
}

impl Mailbox {
    fn new() -> io::Result<Mailbox> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Mailbox { arrivals: Mutex::default(), wake })
    }

    pub(super) fn deliver(&self, arrival: Arrival) {
        lock(&self.arrivals).push(arrival);
        self.wake();
    }

    /// Takes everything that was delivered since the last call.
    pub(super) fn empty(&self) -> Vec<Arrival> {
        let mut count = [0; 8];
        // An empty counter is fine, too.
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *lock(&self.arrivals))
    }

    fn wake(&self) {
        // A full counter wakes it too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}
