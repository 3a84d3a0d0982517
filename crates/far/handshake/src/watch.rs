//! Connections that were handed over: whoever has one is told within a second that its blade is not
//! to be trusted any more.
//!
//! The socket on which a connection was asked for stays open for that; it is closed by the asking
//! side together with the connection.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use farpool_fabric::tell_untrusted;
use farpool_identity::{
    CHECK_EVERY, ConnectionId, Credentials, Live, LiveConnections, Peer, Refusal, Stale, UnixTime,
};
use farpool_kernel::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Most connections that are watched at a time; more are refused, to be asked for again. Each takes
/// a descriptor, and a program can have its keeper asked as often as it likes.
const WATCHED_LIMIT: usize = 4096;

#[derive(Debug)]
pub(crate) struct Watch {
    credentials: Arc<Credentials>,
    live: Arc<LiveConnections>,
    handed_over: Mutex<HashMap<ConnectionId, HandedOver>>,
    is_started: Mutex<bool>,
    tell: fn(&str),
}

#[derive(Debug)]
struct HandedOver {
    asker: OwnedFd,
    /// As long as it is there, the connection is looked at.
    _live: Live,
}

impl Watch {
    pub(crate) fn new(credentials: Arc<Credentials>, tell: fn(&str)) -> Arc<Watch> {
        Arc::new(Watch {
            live: LiveConnections::new(Arc::clone(&credentials)),
            credentials,
            handed_over: Mutex::default(),
            is_started: Mutex::default(),
            tell,
        })
    }

    /// Starts to look for changes, in a thread that ends with this.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut is_started = lock(&self.is_started);
        if !*is_started {
            let own = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("farpool-certs".into());
            thread.spawn(move || look_while_there(&own))?;
            *is_started = true;
        }
        Ok(())
    }

    /// Connections that are watched now.
    pub(crate) fn count(&self) -> usize {
        self.live.count()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count() >= WATCHED_LIMIT
    }

    /// Notes a connection whose handshake is complete.
    ///
    /// # Errors
    /// Its peer is not to be trusted any more.
    pub(crate) fn admit(&self, peer: Peer, now: UnixTime) -> Result<Live, Refusal> {
        self.live.admit(peer, now)
    }

    /// Watches a connection for whoever asked for it.
    pub(crate) fn hand_over(&self, asker: OwnedFd, live: Live) {
        lock(&self.handed_over).insert(live.id(), HandedOver { asker, _live: live });
    }

    fn check(&self, stale: &mut Stale) {
        let now = UnixTime::now();
        if let Some(error) = stale.note(&self.credentials.reload(now)) {
            (self.tell)(&format!("certificates cannot be read anew; those in force stay: {error}"));
        }
        self.forget_closed();
        // There are several connections to each blade.
        let mut left = BTreeSet::new();
        for ended in self.live.check(now) {
            // One that is just being handed over is found again.
            let Some(handed) = lock(&self.handed_over).remove(&ended.id) else { continue };
            tell_untrusted(&handed.asker, &ended.why.to_string());
            left.insert((ended.peer.certificate.identity.to_string(), ended.why.to_string()));
        }
        for (blade, why) in left {
            (self.tell)(&format!("{blade} is left: {why}"));
        }
    }

    /// Forgets connections that the asking side has closed.
    fn forget_closed(&self) {
        let mut handed_over = lock(&self.handed_over);
        let ids: Vec<ConnectionId> = handed_over.keys().copied().collect();
        let closed: Vec<ConnectionId> = {
            let one = |id: &ConnectionId| PollFd::new(&handed_over[id].asker, PollFlags::empty());
            let mut polled: Vec<PollFd<'_>> = ids.iter().map(one).collect();
            // A failure (no memory) leaves them until the next time.
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut polled, Some(&at_once)).is_err() {
                return;
            }
            let all = ids.iter().zip(&polled);
            let closed = all.filter(|(_, one)| one.revents().contains(PollFlags::HUP));
            closed.map(|(id, _)| *id).collect()
        };
        closed.iter().for_each(|id| drop(handed_over.remove(id)));
    }
}

fn look_while_there(watch: &Weak<Watch>) {
    let mut stale = Stale::default();
    loop {
        std::thread::sleep(CHECK_EVERY);
        let Some(watch) = watch.upgrade() else { return };
        watch.check(&mut stale);
    }
}
