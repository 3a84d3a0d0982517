//! The gate, by which a forking thread has the pager to itself.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use farpool_uffd::Uffd;

use crate::abort::fail_closed;
use crate::sys;

/// Lets a forking thread have the pager to itself.
///
/// While the gate is shut, only faults of the forking thread are served, and none at all until the
/// steward has brought everything to rest. Other faults are passed over and their threads woken
/// afterwards, so that they are reported again. The page table and the states that a child inherits
/// are therefore of one moment.
///
/// Nothing is noted of faults that are passed over, so a fault thread may be stopped anywhere. If
/// it saw the gate shut, it had read its message before the gate opened, and the wake-up that
/// follows the opening reaches every thread whose fault the kernel has reported until then, read or
/// not. If it saw the gate open, it serves the fault.
#[derive(Debug, Default)]
pub struct Gate {
    /// The only thread that may pass; 0 = open.
    holder: AtomicU32,
    /// Fault threads that have something under way.
    inside: AtomicU32,
}

impl Gate {
    /// Enters for a fault of `thread`. False while another thread holds the gate: the fault is
    /// reported again later.
    pub fn enter(&self, thread: u32, _page_address: usize) -> bool {
        self.inside.fetch_add(1, SeqCst);
        let holder = self.holder.load(SeqCst);
        if holder == 0 || holder == thread {
            return true;
        }
        self.leave();
        false
    }

    pub fn leave(&self) {
        self.inside.fetch_sub(1, SeqCst);
    }

    pub fn is_shut(&self) -> bool {
        self.holder.load(SeqCst) != 0
    }

    /// Shuts the gate for all and waits until no fault thread is inside. The forking thread waits
    /// for the steward and has no fault: a message of it that was read earlier and is only handled
    /// now is stale.
    pub fn shut(&self) {
        self.holder.store(NOBODY, SeqCst);
        while self.inside.load(SeqCst) != 0 {
            sys::pause();
        }
    }

    /// Lets the forking thread pass, once everything is at rest.
    pub fn admit(&self, thread: u32, uffd: &Uffd) {
        self.change_holder(thread, uffd);
    }

    /// Opens the gate and has all faults reported again.
    pub fn open(&self, uffd: &Uffd) {
        self.change_holder(0, uffd);
    }

    fn change_holder(&self, holder: u32, uffd: &Uffd) {
        self.holder.store(holder, SeqCst);
        if let Err(error) = uffd.wake_all() {
            fail_closed(&format!("threads that wait for pages cannot be woken: {error}"));
        }
    }
}

/// As holder of the gate: no thread may pass (no thread has this number).
const NOBODY: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_uffd::{Message, register_mode};
    use farpool_units::PAGE_BYTES;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    const PAGES: usize = 2048;

    fn registered() -> Option<(&'static Uffd, usize)> {
        let uffd = match Uffd::open(farpool_uffd::features::THREAD_ID, true) {
            Ok(uffd) => Box::leak(Box::new(uffd)),
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                return None;
            }
        };
        let area = sys::map_local(PAGES * PAGE_BYTES).expect("map");
        uffd.register(area, PAGES * PAGE_BYTES, register_mode::MISSING).expect("register");
        Some((uffd, area))
    }

    fn touch(address: usize) {
        // SAFETY: a page of the test's own mapping, which is never unmapped.
        unsafe { std::ptr::read_volatile(address as *const u8) };
    }

    /// Touching threads, two fault threads, and a gate that is shut and opened all the time: every
    /// fault is served in the end.
    #[test]
    fn no_fault_is_forgotten_when_the_gate_opens() {
        let Some((uffd, area)) = registered() else { return };
        let gate: &'static Gate = Box::leak(Box::default());
        let over: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let serve = move || {
            let mut messages = [Message::default(); 2];
            while !over.load(SeqCst) {
                for message in uffd.read(&mut messages).unwrap_or_default() {
                    let event = message.event();
                    let address = event.page_address.expect("a page fault");
                    if gate.enter(event.thread, address) {
                        uffd.zero(address, PAGE_BYTES, false);
                        uffd.wake(address, PAGE_BYTES).expect("wake");
                        gate.leave();
                    }
                }
                std::thread::yield_now();
            }
        };
        let servers = [std::thread::spawn(serve), std::thread::spawn(serve)];
        let touchers: Vec<_> = (0..4)
            .map(|first| {
                std::thread::spawn(move || {
                    (first..PAGES).step_by(4).for_each(|page| touch(area + page * PAGE_BYTES));
                })
            })
            .collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        while touchers.iter().any(|toucher| !toucher.is_finished()) {
            gate.shut();
            gate.admit(sys::thread_id(), uffd);
            gate.open(uffd);
            assert!(Instant::now() < deadline, "a fault was forgotten");
            std::thread::yield_now();
        }
        over.store(true, SeqCst);
        for server in servers {
            server.join().expect("server");
        }
    }

    #[test]
    fn only_the_holder_passes_and_only_when_it_is_admitted() {
        let Some((uffd, area)) = registered() else { return };
        let gate = Gate::default();
        let tries = || [1, 2].map(|thread| gate.enter(thread, area));
        gate.shut();
        assert_eq!(tries(), [false, false]);
        gate.admit(2, uffd);
        assert_eq!(tries(), [false, true]);
        gate.leave();
        gate.open(uffd);
        assert_eq!(tries(), [true, true]);
        assert_eq!(gate.inside.load(SeqCst), 2);
    }
}
